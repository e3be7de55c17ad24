"""Middleware that decodes a body of `Content-Encoding: gzip` while it is read: limits count what it becomes.

Other codings are answered with 415 and what is taken instead (RFC 9110, 15.5.16).
"""

from __future__ import annotations

import zlib
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.problems import Problem

_HEADER: Final = b"content-encoding"
_CODINGS: Final = frozenset({"gzip", "x-gzip"})
_GZIP: Final = 31
# Bytes of one message: as large as those that the server passes on.
_PIECE: Final = 64 * 1024
# What a stream may have beyond what it becomes: its header, and blocks without content.
_SLACK: Final = 64 * 1024


class ContentCodingMiddleware:
    """ASGI middleware: the application receives the body as it was before it was coded.

    Problem 415 and 422 come out of `receive`, as those of the body's limits do.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application on the decoded body."""
        if scope["type"] == "http" and (found := _codings(scope)):
            # They are of the coded body.
            left = [each for each in scope["headers"] if each[0] not in (_HEADER, b"content-length")]
            scope = {**scope, "headers": left}
            receive = _Decoded(receive, found)
        await self.app(scope, receive, send)


def _codings(scope: Scope) -> list[str]:
    """The codings of the body, in the order in which they were applied; without `identity`, which is none."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER]
    named = [each.strip().lower() for value in values for each in value.split(",")]
    return [each for each in named if each not in ("", "identity")]


class _Decoded:
    """One request's `receive`."""

    def __init__(self, receive: Receive, codings: list[str]) -> None:
        self._receive, self._codings = receive, codings
        self._stream = zlib.decompressobj(_GZIP)
        self._left = b""
        self._coded = self._decoded = 0
        self._more = True

    async def __call__(self) -> Message:
        """The next message."""
        if len(self._codings) > 1 or self._codings[0] not in _CODINGS:
            raise Problem(
                415,
                "coding-unsupported",
                "The body's coding is not supported",
                f"Expected a body without Content-Encoding, or one of gzip, found "
                f"{', '.join(self._codings)[:64]!r}: send it so.",
                headers={"Accept-Encoding": "gzip, identity"},
            )
        if not self._more and not self._left:
            # The body is over: the application waits for the client to leave.
            return await self._receive()
        while True:
            if not self._left:
                message = await self._receive()
                if message["type"] != "http.request":
                    return message
                self._left = message.get("body", b"")
                self._more = message.get("more_body", False)
                self._coded += len(self._left)
            piece = self._decode()
            if not self._left and not self._more:
                self._check_end()
            if piece or not self._more:
                return {"type": "http.request", "body": piece, "more_body": bool(self._left) or self._more}

    def _decode(self) -> bytes:
        if self._stream.eof and self._left:
            # Several members, one after the other, are one file (RFC 1952).
            self._stream = zlib.decompressobj(_GZIP)
        try:
            piece = self._stream.decompress(self._left, _PIECE)
        except zlib.error as error:
            raise _broken(f"bytes that are not gzip ({error})") from None
        self._left = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
        self._decoded += len(piece)
        if self._coded > self._decoded + len(self._left) + _SLACK:
            raise _broken("blocks without content")
        return piece

    def _check_end(self) -> None:
        if self._coded and not self._stream.eof:
            raise _broken("one that is cut off")


def _broken(found: str) -> Problem:
    return Problem(
        422,
        "coding-broken",
        "The body is not coded as it says",
        f"Expected a body of Content-Encoding: gzip, found {found}: send it again, or without the header.",
    )
