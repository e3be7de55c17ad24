"""What the node sends to the API."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from service.dicom_node.configuration import NodeConfiguration
from service.dicom_node.forward import Forwarder, segment
from service.dicom_node.spool import Spool


def node_of(port: int) -> NodeConfiguration:
    return NodeConfiguration.model_validate(
        {
            "ae_title": "LOCUM",
            "service": f"http://127.0.0.1:{port}",
            "senders": {"CT1": {"hospital": "north"}},
            "hospitals": {"north": {"model": "liver", "destination": "pacs"}},
            "destinations": {"pacs": {"ae_title": "PACS", "host": "127.0.0.1", "port": 104}},
        }
    )


@contextmanager
def api(received: list[bytes]) -> Iterator[int]:
    """The port of a server that keeps the bodies of requests, and answers `SEG`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"SEG")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Let this process open only so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/dev/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_series_with_more_objects_than_descriptors_is_sent_whole(tmp_path: Path) -> None:
    received: list[bytes] = []
    objects = [f"object {number};".encode() * 10_000 for number in range(100)]
    with closing(Spool(tmp_path, 10**9)) as spool, api(received) as port:
        for number, content in enumerate(objects):
            key = spool.add("north", "1.2", f"1.2.{number}", content)
        node, entry = node_of(port), spool.complete(key)
        with few_descriptors(32):
            assert segment(node, node.hospitals["north"], entry) == b"SEG"
    (body,) = received
    assert all(body.count(b"\r\n\r\n" + content + b"\r\n--") == 1 for content in objects)


def test_series_that_cannot_be_read_waits_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Spool(tmp_path, 10**9)) as spool, api([]) as port:
        entry = spool.complete(spool.add("north", "1.2", "1.2.1", b"x"))
        (path,) = entry.objects
        path.unlink()
        path.mkdir()
        assert Forwarder(node_of(port), spool, threading.Event()).look()
        assert [one.id for one in spool.ready()] == [entry.id]
    assert "IsADirectoryError: Is a directory" in caplog.text
    assert path.name not in caplog.text
