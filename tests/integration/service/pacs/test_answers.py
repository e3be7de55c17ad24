"""The client of a PACS before a server that sends another series, cuts its answer, or never ends it."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme
from pydicom import dcmread

from model_store.scan import Limits
from service.errors import JobCancelled, PacsUnavailable, SeriesMismatched
from service.pacs.client import PacsClient
from service.pacs.configuration import load_servers
from tests.helpers.model_store.dicom_files import uid
from tests.helpers.service.coded import SERIES, STUDY, coded_series
from tests.helpers.service.orthanc import configure

LIMITS = Limits()
_JSON = {"Content-Type": "application/dicom+json"}
_PARTS = {"Content-Type": 'multipart/related; type="application/dicom"; boundary="x y"'}
# Ten times what a test waits for: it ends the server where the client does not.
_DRIPS, _PAUSE_S = 300, 0.1

Pieces = Iterator[bytes]


@dataclass
class Server:
    """A PACS that lists `listed` and answers with `pieces`. `drips` is set while it sends single bytes."""

    url: str
    listed: Callable[[int], list[str]] = lambda page: []
    headers: dict[str, str] = field(default_factory=lambda: _PARTS)
    pieces: Callable[[], Pieces] = lambda: iter(())
    chunked: bool = False
    raw: bool = False
    requests: int = 0
    drips: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def drip(self, first: bytes = b"") -> Pieces:
        yield first
        for _ in range(_DRIPS):
            self.drips.set()
            if self.over.wait(_PAUSE_S):
                return
            yield b"-"


@pytest.fixture
def pacs() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found.requests += 1
            self.close_connection = True
            with suppress(OSError):  # where the client has ended the connection
                self._answer()

        def _answer(self) -> None:
            if "/instances" in self.path or self.path.partition("?")[0].endswith("/series"):
                keyword = "00080018" if "/instances" in self.path else "0020000E"
                page = found.listed(found.requests)
                content = json.dumps([{keyword: {"vr": "UI", "Value": [one]}} for one in page]).encode()
                self._head(_JSON | {"Content-Length": str(len(content))})
                self.wfile.write(content)
                return
            if not found.raw:
                self._head(found.headers | ({"Transfer-Encoding": "chunked"} if found.chunked else {}))
            for piece in found.pieces():
                if piece:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if found.chunked else piece)
            self.wfile.write(b"0\r\n\r\n" if found.chunked else b"")

        def _head(self, headers: dict[str, str]) -> None:
            self.send_response(200)
            self.send_header("Connection", "close")
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    found = Server(f"http://127.0.0.1:{server.server_address[1]}/dicom-web")
    thread.start()
    try:
        yield found
    finally:
        found.over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextmanager
def client(
    pacs: Server, folder: Path, keep_on: Callable[[], None] = lambda: None, **fields: object
) -> Iterator[PacsClient]:
    server = load_servers(configure(folder / "pacs.yaml", pacs.url, **fields))["main"]
    with PacsClient("main", server, keep_on) as made:
        yield made


def multipart(files: list[bytes], end: bytes = b"--x y--\r\n") -> bytes:
    return (
        b"".join(b"--x y\r\nContent-Type: application/dicom\r\n\r\n" + one + b"\r\n" for one in files) + end
    )


def once(uids: list[str]) -> Callable[[int], list[str]]:
    return lambda page: uids if page == 1 else []


def instances(files: list[bytes]) -> list[str]:
    return [str(dcmread(io.BytesIO(one), stop_before_pixels=True).SOPInstanceUID) for one in files]


FILES = [*coded_series().values()]


def test_series_as_it_is_listed_is_fetched(pacs: Server, tmp_path: Path) -> None:
    pacs.listed, pacs.pieces = once(instances(FILES)), lambda: iter([multipart(FILES)])
    with client(pacs, tmp_path) as pacs_client:
        assert len(pacs_client.fetch_series(STUDY, SERIES, LIMITS)) > sum(map(len, FILES))


@pytest.mark.parametrize("keyword", ["StudyInstanceUID", "SeriesInstanceUID"])
def test_instance_of_another_series_ends_the_fetch(pacs: Server, tmp_path: Path, keyword: str) -> None:
    other = [*coded_series(**{keyword: uid("another patient's")}).values()]
    sent = [*FILES[:-1], other[-1]]
    pacs.listed, pacs.pieces = once(instances(sent)), lambda: iter([multipart(sent)])
    with client(pacs, tmp_path) as asking, pytest.raises(SeriesMismatched, match=keyword) as found:
        asking.fetch_series(STUDY, SERIES, LIMITS)
    assert uid("another patient's") not in str(found.value)


def test_instances_other_than_the_listed_ones_are_not_used(pacs: Server, tmp_path: Path) -> None:
    known = instances(FILES)
    for listed, complaint in (
        ([*known[:-1], uid("another")], "sends an instance that it does not list"),
        ([*known, uid("another")], "lists 10 instances of the series and sent 9"),
    ):
        pacs.requests = 0
        pacs.listed, pacs.pieces = once(listed), lambda: iter([multipart(FILES)])
        with client(pacs, tmp_path) as asking, pytest.raises(PacsUnavailable, match=complaint):
            asking.fetch_series(STUDY, SERIES, LIMITS)


@pytest.mark.parametrize("end", [b"", b"--x y", b"--x y\r\n"], ids=["none", "delimiter", "another part"])
def test_answer_without_its_closing_delimiter_is_not_whole(pacs: Server, tmp_path: Path, end: bytes) -> None:
    pacs.listed, pacs.pieces = once(instances(FILES[:1])), lambda: iter([multipart(FILES[:1], end)])
    with client(pacs, tmp_path) as asking, pytest.raises(PacsUnavailable, match="breaks off"):
        asking.fetch_series(STUDY, SERIES, LIMITS)


@pytest.mark.parametrize("place", ["status line", "headers", "body", "chunks"])
def test_answer_that_drips_ends_at_its_deadline_and_is_cancelled_before(
    pacs: Server, tmp_path: Path, place: str
) -> None:
    begun = {"headers": b"HTTP/1.1 200 OK\r\nX: ", "body": b"--x y\r\nContent-Type: "}
    pacs.raw, pacs.chunked = place in ("status line", "headers"), place == "chunks"
    pacs.listed, pacs.pieces = once(instances(FILES[:1])), lambda: pacs.drip(begun.get(place, b""))
    with (
        client(pacs, tmp_path, answer_seconds=2) as asking,
        pytest.raises(PacsUnavailable, match="takes more than 2 s"),
    ):
        asking.fetch_series(STUDY, SERIES, LIMITS)
    pacs.requests = 0
    pacs.drips.clear()

    def keep_on() -> None:
        if pacs.drips.is_set():
            raise JobCancelled("cancelled")

    with client(pacs, tmp_path, keep_on) as asking, pytest.raises(JobCancelled):
        asking.fetch_series(STUDY, SERIES, LIMITS)


def test_handshake_that_drips_ends_at_its_deadline(tmp_path: Path) -> None:
    over = threading.Event()
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            line, _ = listening.accept()
            with line, suppress(OSError):
                # The beginning of a record of the handshake (RFC 8446 5.1).
                line.sendall(b"\x16\x03\x03\x40\x00")
                for _ in range(_DRIPS):
                    if over.wait(_PAUSE_S):
                        return
                    line.sendall(b"\0")

        thread = threading.Thread(target=drip)
        thread.start()
        pacs = Server(f"https://127.0.0.1:{listening.getsockname()[1]}/dicom-web")
        with (
            client(pacs, tmp_path, ca=str(tmp_path / "ca.pem"), answer_seconds=1) as asking,
            pytest.raises(PacsUnavailable, match="takes more than 1 s"),
        ):
            asking.fetch_series(STUDY, SERIES, LIMITS)
        over.set()
        thread.join(10)


def test_invalid_uids_without_end_end_with_the_pages(
    pacs: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.pacs.client._MOST_PAGES", 7)
    pacs.listed = lambda page: [f"none-{page}-{number}" for number in range(500)]
    with client(pacs, tmp_path) as asking, pytest.raises(PacsUnavailable, match="more than 7 pages"):
        asking.search_series({"Modality": "CT"}, 10)
    assert pacs.requests == 7
