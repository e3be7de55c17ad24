"""A series full of planted values goes everywhere: only its own SEG and report may repeat them."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
from pydicom import Dataset
from pydicom.dataelem import DataElement

from locum.demo.service_process import free_port, running_service
from model_store.task import Code, LabelCodes
from tests.helpers.model_store.dicom_files import PLANES, series, turned, uid, zipped
from tests.helpers.service.routing_federation import ORGAN, volume

TEXTS = (
    *(
        "PatientName",
        "PatientID",
        "OtherPatientNames",
        "PatientComments",
        "PatientAddress",
        "AccessionNumber",
    ),
    *("StudyID", "ReferringPhysicianName", "InstitutionName", "StudyDescription", "SeriesDescription"),
    # Not what a scanner calls itself (maker, model, software, station, kernel): an observation keeps that.
    *("OperatorsName", "ProtocolName", "DeviceSerialNumber", "ImageComments"),
)
DATES = ("StudyDate", "SeriesDate", "AcquisitionDate", "ContentDate", "PatientBirthDate")
UIDS = [uid(name) for name in ("study", "series", "frame of reference")]
PLANTED = [name.encode() for name in ("planted", "19610203", *UIDS)]
CODES = LabelCodes(
    category=Code(value="91723000", meaning="Anatomical Structure"),
    type=Code(value="10200004", meaning="Liver"),
)
JOB_TIMEOUT_S = 120
_OPTIONS = {"preset": "statistics"}


def plant(dataset: Dataset, place: int) -> None:
    for keyword in TEXTS:
        # Those of a series' files differ, but for what identifies its patient.
        setattr(dataset, keyword, "Planted" if keyword == "PatientID" else f"Planted {place}"[:16])
    for keyword in DATES:
        setattr(dataset, keyword, "19610203")
    dataset.add(DataElement((0x0009, 0x0010), "LO", "PLANTED CREATOR"))
    dataset.add(DataElement((0x0009, 0x1001), "UN", b"planted in private"))


def patient(number: int, plane: tuple[float, ...] = PLANES["axial"]) -> dict[str, bytes]:
    voxels = volume("dune", number)[0].voxels[..., 0].transpose(2, 1, 0)
    files = series(voxels.astype(np.int16), plane, spacing=(6.0, 6.0), gap=6.0, change=plant)
    return {f"Planted^Name/{name}": content for name, content in files.items()}


def planted_nifti(which: int) -> bytes:
    """A scan (0) or its mask (1), with values in every text of the header and of gzip."""
    scan = volume("dune", 504)[which]
    image = nib.Nifti1Image(scan.voxels[..., 0].astype(np.int16), scan.affine)
    for field in ("db_name", "descrip", "aux_file", "intent_name"):
        image.header[field] = b"planted"
    packed = io.BytesIO()
    with gzip.GzipFile("planted.nii", "wb", 0, packed) as file:
        file.write(image.to_bytes())
    return packed.getvalue()


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, routing_store: Path, publish_bright: Any
) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("secrets")
    shutil.copytree(routing_store, root / "store")
    publish_bright(root / "store", name="coded", task=ORGAN.model_copy(
        update={"codes": dict.fromkeys(ORGAN.labels, CODES)}
    ))  # fmt: skip
    return root / "store", root / "state"


@pytest.fixture(scope="module")
def client(folders: tuple[Path, Path]) -> Iterator[httpx.Client]:
    store, state = folders
    with running_service(store, state, free_port()) as client:
        client.put("/hospitals/dune", json={"name": "Dune"}).raise_for_status()
        yield client


@pytest.fixture(scope="module")
def seen(client: httpx.Client) -> dict[str, httpx.Response]:
    """Every answer to a planted series that is not the SEG or report of it."""
    found = dict(_answers(client))
    found.update(_errors(client))
    found.update(_cohort_and_jobs(client))
    found["metrics"] = client.get("/metrics")
    return found


def _answers(client: httpx.Client) -> Iterator[tuple[str, httpx.Response]]:
    content = zipped(patient(500))
    for output in ("json", "nifti", "overlay", "dicom-seg", "dicom-sr", "dicom-rtstruct"):
        answer = segment(client, content, model="coded", output=output)
        assert answer.status_code == 200, answer.text
        if output.startswith("dicom"):
            # The body repeats the patient of its series, as it must; the headers do not.
            assert b"Planted" in answer.content
            answer = httpx.Response(200, headers=answer.headers)
        yield output, answer
    waited = segment(client, content, model="organ", personalization="scan", preset="tent", output="json")
    assert waited.status_code == 202, waited.text
    yield "scan job", finished(client, waited.json()["id"])
    yield "scan job's result", client.get(f"/jobs/{waited.json()['id']}/result")


def _errors(client: httpx.Client) -> Iterator[tuple[str, httpx.Response]]:
    broken: dict[str, Callable[[Dataset, int], None]] = {
        "no position": lambda d, place: d.pop("ImagePositionPatient") and None,
        "one of another size": lambda d, place: setattr(d, "Rows", 31 if place == 2 else d.Rows),
        "one of another series": lambda d, place: setattr(
            d, "SeriesInstanceUID", uid(d.SeriesInstanceUID, place)
        ),
        "tilted": lambda d, place: setattr(d, "ImagePositionPatient", [0, 9.0 * place, 6.0 * place]),
        "several times": lambda d, place: setattr(d, "ImagePositionPatient", [0, 0, place % 3]),
        "no pixels": lambda d, place: d.pop("PixelData") and None,
    }
    voxels = np.zeros((6, 32, 32), np.int16)
    for name, change in broken.items():

        def changed(dataset: Dataset, place: int, change: Callable[[Dataset, int], None] = change) -> None:
            plant(dataset, place)
            change(dataset, place)

        answer = segment(client, zipped(series(voxels, change=changed)), model="coded", output="dicom-seg")
        assert answer.status_code in (415, 422), (name, answer.text[:500])
        yield name, answer
    files = patient(501)
    files.pop(next(iter(files)) if len(files) < 3 else list(files)[2])
    yield "a gap", segment(client, zipped(files), model="coded", output="json")
    yield "cut", segment(client, zipped(patient(501))[:9000], model="coded", output="json")


def _cohort_and_jobs(client: httpx.Client) -> Iterator[tuple[str, httpx.Response]]:
    cohort = client.post("/hospitals/dune/cohorts").headers["location"]
    for number, plane in enumerate((PLANES["axial"], turned(8), PLANES["axial"], PLANES["axial"])):
        yield (
            f"put {number}",
            client.put(f"{cohort}/scans/{number}", content=zipped(patient(500 + number, plane))),
        )
    for path, content in (("nifti", planted_nifti(0)), ("nifti/mask", planted_nifti(1))):
        assert b"planted" in content
        yield f"put {path}", client.put(f"{cohort}/scans/{path}", content=content)
    yield "cohort", client.get(cohort)
    started = {"model": "organ", "cohort": cohort.rpartition("/")[2], "options": _OPTIONS}
    yield "adapted cohort", adapt(client, {"json": started})
    files = [("scans", (f"planted-{n}.zip", zipped(patient(500 + n)))) for n in range(4)]
    yield (
        "adapted upload",
        adapt(client, {"files": files, "data": {"model": "organ", "options": json.dumps(_OPTIONS)}}),
    )
    for job in client.get("/jobs").json()["jobs"]:
        for path in ("", "/card", "/events"):
            yield f"{job['id']}{path}", client.get(f"/jobs/{job['id']}{path}")


def adapt(client: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    started = client.post("/hospitals/dune/adaptations", **body)
    assert started.status_code == 202, started.text
    return finished(client, started.json()["id"])


def finished(client: httpx.Client, job: str) -> httpx.Response:
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while time.monotonic() < deadline:
        answer = client.get(f"/jobs/{job}")
        if answer.json()["state"] in ("succeeded", "failed", "cancelled"):
            assert answer.json()["state"] == "succeeded", answer.text
            return answer
        time.sleep(0.1)
    raise AssertionError(f"the job is not over: {answer.text}")


def segment(client: httpx.Client, content: bytes, **fields: str) -> httpx.Response:
    return client.post("/segment", files={"scan": ("Planted^Name.zip", content)}, data=fields)


def test_no_answer_has_a_planted_value(seen: dict[str, httpx.Response]) -> None:
    assert len(seen) > 20
    for name, answer in seen.items():
        shown = (answer.content + repr(answer.headers.raw).encode()).lower()
        assert not [value for value in PLANTED if value in shown], (name, answer.text[:500])


def test_no_kept_file_has_a_planted_value(
    folders: tuple[Path, Path], seen: dict[str, httpx.Response]
) -> None:
    assert seen
    kept = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" and b"segment" in path.read_bytes() for path in kept)
    for path in kept:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content += gzip.decompress(content)
        content = content.lower()
        assert not [value for value in PLANTED if value in content], path
