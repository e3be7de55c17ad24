"""The server's protocol: HTTP/1.1 by h11, with limits on open connections and on the time that headers take.

h11 limits the size of a request's headers to 64 KiB; uvicorn's first choice, httptools, has no limit. For
uvicorn's own command: `--http service.http.connections:BoundedProtocol`.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 1000
HEADER_SECONDS = 20.0
# Longer than clients and reverse proxies keep an idle connection (httpx 5 s, nginx 60 s). The side that sends
# should be the one that closes: else a request meets a connection that is being closed.
KEEP_ALIVE_SECONDS = 75


class BoundedProtocol(H11Protocol):
    """Close a connection above the limit, and one that has sent no complete headers in time."""

    _late: asyncio.TimerHandle | None = None

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
