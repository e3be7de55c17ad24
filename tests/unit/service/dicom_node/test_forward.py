"""What the node sends to the API."""

from __future__ import annotations

import errno
import gc
import io
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SegmentationStorage
from pynetdicom import AE, evt
from pynetdicom.events import Event
from pynetdicom.sop_class import Verification  # type: ignore[attr-defined]

from locum.demo.service_process import free_port
from service.dicom_node import forward
from service.dicom_node import spool as spool_module
from service.dicom_node.configuration import Destination, NodeConfiguration, Route
from service.dicom_node.forward import Forwarder, Never, deliver, reach, segment
from service.dicom_node.spool import Spool
from tests.helpers.waiting import wait_for

UNREACHED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""pynetdicom leaves the sockets of associations that were not established to the garbage collector."""


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
def api(
    received: list[bytes], answer: Callable[[], bytes] = lambda: b"SEG", status: int = 200
) -> Iterator[int]:
    """The port of a server that keeps the bodies of requests, and answers each."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer())

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


def seg(instance: str) -> bytes:
    """A SEG without pixels."""
    made = Dataset()
    made.SOPClassUID, made.SOPInstanceUID = SegmentationStorage, instance
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    content = io.BytesIO()
    made.save_as(content, enforce_file_format=True)
    return content.getvalue()


@contextmanager
def pacs(accepts: str, store: Callable[[Event], int] = lambda event: 0) -> Iterator[dict[str, Any]]:
    """A destination that accepts one SOP class: the `destinations` of a node. `store` gives the statuses."""
    ae = AE("PACS")
    ae.add_supported_context(accepts)
    server = ae.start_server(("127.0.0.1", 0), block=False, evt_handlers=[(evt.EVT_C_STORE, store)])
    try:
        yield {"pacs": {"ae_title": "PACS", "host": "127.0.0.1", "port": server.server_address[1]}}
    finally:
        server.shutdown()
        gc.collect()


def test_retry_delivers_what_the_api_answers_by_then(tmp_path: Path) -> None:
    answers, statuses, stored = [seg("1.2.1"), seg("1.2.2")], [0xA700, 0], []

    def store(event: Event) -> int:
        status = statuses.pop(0)
        stored.append((str(event.request.AffectedSOPInstanceUID), status))
        return status

    with (
        closing(Spool(tmp_path, 10**9)) as spool,
        api([], lambda: answers.pop(0)) as port,
        pacs(SegmentationStorage, store) as destinations,
    ):
        spool.complete(spool.add("north", "1.2", "1.2.1", b"x"))
        node = node_of(port, destinations=destinations, retry_seconds=0.01)
        forwarder = Forwarder(node, spool, threading.Event())
        assert forwarder.look()
        wait_for(forwarder.look)
        assert spool.ready() == []
    assert stored == [("1.2.1", 0xA700), ("1.2.2", 0)]


@UNREACHED
def test_api_is_asked_only_when_the_destination_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[bytes] = []
    nothing = {"pacs": {"ae_title": "PACS", "host": "127.0.0.1", "port": free_port()}}
    with closing(Spool(tmp_path, 10**9)) as spool, api(received) as port:
        spool.complete(spool.add("north", "1.2", "1.2.1", b"x"))
        assert Forwarder(node_of(port, destinations=nothing), spool, threading.Event()).look()
        assert len(spool.ready()) == 1
    assert received == []
    assert "destination 'pacs' does not answer" in caplog.text


def test_series_that_cannot_be_read_waits_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        closing(Spool(tmp_path, 10**9)) as spool,
        api([]) as port,
        pacs(SegmentationStorage) as destinations,
    ):
        entry = spool.complete(spool.add("north", "1.2", "1.2.1", b"x"))
        (path,) = entry.objects
        path.unlink()
        path.mkdir()
        assert Forwarder(node_of(port, destinations=destinations), spool, threading.Event()).look()
        assert [one.id for one in spool.ready()] == [entry.id]
    assert "IsADirectoryError: Is a directory" in caplog.text
    assert path.name not in caplog.text


@pytest.mark.parametrize("status", [401, 403, 404, 408, 410, 421, 425, 429, 500, 503])
def test_series_waits_for_what_the_operator_mends(tmp_path: Path, status: int) -> None:
    received: list[bytes] = []
    with (
        closing(Spool(tmp_path, 10**9)) as spool,
        api(received, status=status) as port,
        pacs(SegmentationStorage) as destinations,
    ):
        entry = spool.complete(spool.add("north", "1.2", "1.2.1", b"x"))
        assert Forwarder(node_of(port, destinations=destinations), spool, threading.Event()).look()
        assert [one.id for one in spool.ready()] == [entry.id]
    assert len(received) == 1


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
    with closing(Spool(tmp_path, 10**9)) as spool, pacs(SegmentationStorage) as destinations:
        entries = [spool.complete(spool.add("north", f"1.{n}", "1.2", b"x")) for n in range(2)]
        forwarder = Forwarder(node_of(1, destinations=destinations), spool, threading.Event())
        with full_disk():
            assert [forwarder.look() for _ in range(3)] == [True, True, False]
        assert sorted(seen) == sorted(entry.id for entry in entries)
        assert len(spool.ready()) == 2


@UNREACHED
@pytest.mark.parametrize(("output", "name"), [("dicom-seg", "SEG"), ("dicom-rtstruct", "RTSTRUCT")])
def test_destination_that_accepts_no_such_object_fails_the_series_at_once(output: str, name: str) -> None:
    route = Route.model_validate({"model": "coded", "destination": "pacs", "output": output})
    with pacs(Verification) as destinations:
        destination = Destination.model_validate(destinations["pacs"])
        for attempt in (reach, partial(deliver, segmentation=seg("1.2.3"))):
            with pytest.raises(Never, match=f"destination 'pacs' accepts no {name}"):
                attempt("LOCUM", route, destination)
