"""Middleware that gives every request an id, for its answer (`Locum-Request`), log lines and problems.

The outermost middleware. It also handles every uncaught error: an unexpected one becomes a plain 500 problem,
with its text in the log only; a client that disconnected is not an error.
"""

from __future__ import annotations

import json
import logging
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.tracing import current_request

REQUEST_HEADER = "Locum-Request"

_log = logging.getLogger("locum.service")


class RequestIdMiddleware:
    """ASGI middleware: gives the request its id and the response its `Locum-Request` header."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application inside the request's scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # A client's own id is ignored: ids must be unique, and logs must have no text from outside.
        request_id = str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = request_id
        token = current_request.set(request_id)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_HEADER] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            _log.info("the client went away before its request was complete")
        except Exception as error:
            _log.error("unexpected %s while answering", type(error).__name__, exc_info=error)
            if started:
                raise
            await _internal_error(request_id, send_with_id)
        finally:
            current_request.reset(token)


async def _internal_error(request_id: str, send: Send) -> None:
    """Answer 500 without any of the error's own words: they may hold paths or a patient's file name."""
    body = json.dumps(
        {
            "type": "urn:locum:problem:internal-error",
            "title": "Internal error",
            "status": 500,
            "detail": "The service failed while answering; its log holds the cause under this request's id.",
            "instance": f"urn:uuid:{request_id}",
        }
    ).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})
