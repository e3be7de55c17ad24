"""Middleware for what every route owes to HTTP: HEAD beside GET, and addresses under a proxy's prefix.

A proxy that serves this service at https://host/locum strips `/locum`; the server adds it to the path again
as ASGI's `root_path`.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class SemanticsMiddleware:
    """ASGI middleware: answers HEAD as GET without the body, and puts the prefix before a `Location`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_head, ended = scope["method"] == "HEAD", False

        async def sending(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("location", "").startswith("/"):
                    headers["location"] = scope.get("root_path", "") + headers["location"]
            elif is_head:
                # The answer ends here: a stream would have no end, and learns that its client is gone.
                message = {"type": "http.response.body", "body": b"", "more_body": False}
                if ended:
                    return
                ended = True
            await send(message)

        if is_head:
            scope["method"] = "GET"
        try:
            await self.app(scope, receive, sending)
        finally:
            if is_head:
                scope["method"] = "HEAD"


def path_below_prefix(scope: Scope) -> str:
    """The request's path as this service names it, without the proxy's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
