"""Middleware that limits request bodies to 64 KiB; uploads lift the limit and count while they stream.

FastAPI collects a body of JSON in memory, however large, and parses it on the event loop, where health and
everybody else wait. So every request begins bounded, in bytes and in pauses between them, and
`service.http.uploads.receive` lifts the bounds of what it receives. (`FastAPI(max_body_size=...)` would
refuse too, but in plain text where everything else is a problem.)
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.problems import Problem

MAX_BODY_BYTES = 64 * 1024
IDLE_SECONDS = 60.0


class BodyLimitMiddleware:
    """ASGI middleware: raises Problem out of `receive`, 413 where more arrives, however it was announced, and
    408 where nothing does."""

    def __init__(self, app: ASGIApp, idle_seconds: float = IDLE_SECONDS) -> None:
        self.app = app
        self.idle_seconds = idle_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with a body that ends at the limit."""
        if scope["type"] == "http":
            bounded = _Bounded(scope.setdefault("state", {}), receive, send, self.idle_seconds)
            receive, send = bounded.receive, bounded.send
        await self.app(scope, receive, send)


class _Bounded:
    """One request's `receive` and `send`."""

    def __init__(self, state: dict[str, Any], receive: Receive, send: Send, idle_seconds: float) -> None:
        self._state, self._receive, self._send, self._idle = state, receive, send, idle_seconds
        self._state["bounded"] = True
        self._received = 0
        # Whether the application still reads the body; otherwise it waits for a disconnect.
        self._wanted = True

    async def receive(self) -> Message:
        """The next message."""
        message = await self._next()
        self._received += len(message.get("body", b""))
        if self._counts and self._received > MAX_BODY_BYTES:
            raise Problem(
                413,
                "body-too-large",
                "The body is too large",
                f"A body that is neither a form nor a scan may have {MAX_BODY_BYTES} bytes, this one has "
                "more; /docs says what may be in it.",
                max_bytes=MAX_BODY_BYTES,
            )
        self._wanted &= message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Answer without reading the rest of the body."""
        self._wanted = False
        await self._send(message)

    @property
    def _counts(self) -> bool:
        return self._wanted and bool(self._state["bounded"])

    async def _next(self) -> Message:
        if self._counts:
            try:
                async with asyncio.timeout(self._idle):
                    return await self._receive()
            except TimeoutError:
                if self._counts:
                    raise stalled(self._idle) from None
        return await self._receive()


def stalled(seconds: float) -> Problem:
    """Make a 408: nothing more of the body arrives."""
    return Problem(
        408,
        "upload-stalled",
        "The upload stalled",
        f"Nothing arrived for {seconds:g} seconds; send it again.",
    )


def lift(request: Request) -> None:
    """Lift the limit, for a route with its own limits."""
    request.state.bounded = False
