"""The Python client, against real services over real HTTP."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from locum import AsyncClient, Client, NotAllowed, Problem, ScanInvalid
from locum.answers import Event
from locum.scans import opened
from service.jobs.leases import finish
from service.routes import scan_request
from tests.helpers.model_store.dicom_files import PLANES, series, zipped
from tests.helpers.service.api import Api
from tests.helpers.service.asking import note, take


def url_of(api: Api) -> str:
    return str(api.client.base_url).rstrip("/")


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """`connect(api, key=None, retries=0)`: a client that is closed at the end."""
    with ExitStack() as stack:
        yield lambda api, key=None, retries=0: stack.enter_context(Client(url_of(api), key, retries=retries))


@pytest.fixture
def client(api: Api, connect: Callable[..., Client]) -> Client:
    return connect(api)


def test_mask_is_the_service_s_nifti_byte_for_byte(
    api: Api, client: Client, scans: Path, tmp_path: Path
) -> None:
    scan = next(scans.iterdir())
    raw = api.segment(scan.read_bytes(), model="organ", hospital="dune").content
    found = client.segment(scan, model="organ", hospital="dune")
    found.save(tmp_path / "mask.nii.gz")
    assert (tmp_path / "mask.nii.gz").read_bytes() == raw
    read = nib.load(tmp_path / "mask.nii.gz")
    assert np.array_equal(np.asarray(read.dataobj), found.voxels)
    assert np.array_equal(read.affine, found.mask.affine)
    assert found.report.labels["organ"].voxels == np.count_nonzero(found.voxels) > 0
    report = api.segment(scan.read_bytes(), model="organ", hospital="dune", output="json").json()
    assert {name: found.report.raw[name] for name in ("labels", "warnings", "centroids")} == {
        name: report[name] for name in ("labels", "warnings", "centroids")
    }


@pytest.mark.parametrize("unit", ["mm", "micron", "meter"])
def test_mask_has_both_forms_of_its_scan(
    api: Api, client: Client, scans: Path, tmp_path: Path, unit: str
) -> None:
    image = nib.load(next(scans.iterdir()))
    scale = {"mm": 1.0, "micron": 1000.0, "meter": 0.001}[unit]
    affine = np.diag([scale, scale, scale, 1]) @ image.affine
    turned = affine.copy()
    turned[:3, 3] += 7 * scale
    made = nib.Nifti1Image(np.asarray(image.dataobj), affine)
    made.set_sform(affine, code=2)
    made.set_qform(turned, code=1)
    made.header.set_xyzt_units(unit)
    path = tmp_path / "scan.nii.gz"
    made.to_filename(path)
    (tmp_path / "raw.nii.gz").write_bytes(api.segment(path.read_bytes()).content)
    raw, mask = nib.load(tmp_path / "raw.nii.gz"), client.segment(path).mask
    for form in ("get_sform", "get_qform"):
        expected, code = getattr(raw, form)(coded=True)
        found, found_code = getattr(mask, form)(coded=True)
        assert (code, np.allclose(expected, found)) == (found_code, True)
    assert raw.header.get_xyzt_units()[0] == mask.header.get_xyzt_units()[0]
    assert np.array_equal(np.asarray(raw.dataobj), np.asarray(mask.dataobj))


def test_path_image_and_array_are_one_scan(client: Client, scans: Path) -> None:
    scan = next(scans.iterdir())
    image = nib.load(scan)
    by_path = client.segment(scan)
    by_image = client.segment(image)
    by_array = client.segment(np.asarray(image.dataobj), affine=image.affine)
    assert np.array_equal(by_path.voxels, by_image.voxels)
    assert np.array_equal(by_path.voxels, by_array.voxels)
    assert np.allclose(by_path.mask.affine, by_array.mask.affine)


def test_folder_of_dicom_is_one_series_with_one_digest(
    client: Client, tmp_path: Path, api: Api, scans: Path
) -> None:
    image = nib.load(next(scans.iterdir()))
    voxels = np.asarray(image.dataobj)
    files = series(np.moveaxis(voxels, 2, 0).astype(np.int16), PLANES["axial"])
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    first, second = (client.segment(tmp_path, guard="warn") for _ in range(2))
    assert first.receipt.input_sha256 == second.receipt.input_sha256
    archived = api.segment(zipped(files), guard="warn")
    mask = nib.Nifti1Image.from_bytes(gzip.decompress(archived.content))
    assert np.array_equal(np.asarray(mask.dataobj), first.voxels)
    assert np.allclose(mask.affine, first.mask.affine)


def test_image_has_its_mask_in_voxels(
    start: Callable[..., Api],
    publish_bright: Callable[..., Any],
    connect: Callable[..., Client],
    tmp_path: Path,
) -> None:
    publish_bright(tmp_path)
    client = connect(start(tmp_path))
    pixels = np.zeros((40, 32), np.uint8)
    pixels[5:20, 7:30] = 200
    found = client.segment(pixels)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(found.content))), found.voxels)
    assert found.voxels.shape == (40, 32)
    assert np.count_nonzero(found.voxels) == pytest.approx(15 * 23, rel=0.1)
    assert found.report.labels["bright"].volume_ml is None
    with pytest.raises(ScanInvalid, match="voxels"):
        _ = found.mask


def test_classification_has_its_probabilities(
    start: Callable[..., Api],
    publish_dark: Callable[..., Any],
    connect: Callable[..., Client],
    tmp_path: Path,
) -> None:
    publish_dark(tmp_path)
    client = connect(start(tmp_path))
    # p(bright) = sigmoid(0.1 (130 - 100)), see `publish_dark`
    found = client.classify(np.full((28, 28), 130, np.uint8))
    assert (found.predicted, found.probabilities["bright"]) == (
        "bright",
        pytest.approx(1 / (1 + np.exp(-3)), abs=1e-4),
    )


def test_rejection_is_the_service_s_sentence(api: Api, client: Client, tmp_path: Path) -> None:
    (tmp_path / "damaged.nii.gz").write_bytes(b"\x1f\x8b\x08 no gzip")
    with pytest.raises(Problem) as caught:
        client.segment(tmp_path / "damaged.nii.gz")
    answer = api.segment((tmp_path / "damaged.nii.gz").read_bytes()).json()
    assert (str(caught.value), caught.value.status) == (answer["detail"], answer["status"])
    assert answer["type"].endswith(caught.value.slug)
    with pytest.raises(Problem, match="nowhere") as caught:
        client.serving("nowhere", "organ")
    assert caught.value.status == 404


def test_caller_without_a_valid_key_is_not_allowed(
    api: Api, start: Callable[..., Api], connect: Callable[..., Client]
) -> None:
    guarded = start(api.settings.store, auth="keys")
    for key in (None, "locum_000000000000_" + "a" * 43):
        with pytest.raises(NotAllowed):
            connect(guarded, key).models()


def test_cohort_takes_a_scan_again_and_rejects_another_of_its_name(client: Client, scans: Path) -> None:
    first, second, _ = sorted(scans.iterdir())
    cohort = client.create_cohort("dune", "of a test")
    stored = client.add_scan("dune", cohort.id, "a/b c.nii.gz", first)
    assert client.add_scan("dune", cohort.id, "a/b c.nii.gz", first) == stored
    with pytest.raises(Problem) as caught:
        client.add_scan("dune", cohort.id, "a/b c.nii.gz", second)
    assert caught.value.status == 409
    assert [scan.name for scan in client.cohort_scans("dune", cohort.id)] == ["a/b c.nii.gz"]
    assert cohort.id in [each.id for each in client.cohorts("dune")]
    client.delete_cohort("dune", cohort.id)
    assert client.cohort("dune", cohort.id).deleted_at is not None


def test_decision_that_another_client_overtook_is_rejected(api: Api, client: Client) -> None:
    client.register("north")
    client.assign("north", "organ", 1, "first", actor="ada")
    seen = client.history("north", "organ")[-1].sequence
    client.assign("north", "organ", 1, "second", actor="bob", seen=seen)
    with pytest.raises(Problem) as caught:
        client.assign("north", "organ", 1, "third", actor="ada", seen=seen)
    assert caught.value.status == 412
    assert [entry.reason for entry in client.history("north", "organ")][-2:] == ["first", "second"]


def test_events_go_on_after_a_broken_connection(
    api: Api, connect: Callable[..., Client], scans: Path
) -> None:
    client = connect(api, retries=6)
    cohort = client.create_cohort("dune")
    client.add_scan("dune", cohort.id, "a", next(scans.iterdir()))
    job = client.adapt("dune", "organ", cohort.id, {"epochs": 1}, key="once").id
    assert client.adapt("dune", "organ", cohort.id, {"epochs": 1}, key="once").id == job
    events = client.events(job)
    assert next(events).data["state"] == "queued"
    lease = take(api, job)
    assert next(events).data["state"] == "running"
    note(api, lease, "epoch", {"epoch": 1})
    assert next(events).data["epoch"] == 1
    api.cut_connections()
    note(api, lease, "epoch", {"epoch": 2})
    finish(api.context.database, lease, "fell_back", reason="enough")
    rest = list(events)
    assert [(event.type, event.data.get("epoch")) for event in rest] == [("epoch", 2), ("state", None)]
    assert rest[-1].last

    async def followed() -> list[Event]:
        async with AsyncClient(url_of(api)) as asynchronous:
            return [event async for event in asynchronous.events(job)]

    assert asyncio.run(followed()) == list(client.events(job))
    with pytest.raises(Problem) as caught:
        next(client.events("0" * 32))
    assert caught.value.status == 404


def test_request_is_sent_again_after_its_connection_broke(
    api: Api, connect: Callable[..., Client], scans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections are cut while the service computes; the client hides it."""
    client = connect(api, retries=6)
    answer, begun = scan_request.answer_prepared, 0

    def cut(*given: Any, **options: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun < 3:
            api.cut_connections()
        return answer(*given, **options)

    monkeypatch.setattr(scan_request, "answer_prepared", cut)
    found = client.segment(next(scans.iterdir()))
    assert begun == 3
    assert found.report.labels["organ"].voxels > 0


def test_both_clients_have_the_same_methods_and_answers(api: Api, client: Client, scans: Path) -> None:
    def public(kind: type) -> dict[str, str]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: str(inspect.signature(each)) for name, each in found if not name.startswith("_")}

    mine, other = public(Client), public(AsyncClient)
    assert mine.keys() == other.keys()
    assert {n: s for n, s in mine.items() if n != "events"} == {
        n: s for n, s in other.items() if n != "events"
    }

    async def several() -> list[NDArray[np.uint8]]:
        async with AsyncClient(url_of(api)) as asynchronous:
            answers = await asyncio.gather(*(asynchronous.segment(path) for path in sorted(scans.iterdir())))
            cohort = await asynchronous.create_cohort("dune")
            await asynchronous.add_scan("dune", cohort.id, "a", next(scans.iterdir()))
            assert (await asynchronous.cohort("dune", cohort.id)).scans == 1
            with pytest.raises(Problem):
                await asynchronous.job("0" * 32)
            return [answer.voxels for answer in answers]

    for path, voxels in zip(sorted(scans.iterdir()), asyncio.run(several()), strict=True):
        assert np.array_equal(client.segment(path).voxels, voxels)


def test_zip_of_a_series_names_no_file_of_the_folder(tmp_path: Path) -> None:
    """File names of an export often have the patient's name."""
    (tmp_path / "DOE^JANE.dcm").write_bytes(bytes(128) + b"DICM")
    with opened(tmp_path) as upload, zipfile.ZipFile(upload.rewound()) as archive:
        assert archive.namelist() == ["000000.dcm"]
