"""Multipart bodies: read in pieces, counted, spooled without a name, and gone afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect, Request

from model_store.errors import ReferenceNotFound
from service.errors import CohortFull, HospitalUnknown, QueueFull, ServiceBusy, ServiceError
from service.http.problems import Problem
from service.http.uploads.multipart import MAX_FIELD_BYTES, MAX_FIELDS
from service.http.uploads.receive import UploadForm, UploadLimits, receive, receive_body
from service.runtime.spool import IN_MEMORY_BYTES, prepare_spool
from tests.helpers.open_files import open_files

BOUNDARY = "f00-ba4"
LIMITS = UploadLimits(max_bytes=3 * IN_MEMORY_BYTES)


def body_of(*parts: tuple[str, bytes], end: bool = True) -> bytes:
    """(Content-Disposition's parameters, content) per part."""
    chunks = [f"--{BOUNDARY}\r\nContent-Disposition: form-data; {d}\r\n\r\n".encode() + c for d, c in parts]
    return b"\r\n".join(chunks) + (f"\r\n--{BOUNDARY}--\r\n".encode() if end else b"")


def request_of(chunks: Iterator[bytes | None], headers: dict[str, str] | None = None) -> Request:
    """A request of a client that sends `chunks`; None: it disconnects."""
    given = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", **(headers or {})}

    async def receive_message() -> dict[str, Any]:
        chunk = next(chunks, b"")
        if chunk is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk, "more_body": chunk != b""}

    scope = {
        "type": "http",
        "method": "POST",
        "headers": [(k.encode(), v.encode()) for k, v in given.items()],
    }
    return Request(scope, receive_message)


def send(spool: Path, body: bytes, *, piece: int = 65536, **headers: str) -> UploadForm:
    pieces = (body[i : i + piece] for i in range(0, len(body), piece))
    return asyncio.run(receive(request_of(pieces, headers), spool, LIMITS))


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    prepare_spool(tmp_path / "spool")
    return tmp_path / "spool"


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
def test_form_is_read_the_same_for_any_chunk_size(spool: Path, piece: int) -> None:
    content = random.Random(0).randbytes(2000) + f"\r\n--{BOUNDARY[:-1]}".encode() + b"\r\n--\r\n"
    body = body_of(('name="scan"; filename="a.png"', content), ('name="model"', "Gehirn-\u00e4".encode()))
    with send(spool, body, piece=piece) as form:
        assert form.fields == {"model": "Gehirn-\u00e4"}
        assert form.files["scan"].read() == content
        assert form.files["scan"].size == len(content)
        assert form.files["scan"].sha256 == "sha256:" + hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    "disposition",
    [
        "name=\"scan\"; filename*=utf-8''M%C3%BCller.nii.gz",
        "name=\"scan\";FILENAME* = UTF-8''a",
        'filename="a; b"; name="scan"; filename*=utf-8\'\'a',
    ],
)
def test_file_with_an_extended_name_alone_is_a_file(spool: Path, disposition: str) -> None:
    with send(spool, body_of((disposition, b"x"))) as form:
        assert form.files["scan"].read() == b"x"


def test_name_that_looks_like_an_extended_one_makes_no_file(spool: Path) -> None:
    with send(spool, body_of(('name="a; filename*=b"', b"x"))) as form:
        assert form.fields == {"a; filename*=b": "x"}


def test_form_encoded_by_httpx_is_read(spool: Path) -> None:
    content = bytes(range(256)) * 50
    request = httpx.Request("POST", "http://x", files={"scan": ("x.nii", content)}, data={"output": "json"})
    with send(spool, request.read(), **{"content-type": request.headers["content-type"]}) as form:
        assert (form.fields, form.files["scan"].read()) == ({"output": "json"}, content)


def test_large_scan_is_spooled_to_an_unnamed_file_until_close(spool: Path) -> None:
    content = random.Random(1).randbytes(2 * IN_MEMORY_BYTES + 5)
    form = send(spool, body_of(('name="scan"; filename="../../mueller.nii"', content)))
    assert list(spool.iterdir()) == []
    assert len(open_files(spool)) == 1
    assert form.files["scan"].read() == content
    form.close()
    assert open_files(spool) == []


def test_small_scan_is_not_spooled(spool: Path) -> None:
    with send(spool, body_of(('name="scan"; filename="a"', b"x" * 1000))):
        assert open_files(spool) == []


def test_prepare_spool_makes_it_private_and_empty(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir(mode=0o755)
    (spool / "upload-x1y2").write_bytes(b"half a scan")
    prepare_spool(spool)
    assert list(spool.iterdir()) == []
    assert spool.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("declared", [True, False])
def test_form_one_byte_above_the_limit_is_413(spool: Path, declared: bool) -> None:
    fits = body_of(('name="scan"; filename="a"', b"x" * LIMITS.max_bytes))
    with send(spool, fits) as form:
        assert form.files["scan"].size == LIMITS.max_bytes
    too_large = body_of(('name="scan"; filename="a"', b"x" * (LIMITS.max_bytes + 1)))
    headers = {"content-length": str(len(too_large))} if declared else {}
    with pytest.raises(Problem) as refused:
        send(spool, too_large, **headers)
    assert refused.value.status == 413
    assert refused.value.headers["Connection"] == "close"
    assert open_files(spool) == []


def test_content_length_above_the_limit_is_413_before_the_body_is_read(spool: Path) -> None:
    body = body_of(('name="scan"; filename="a"', b"x"))
    with pytest.raises(Problem) as refused:
        send(spool, body, **{"content-length": str(10**12)})
    assert refused.value.status == 413


def test_endless_body_is_cut_off_at_the_limit(spool: Path) -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        yield body_of(('name="scan"; filename="a"', b""), end=False)
        while True:
            taken += 65536
            yield b"x" * 65536

    with pytest.raises(Problem) as refused:
        asyncio.run(receive(request_of(endless()), spool, LIMITS))
    assert refused.value.status == 413
    assert taken < 20 * IN_MEMORY_BYTES


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "ends before"),
        (b"not a form at all", "framing"),
        (body_of(('name="scan"; filename="a"', b"x"), end=False), "ends before"),
        (body_of(('filename="a"', b"x")), "no field name"),
        (body_of(('name="scan"', b"x")), "sent as a text field"),
        (body_of(('name="model"; filename="a"', b"x")), "sent as a file"),
        (
            body_of(('name="scan"; filename="a"', b"x"), ('name="scan"; filename="b"', b"y")),
            "field 'scan': expected once, found twice: send it once",
        ),
        (body_of(('name="model"', b"x" * (MAX_FIELD_BYTES + 1))), "longer than"),
        (body_of(('name="model"', b"\xff\xfe")), "not UTF-8"),
        (
            body_of(*((f'name="f{i}"', b"") for i in range(MAX_FIELDS + 1))),
            f"the form: expected at most {MAX_FIELDS} fields, found more: leave out those",
        ),
        (body_of(('name="x"\r\nX-Long: ' + "y" * 100_000, b"")), "framing"),
        (body_of(('name="x"\r\n' + "\r\n".join(f"X-{i}: y" for i in range(1000)), b"")), "framing"),
    ],
)
def test_malformed_form_is_422_with_its_reason(spool: Path, body: bytes, reason: str) -> None:
    with pytest.raises(Problem, match=reason) as refused:
        send(spool, body)
    assert refused.value.status == 422
    assert open_files(spool) == []


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x", "\x00;;="]
)
def test_form_with_another_content_type_is_415(spool: Path, content_type: str) -> None:
    with pytest.raises(Problem) as refused:
        send(spool, body_of(('name="scan"; filename="a"', b"x")), **{"content-type": content_type})
    assert refused.value.status == 415


def test_client_disconnect_leaves_no_spooled_file(spool: Path) -> None:
    def leaving() -> Iterator[bytes | None]:
        yield body_of(('name="scan"; filename="a"', b"x" * 2 * IN_MEMORY_BYTES), end=False)
        assert len(open_files(spool)) == 1
        yield None

    with pytest.raises(ClientDisconnect):
        asyncio.run(receive(request_of(leaving()), spool, LIMITS))
    assert open_files(spool) == []


def test_stalled_client_gets_408(spool: Path) -> None:
    async def scenario() -> None:
        request = request_of(iter([body_of(('name="scan"; filename="a"', b"x"), end=False)]))
        silence = asyncio.Event()
        sent = request.stream()

        async def stalling() -> AsyncIterator[bytes]:
            yield await anext(sent)
            await silence.wait()

        request.stream = stalling  # type: ignore[method-assign, assignment]
        await receive(request, spool, UploadLimits(1000, idle_seconds=0.05))

    with pytest.raises(Problem) as refused:
        asyncio.run(scenario())
    assert refused.value.status == 408


def send_many(spool: Path, *scans: bytes, files: int = 2000) -> UploadForm:
    body = body_of(*(('name="scans"; filename="a"', scan) for scan in scans), ('name="model"', b"brain"))
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
    limits = UploadLimits(LIMITS.max_bytes, max_files=files)
    request = request_of(pieces)
    return asyncio.run(receive(request, spool, limits, file_fields=("scans",), repeated_fields=("scans",)))


def test_repeated_field_keeps_its_files_in_order(spool: Path) -> None:
    draw = random.Random(2)
    scans = [draw.randbytes(draw.choice((0, 1, 1000, IN_MEMORY_BYTES // 3))) for _ in range(7)]
    with send_many(spool, *scans) as form:
        received = form.repeated["scans"]
        assert [upload.read() for upload in received] == scans
        assert [b"".join(upload.chunks()) for upload in reversed(received)] == scans[::-1]
        assert [upload.size for upload in received] == [len(scan) for scan in scans]
        assert [upload.sha256 for upload in received] == [
            "sha256:" + hashlib.sha256(scan).hexdigest() for scan in scans
        ]
        assert (form.fields, form.files) == ({"model": "brain"}, {})
    assert open_files(spool) == []


def test_many_files_of_a_form_use_one_descriptor(spool: Path) -> None:
    with send_many(spool, *[b"x" * 1500] * 1500) as form:
        assert len(form.repeated["scans"]) == 1500
        assert len(open_files(spool)) == 1
    assert open_files(spool) == []


def test_repeated_files_share_count_and_size_limits(spool: Path) -> None:
    with pytest.raises(Problem, match="'scans': expected at most 2 times, found more: send") as refused:
        send_many(spool, b"1", b"2", b"3", files=2)
    assert refused.value.status == 422
    with pytest.raises(Problem) as refused:
        send_many(spool, b"x" * (LIMITS.max_bytes // 2), b"y" * (LIMITS.max_bytes // 2 + 1))
    assert refused.value.status == 413
    assert open_files(spool) == []


def test_raw_body_is_one_file(spool: Path) -> None:
    content = random.Random(3).randbytes(2 * IN_MEMORY_BYTES + 11)
    pieces = (content[i : i + 10_000] for i in range(0, len(content), 10_000))
    with asyncio.run(receive_body(request_of(pieces), spool, LIMITS)) as upload:
        assert upload.read() == content
        assert b"".join(upload.chunks()) == content
        assert upload.sha256 == "sha256:" + hashlib.sha256(content).hexdigest()
        assert list(spool.iterdir()) == []
    assert open_files(spool) == []


@pytest.mark.parametrize("declared", [True, False])
def test_raw_body_above_the_limit_is_413(spool: Path, declared: bool) -> None:
    content = b"x" * (LIMITS.max_bytes + 1)
    headers = {"content-length": str(len(content))} if declared else {}
    with asyncio.run(receive_body(request_of(iter([content[1:]])), spool, LIMITS)) as upload:
        assert upload.size == LIMITS.max_bytes
    with pytest.raises(Problem) as refused:
        asyncio.run(receive_body(request_of(iter([content]), headers), spool, LIMITS))
    assert refused.value.status == 413
    assert open_files(spool) == []


@pytest.mark.parametrize("refusal", [CohortFull("no room"), ReferenceNotFound("no model")])
def test_raw_body_rejected_by_admit_is_drained(spool: Path, refusal: Exception) -> None:
    async def refuse() -> None:
        raise refusal

    pieces = iter([b"x" * IN_MEMORY_BYTES, None])
    with pytest.raises(type(refusal)):
        asyncio.run(receive_body(request_of(pieces), spool, LIMITS, admit=refuse))
    # Read to its end, so that the client comes to hear why.
    assert list(pieces) == []
    with pytest.raises(ClientDisconnect):
        asyncio.run(receive_body(request_of(iter([b"x" * 2 * IN_MEMORY_BYTES, None])), spool, LIMITS))
    assert open_files(spool) == []


@pytest.mark.parametrize(
    ("refusal", "closes"),
    [
        (Problem(415, "not-multipart", "Not a form", "Send a form."), True),
        (ServiceBusy("come back"), True),
        (HospitalUnknown("not registered"), False),
        (CohortFull("no room"), False),
        (QueueFull("come back"), False),
    ],
)
def test_rejection_closes_the_connection_unless_hospital_records_cause_it(
    spool: Path, refusal: ServiceError, closes: bool
) -> None:
    async def refuse() -> None:
        raise refusal

    with pytest.raises(type(refusal)):
        asyncio.run(receive_body(request_of(iter([b"x"])), spool, LIMITS, admit=refuse))
    assert refusal.headers == ({"Connection": "close"} if closes else {})


def test_form_is_rejected_by_admit_before_its_body(spool: Path) -> None:
    async def refuse() -> None:
        raise Problem(503, "busy", "Busy", "Come back.")

    body = body_of(('name="scan"; filename="a"', b"x" * IN_MEMORY_BYTES))
    with pytest.raises(Problem) as refused:
        asyncio.run(receive(request_of(iter([body])), spool, LIMITS, admit=refuse))
    assert refused.value.status == 503
