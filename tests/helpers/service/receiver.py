"""Receivers of webhooks: real HTTP servers that verify what they receive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks import Webhook as Verifier

from service.webhooks import Webhook

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEVER = 0
"""In place of a status: no answer."""


@dataclass
class Receiver:
    """Keeps each message that it accepts with its id; answers as `statuses` say, then with 204.

    `location` is that of every answer; the body of an `endless` one does not end.
    """

    statuses: list[int] = field(default_factory=list)
    location: str = ""
    endless: bool = False
    received: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    tried: int = 0
    go_on: threading.Event = field(default_factory=threading.Event)
    server: ThreadingHTTPServer = field(init=False)

    @property
    def hook(self) -> Webhook:
        return Webhook(f"http://127.0.0.1:{self.server.server_address[1]}/secret-path", SECRET)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length", 0))).decode()
        self.tried += 1
        said = Verifier(SECRET).verify(body, dict(request.headers))
        status = self.statuses.pop(0) if self.statuses else 204
        if status == NEVER:
            self.go_on.wait(30)
            return
        if status == 204:
            self.received.append((request.headers["webhook-id"], said))
        request.send_response(status)
        if self.location:
            request.send_header("location", self.location)
        request.end_headers()
        if self.endless:
            request.wfile.write(b"and so on")
            request.wfile.flush()
            self.go_on.wait(30)


@contextmanager
def receivers() -> Iterator[Callable[..., Receiver]]:
    """`begin(**fields)`: a receiver that listens on loopback until the end of the block."""
    with ExitStack() as stack:

        def begin(**fields: Any) -> Receiver:
            receiver = Receiver(**fields)

            class Handler(BaseHTTPRequestHandler):
                def do_POST(self) -> None:
                    receiver.answer(self)

                do_GET = do_POST

                def log_message(self, *_: Any) -> None:
                    pass

            receiver.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            receiver.server.daemon_threads = True
            thread = threading.Thread(target=receiver.server.serve_forever, args=(0.01,))
            thread.start()
            for end in (
                thread.join,
                receiver.server.server_close,
                receiver.server.shutdown,
                receiver.go_on.set,
            ):
                stack.callback(end)
            return receiver

        yield begin
