"""The server's protocol: HTTP/1.1 by h11, with limits on open connections and on the time that headers take.

h11 limits the size of a request's headers to 64 KiB; uvicorn's first choice, httptools, has no limit. For
uvicorn's own command: `--http service.http.connections:BoundedProtocol`.

A request that a proxy could end at another byte than this server is rejected with 400, and its connection
closed (RFC 9112, sections 2.2, 5.2 and 6.1): bytes behind that end would be a request that no proxy saw.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.http.semantics import ForwardedPrefixMiddleware

MOST_CONNECTIONS = 1000
HEADER_SECONDS = 20.0
# Longer than clients and reverse proxies keep an idle connection (httpx 5 s, nginx 60 s). The side that sends
# should be the one that closes: else a request meets a connection that is being closed.
KEEP_ALIVE_SECONDS = 75

_LAX_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")
_ABSOLUTE = re.compile(rb"https?://(?P<authority>[^/?#@]+)(?P<rest>(?:[/?][^#]*)?)", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """h11's parser for a server, without the latitude that RFC 9112 leaves to it."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._receive_buffer = _StrictLines()

    def next_event(self) -> Any:
        """Parse the next event.

        Raises:
            RemoteProtocolError: the request is invalid; its length is given in two ways, or in one that its
                version has not; a line of its headers or trailers ends without CR, or is folded.
        """
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        names = {name for name, _ in event.headers}
        if b"transfer-encoding" in names:
            if b"content-length" in names:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
            if event.http_version < b"1.1":
                raise h11.RemoteProtocolError("Transfer-Encoding in HTTP/1.0")
        return _in_origin_form(event)


class _StrictLines(ReceiveBuffer):
    """The bytes that were received and not yet parsed."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines before the first blank one, once it is there. Raises LocalProtocolError."""
        if not self._data.startswith(b"\r\n"):
            begin = self._multiple_lines_search
            blank = self._data.find(b"\r\n\r\n", begin)
            end = len(self._data) if blank < 0 else blank
            if _LAX_LINE.search(self._data, begin, end):
                raise h11.LocalProtocolError("a header line that ends with LF alone, or is folded")
        return super().maybe_extract_lines()


def _in_origin_form(request: h11.Request) -> h11.Request:
    """`GET http://host/path` as `GET /path` for that host, which replaces `Host` (RFC 9112, 3.2.2)."""
    found = _ABSOLUTE.fullmatch(request.target)
    if found is None:
        return request
    rest = found["rest"]
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=rest if rest.startswith(b"/") else b"/" + rest,
        headers=[(b"host", found["authority"]), *headers],
        http_version=request.http_version,
    )


@cache
def _trusts(addresses: str) -> Callable[[str | None], bool]:
    """Whether a connection is of a proxy that uvicorn takes `X-Forwarded-For` from (FORWARDED_ALLOW_IPS)."""
    return ProxyHeadersMiddleware(_no_app, addresses).trusted_hosts.__contains__


async def _no_app(*_: object) -> None:
    raise AssertionError("only the list of trusted proxies is used")


class BoundedProtocol(H11Protocol):
    """Close a connection above the limit, and one that has sent no complete headers in time."""

    _late: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.proxy_headers:
            addresses = self.config.forwarded_allow_ips
            listed = addresses if isinstance(addresses, str) else ",".join(addresses)
            self.app = ForwardedPrefixMiddleware(self.app, _trusts(listed))
        self.conn = StrictConnection(self.conn._max_incomplete_event_size)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, if there are not too many."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request where its answer has not begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._calm()
        super().connection_lost(exc)

    def _watch(self) -> None:
        # Between requests uvicorn's own keep-alive timeout runs.
        waiting = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not waiting:
            self._calm()
        elif self._late is None:
            self._late = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _calm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
