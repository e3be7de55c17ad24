"""No body is read beyond 64 KiB, unless as an upload: those are counted and spooled while they stream.

FastAPI collects a body of JSON in memory, however large, and parses it on the event loop, where health and
everybody else wait. So every request begins bounded, and `service.uploads` lifts the bound of what it
receives. (`FastAPI(max_body_size=...)` would refuse too, but in plain text where everything else is a
problem.)
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.problems import Problem

MAX_BODY_BYTES = 64 * 1024


class BodyLimit:
    """ASGI middleware: raises Problem 413 out of `receive` where more arrives, however it was announced."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with a body that ends at the limit."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["bounded"] = True
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if state["bounded"] and received > MAX_BODY_BYTES:
                raise Problem(
                    413,
                    "body-too-large",
                    "The body is too large",
                    f"A body that is neither a form nor a scan may have {MAX_BODY_BYTES} bytes, this one has "
                    "more; /docs says what may be in it.",
                    max_bytes=MAX_BODY_BYTES,
                )
            return message

        await self.app(scope, bounded, send)


def lift(request: Request) -> None:
    """For whoever counts the body by limits of its own, before reading it."""
    request.state.bounded = False
