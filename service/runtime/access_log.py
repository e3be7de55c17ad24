"""Access log and request metrics by route template; paths with a client's text are never logged."""

from __future__ import annotations

import logging
import time
from http import HTTPStatus

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.runtime.metrics import Metrics

_log = logging.getLogger("locum.access")

# Polled every few seconds: counted, but not logged.
_QUIET = frozenset({"/health/live", "/health/ready", "/metrics"})
# No answer was sent, so there is no status; many servers' logs write this one.
_CLIENT_GONE = 499
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class AccessLogMiddleware:
    """ASGI middleware inside the request id's, so that its log line carries the id."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and record the answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        # A request that is never answered was cut off by its client, or ends as the 500 of the scope around
        # this.
        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except ClientDisconnect:
            status = _CLIENT_GONE
            raise
        finally:
            self._note(scope, status, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.metrics.requests.labels(method, route, str(status)).inc()
        self.metrics.request_seconds.labels(method, route).observe(seconds)
        if route not in _QUIET:
            _log.info(
                "%s %s %d",
                method,
                route,
                status,
                extra={
                    "method": method,
                    "route": route,
                    "status": status,
                    "milliseconds": round(seconds * 1000, 1),
                },
            )
