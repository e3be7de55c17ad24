"""A reverse proxy that serves a service at a path, and strips it, as nginx does with `location /locum/`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HOP = {"connection", "keep-alive", "transfer-encoding"}


@contextmanager
def prefix_proxy(port: int, prefix: str, headers: Mapping[str, str]) -> Iterator[str]:
    """Serve the service of `port` below `prefix`; gives its address. `headers` are added to requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_one_request(self) -> None:
            self.close_connection = True
            self.raw_requestline = self.rfile.readline(65537)
            if self.raw_requestline and self.parse_request():
                self.forward()

        def forward(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404, "another service of this host")
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            sent = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            upstream = HTTPConnection("127.0.0.1", port)
            upstream.request(self.command, self.path.removeprefix(prefix), body or None, {**sent, **headers})
            answer = upstream.getresponse()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                while chunk := answer.read1(65536):
                    self.wfile.write(chunk)
                    self.wfile.flush()
            except OSError:
                pass  # the browser is gone
            finally:
                upstream.close()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{prefix}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)
