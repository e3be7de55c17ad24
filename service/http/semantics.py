"""Middleware for what every route owes to HTTP: HEAD beside GET, and addresses under a proxy's prefix.

A proxy that serves this service at https://host/locum strips `/locum`; the server adds it to the path again
as ASGI's `root_path`. The prefix is that of LOCUM_ROOT_PATH; without one, that which a trusted proxy names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.validation import PREFIX_PATTERN

_PREFIX: Final = re.compile(PREFIX_PATTERN)
_LONGEST_PREFIX: Final = 256


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


class ForwardedPrefixMiddleware:
    """ASGI middleware: takes the prefix from `X-Forwarded-Prefix` where the connection is a trusted proxy's.

    It runs outside the server's own reading of forwarded headers, which replaces the proxy's address by the
    client's. A header that is repeated, or is no prefix, is ignored, and so is each where the server has a
    prefix of its own.
    """

    def __init__(self, app: ASGIApp, trusts: Callable[[str | None], bool]) -> None:
        self.app = app
        self._trusts = trusts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, below the prefix that the proxy names."""
        if scope["type"] == "http" and not scope.get("root_path") and (prefix := self._prefix(scope)):
            raw: bytes = scope.get("raw_path") or b""
            added = {"root_path": prefix, "path": prefix + scope["path"]}
            scope = {**scope, **added, "raw_path": prefix.encode("ascii") + raw}
        await self.app(scope, receive, send)

    def _prefix(self, scope: Scope) -> str:
        found = [value for name, value in scope["headers"] if name == b"x-forwarded-prefix"]
        client = scope.get("client")
        if len(found) != 1 or not self._trusts(client[0] if client else None):
            return ""
        prefix = found[0].decode("latin-1").strip().removesuffix("/")
        return prefix if len(prefix) <= _LONGEST_PREFIX and _PREFIX.fullmatch(prefix) else ""


def path_below_prefix(scope: Scope) -> str:
    """The request's path as this service names it, without the proxy's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
