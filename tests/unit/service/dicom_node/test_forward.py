"""What the node sends to the API."""

from __future__ import annotations

import errno
import gc
import io
import resource
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SegmentationStorage
from pynetdicom import AE
from pynetdicom.sop_class import Verification  # type: ignore[attr-defined]

from service.dicom_node import forward
from service.dicom_node import spool as spool_module
from service.dicom_node.configuration import Destination, NodeConfiguration
from service.dicom_node.forward import Forwarder, Never, deliver, segment
from service.dicom_node.spool import Spool
from tests.helpers.waiting import wait_for


def node_of(port: int, **fields: Any) -> NodeConfiguration:
    return NodeConfiguration.model_validate(
        {
            "ae_title": "LOCUM",
            "service": f"http://127.0.0.1:{port}",
            "senders": {"CT1": {"hospital": "north"}},
            "hospitals": {"north": {"model": "liver", "destination": "pacs"}},
            "destinations": {"pacs": {"ae_title": "PACS", "host": "127.0.0.1", "port": 104}},
            **fields,
        }
    )


@contextmanager
def api(received: list[bytes], status: int = 200) -> Iterator[int]:
    """The port of a server that keeps the bodies of requests, and answers `SEG`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
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


@pytest.mark.parametrize("status", [401, 403, 404, 408, 410, 421, 425, 429, 500, 503])
def test_series_waits_for_what_the_operator_mends(tmp_path: Path, status: int) -> None:
    with closing(Spool(tmp_path, 10**9)) as spool, api([], status) as port:
        entry = spool.complete(spool.add("north", "1.2", "1.2.1", b"x"))
        assert Forwarder(node_of(port), spool, threading.Event()).look()
        assert [one.id for one in spool.ready()] == [entry.id]


@contextmanager
def full_disk() -> Iterator[None]:
    """Let every write to the queue fail."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/srv/DOE^JOHN")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(spool_module, "write_durably", refuse)
        yield


def test_forwarder_on_a_full_disk_logs_and_continues_when_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Spool(tmp_path, 10**9)) as spool, api([]) as port:
        spool.add("north", "1.2", "1.2.1", b"x")
        node, stopping = node_of(port, settle_seconds=0, retry_seconds=0.01), threading.Event()
        thread = threading.Thread(target=Forwarder(node, spool, stopping).run, args=(set,))
        try:
            with full_disk():
                thread.start()
                wait_for(lambda: caplog.text.count("OSError: No space left on device") > 1)
            wait_for(spool.ready)
        finally:
            stopping.set()
            thread.join()
    assert "DOE" not in caplog.text


def test_series_that_fails_on_a_full_disk_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def refuse(_node: object, _route: object, entry: spool_module.Entry) -> bytes:
        seen.append(entry.id)
        raise Never("no scan")

    monkeypatch.setattr(forward, "segment", refuse)
    with closing(Spool(tmp_path, 10**9)) as spool:
        entries = [spool.complete(spool.add("north", f"1.{n}", "1.2", b"x")) for n in range(2)]
        forwarder = Forwarder(node_of(1), spool, threading.Event())
        with full_disk():
            assert [forwarder.look() for _ in range(3)] == [True, True, False]
        assert sorted(seen) == sorted(entry.id for entry in entries)
        assert len(spool.ready()) == 2


# pynetdicom leaves the sockets of associations that were not established to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_destination_that_accepts_no_seg_fails_the_series_at_once() -> None:
    made = Dataset()
    made.SOPClassUID, made.SOPInstanceUID = SegmentationStorage, "1.2.3"
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    content = io.BytesIO()
    made.save_as(content, enforce_file_format=True)
    ae = AE("PACS")
    ae.add_supported_context(Verification)
    server = ae.start_server(("127.0.0.1", 0), block=False)
    try:
        pacs = Destination(ae_title="PACS", host="127.0.0.1", port=server.server_address[1])
        with pytest.raises(Never, match="destination 'pacs' accepts no SEG"):
            deliver("LOCUM", "pacs", pacs, content.getvalue())
    finally:
        server.shutdown()
        gc.collect()
