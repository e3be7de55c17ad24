"""The client of a PACS, against a real Orthanc and a gate that fails as networks do."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydicom
import pytest
from pydicom.uid import DeflatedExplicitVRLittleEndian

from locum.demo.service_process import free_port
from model_store.errors import ScanTooLarge
from model_store.scan import Limits, decode
from service.errors import JobCancelled, PacsRefused, PacsUnavailable, SeriesMissing
from service.pacs.client import PacsClient, text_of
from service.pacs.configuration import PacsServer, load_servers
from tests.helpers.model_store.dicom_files import uid
from tests.helpers.service.coded import SERIES, STUDY, VOLUME, coded_series
from tests.helpers.service.orthanc import Gate, Orthanc, configure

LIMITS = Limits()


@pytest.fixture(scope="module")
def files(orthanc: Orthanc) -> dict[str, bytes]:
    found = coded_series()
    orthanc.add(found)
    return found


@pytest.fixture(autouse=True)
def reset(gate: Gate) -> None:
    gate.rule = lambda method, path: None
    gate.seen.clear()


@pytest.fixture
def client(gate: Gate, tmp_path: Path) -> Iterator[PacsClient]:
    with PacsClient("main", server(tmp_path, gate.url)) as found:
        yield found


def server(folder: Path, url: str, **fields: Any) -> PacsServer:
    return load_servers(configure(folder / f"{len(list(folder.iterdir()))}.yaml", url, **fields))["main"]


def test_fetched_series_has_the_stored_bytes_and_decodes_to_the_volume(
    client: PacsClient, files: dict[str, bytes]
) -> None:
    fetched = client.fetch_series(STUDY, SERIES, LIMITS)
    with zipfile.ZipFile(io.BytesIO(fetched)) as archive:
        assert {archive.read(name) for name in archive.namelist()} == {*files.values()}
    assert fetched == client.fetch_series(STUDY, SERIES, LIMITS)
    voxels = decode(fetched, LIMITS).voxels[..., 0].transpose(2, 1, 0)
    assert (voxels == VOLUME).all()


@pytest.fixture
def deflated(orthanc: Orthanc) -> Iterator[dict[str, bytes]]:
    """`files` with another UID of the series, deflated: each inflates to 200 times its size."""

    def deflate(dataset: pydicom.Dataset, place: int) -> None:
        dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
        dataset.add_new((0x0009, 0x0010), "LO", "LOCUM TEST")
        dataset.add_new((0x0009, 0x1001), "OB", bytes(1_000_000))

    found = coded_series(SeriesInstanceUID=uid("deflated"), change=deflate)
    orthanc.add(found)
    yield found
    with orthanc.rest as client:
        for one in client.get("/series", params={"expand": ""}).json():
            if one["MainDicomTags"]["SeriesInstanceUID"] == uid("deflated"):
                client.delete(f"/series/{one['ID']}").raise_for_status()


def test_deflated_series_is_fetched_as_stored_and_not_inflated_beyond_the_limit(
    client: PacsClient, deflated: dict[str, bytes]
) -> None:
    fetched = client.fetch_series(STUDY, uid("deflated"), LIMITS)
    with zipfile.ZipFile(io.BytesIO(fetched)) as archive:
        assert {archive.read(name) for name in archive.namelist()} == {*deflated.values()}
    assert (decode(fetched, LIMITS).voxels[..., 0].transpose(2, 1, 0) == VOLUME).all()
    with pytest.raises(ScanTooLarge, match="instance 1 inflates to more than 900000 bytes"):
        client.fetch_series(STUDY, uid("deflated"), replace(LIMITS, max_decompressed=900_000))


def test_series_that_is_not_there_is_missing(client: PacsClient, files: dict[str, bytes]) -> None:
    for study, series in ((STUDY, uid("none")), (uid("none"), SERIES)):
        with pytest.raises(SeriesMissing) as found:
            client.fetch_series(study, series, LIMITS)
        assert study not in str(found.value)
        assert series not in str(found.value)


def test_size_is_refused_before_the_pixels_are_fetched(
    client: PacsClient, gate: Gate, files: dict[str, bytes]
) -> None:
    with pytest.raises(ScanTooLarge, match="voxels"):
        client.fetch_series(STUDY, SERIES, replace(LIMITS, max_voxels=VOLUME.size - 1))
    assert all("instances" in path for _, path in gate.seen)
    with pytest.raises(ScanTooLarge, match="bytes"):
        client.fetch_series(STUDY, SERIES, replace(LIMITS, max_bytes=5000))


def test_elements_of_a_series_are_counted_together(
    client: PacsClient, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_store.scans.dicom.files.MOST_ELEMENTS", 300)
    with pytest.raises(ScanTooLarge, match="at most 300 elements"):
        client.fetch_series(STUDY, SERIES, LIMITS)


def test_endless_answer_is_cut_at_the_limit(client: PacsClient, gate: Gate, files: dict[str, bytes]) -> None:
    import gzip

    bomb = gzip.compress(b"\0" * 200_000_000, 1)

    def bombing(method: str, path: str) -> Any:
        if path.endswith(SERIES):
            kind = 'multipart/related; type="application/dicom"; boundary=x'
            return 200, {"Content-Type": kind, "Content-Encoding": "gzip"}, bomb
        return None

    gate.rule = bombing
    with pytest.raises(ScanTooLarge):
        client.fetch_series(STUDY, SERIES, replace(LIMITS, max_bytes=1_000_000))


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_failing_pacs_is_unavailable(
    client: PacsClient, gate: Gate, files: dict[str, bytes], status: int
) -> None:
    gate.rule = lambda method, path: (status, {}, b"Planted^Patient")
    with pytest.raises(PacsUnavailable, match=str(status)):
        client.fetch_series(STUDY, SERIES, LIMITS)


def test_answer_that_is_no_dicom_or_lacks_an_instance_is_unavailable(
    client: PacsClient, gate: Gate, orthanc: Orthanc, files: dict[str, bytes]
) -> None:
    for kind, body in (("text/html", b"<p>Planted"), ("application/json", b"[{'Planted"), ("", b"")):
        gate.rule = lambda method, path, kind=kind, body=body: (  # type: ignore[misc]
            (200, {"Content-Type": kind}, body) if path.endswith(SERIES) else None
        )
        with pytest.raises(PacsUnavailable) as found:
            client.fetch_series(STUDY, SERIES, LIMITS)
        assert "Planted" not in str(found.value)
    one = next(iter(files.values()))
    part = b"--x\r\nContent-Type: application/dicom\r\n\r\n" + one + b"\r\n--x--"
    kind = 'multipart/related; type="application/dicom"; boundary=x'
    for media_type, body in ((kind, part), ("application/dicom", one)):
        gate.rule = lambda method, path, media_type=media_type, body=body: (  # type: ignore[misc]
            (200, {"Content-Type": media_type}, body) if path.endswith(SERIES) else None
        )
        with pytest.raises(PacsUnavailable, match="lists 9 instances of the series and sent 1"):
            client.fetch_series(STUDY, SERIES, LIMITS)


def test_wrong_password_redirect_and_closed_port_are_told_apart(
    tmp_path: Path, gate: Gate, files: dict[str, bytes]
) -> None:
    wrong = PacsClient("main", server(tmp_path, gate.url, secret="wrong"))
    with pytest.raises(PacsRefused, match="credentials"), wrong:
        wrong.fetch_series(STUDY, SERIES, LIMITS)
    gate.rule = lambda method, path: (302, {"Location": "http://169.254.169.254/latest"}, b"")
    moved = PacsClient("main", server(tmp_path, gate.url))
    with pytest.raises(PacsRefused, match="redirects"), moved:
        moved.fetch_series(STUDY, SERIES, LIMITS)
    down = PacsClient("main", server(tmp_path, f"http://127.0.0.1:{free_port()}/dicom-web"))
    with pytest.raises(PacsUnavailable, match="ConnectionError"), down:
        down.fetch_series(STUDY, SERIES, LIMITS)
    plain = PacsClient("main", server(tmp_path, gate.url.replace("http:", "https:")))
    with pytest.raises(PacsRefused, match="certificate"), plain:
        plain.fetch_series(STUDY, SERIES, LIMITS)


def test_cancelled_job_stops_the_transfer(tmp_path: Path, gate: Gate, files: dict[str, bytes]) -> None:
    calls = 0

    def keep_on() -> None:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise JobCancelled("cancelled")

    with (
        pytest.raises(JobCancelled),
        PacsClient("main", server(tmp_path, gate.url), keep_on) as client,
    ):
        client.fetch_series(STUDY, SERIES, LIMITS)


def test_search_reads_every_page_and_ends_where_the_server_repeats_itself(
    client: PacsClient, gate: Gate, orthanc: Orthanc, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    orthanc.add(coded_series(SeriesInstanceUID=uid("other"), SOPInstanceUID=uid("other", 1)))
    monkeypatch.setattr("service.pacs.client._PAGE", 1)
    found = client.search_series({"Modality": "CT"}, 10)
    assert {text_of(item, "SeriesInstanceUID") for item in found} == {SERIES, uid("other")}
    assert len(client.search_series({"PatientID": "PLANTED-ID"}, 0)) == 1
    assert client.search_series({"PatientID": "NONE"}, 10) == []
    seen = len(gate.seen)
    repeated = f'[{{"0020000E": {{"vr": "UI", "Value": ["{SERIES}"]}}}}]'.encode()
    gate.rule = lambda method, path: (200, {"Content-Type": "application/dicom+json"}, repeated)
    assert len(client.search_series({}, 10)) == 1
    assert len(gate.seen) == seen + 2


@pytest.mark.parametrize(
    ("uids", "expected"),
    [(["1.2.3", "1.2.4 ", "1.2.5\\u0000"], {"1.2.3", "1.2.4", "1.2.5"}), (["1.2.3", "none"], {"1.2.3"})],
)
def test_search_strips_padding_and_ends_where_uids_are_invalid(
    client: PacsClient, gate: Gate, uids: list[str], expected: set[str]
) -> None:
    results = ", ".join(f'{{"0020000E": {{"vr": "UI", "Value": ["{one}"]}}}}' for one in uids)

    def repeating(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        assert len(gate.seen) < 5, "the same page is asked for again and again"
        return 200, {"Content-Type": "application/dicom+json"}, f"[{results}]".encode()

    gate.rule = repeating
    assert {text_of(item, "SeriesInstanceUID") for item in client.search_series({}, 10)} == expected
    assert len(gate.seen) == 2


def test_stored_instance_is_stored_once(
    client: PacsClient, gate: Gate, orthanc: Orthanc, files: dict[str, bytes]
) -> None:
    dataset = pydicom.dcmread(io.BytesIO(next(iter(files.values()))))
    dataset.SeriesInstanceUID, dataset.Modality = uid("stored"), "OT"
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = uid("stored", 1)
    content = io.BytesIO()
    dataset.save_as(content)
    assert client.store(content.getvalue()) is True
    assert client.store(content.getvalue()) is False
    assert sum(method == "POST" for method, _ in gate.seen) == 1
    assert [one.SOPInstanceUID for one in orthanc.instances("OT")] == [uid("stored", 1)]
    gate.rule = lambda method, path: (409, {}, b"Planted") if method == "POST" else None
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = uid("stored", 2)
    content = io.BytesIO()
    dataset.save_as(content)
    with pytest.raises(PacsRefused, match="409"):
        client.store(content.getvalue())
