"""A TCP proxy before the operator's port, which can cut or slow a hospital's connection."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

_BLOCK = 2**16


class Proxy:
    """Forwards connections to `target` (a port on loopback) until closed; listens on `port`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._cut = False
        self._delay = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close every connection and refuse new ones, until `mend`."""
        self._cut = True
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def slow(self, seconds: float) -> None:
        """Hold every block of bytes for `seconds`."""
        self._delay = seconds

    def mend(self) -> None:
        """Forward as before."""
        self._cut, self._delay = False, 0.0

    def close(self) -> None:
        """Stop listening and close every connection."""
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    if self._cut:
                        raise OSError("cut")
                    far = socket.create_connection(("127.0.0.1", self._target), 5)
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while block := source.recv(_BLOCK):
                if self._delay:
                    time.sleep(self._delay)
                sink.sendall(block)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
