"""Jobs of kind `scan`, run in this process: an answer like any other, and nothing else."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.digest import sha256
from service.catalog.network import FLAGGED
from service.jobs import records
from service.jobs.files import JobFolder
from service.worker.runner import run_job
from tests.helpers.service.routing_federation import outside_scans, volume
from tests.helpers.service.viewer_clients import parts_as_text, voxels_of
from tests.helpers.service.workplace import Workplace, opened
from tests.helpers.waiting import wait_for

PATIENT = 500


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, routing_store: Path) -> Iterator[Workplace]:
    with opened(tmp_path_factory.mktemp("scans"), routing_store) as opened_place:
        yield opened_place


@pytest.fixture(scope="module")
def scan() -> bytes:
    (data,) = outside_scans(1, first=PATIENT).values()
    return data


def files_in(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_scan_job_is_repeatable_and_keeps_only_its_result(place: Workplace, scan: bytes) -> None:
    before = files_in(place.settings.store)
    answers = []
    for _ in range(2):
        job_id = place.scan_job(scan)
        run_job(job_id, place.settings)
        job = place.job(job_id)
        assert (job.state, job.candidate_name, job.gate) == ("succeeded", None, None)
        answer = place.folder(job_id).read_result()
        assert answer is not None
        answers.append(answer)
        assert place.folder(job_id).names == ["result", "result.json"]
    first, second = answers
    assert first.body == second.body
    assert first.headers["Locum-Graph"] == second.headers["Locum-Graph"]
    assert first.headers["Locum-Graph"] not in {sha256(content) for content in before.values()}
    assert (first.headers["Locum-Model"], first.headers["Locum-Personalization"]) == ("organ@1", "scan")
    assert first.media_type == "application/gzip"
    assert files_in(place.settings.store) == before
    _, truth = volume("dune", PATIENT)
    mask = np.asarray(nib.Nifti1Image.from_bytes(gzip.decompress(first.body)).dataobj)
    assert _dice(mask, truth.voxels[..., 0]) > 0.7


def test_scan_that_was_sent_during_an_alarm_is_answered_with_the_warning(
    place: Workplace, scan: bytes
) -> None:
    for alarmed in (True, False):
        job_id = place.scan_job(scan, alarmed=alarmed)
        run_job(job_id, place.settings)
        answer = place.folder(job_id).read_result()
        assert answer is not None
        assert ("watch-alarm" in answer.headers.get("Locum-Warning-Names", "").split(", ")) == alarmed


def _dice(mask: NDArray[np.generic], truth: NDArray[np.generic]) -> float:
    return float(2 * np.sum((mask > 0) & (truth > 0)) / (np.sum(mask > 0) + np.sum(truth > 0)))


def test_scan_job_options_change_the_adapted_graph(place: Workplace, scan: bytes) -> None:
    found = {}
    for name, options in {
        "the default": {},
        "the default, said": {"preset": "auto"},
        "intent": {"preset": "intent"},
        "paper": {"preset": "paper"},
        "no shape": {"preset": "paper", "shape_weight": 0.0},
        "statistics": {"preset": "statistics"},
        "Tent": {"preset": "tent"},
    }.items():
        job_id = place.scan_job(scan, **options)
        run_job(job_id, place.settings)
        answer, result = place.folder(job_id).read_result(), place.job(job_id).result
        assert answer is not None
        assert result is not None
        found[name] = (answer.headers["Locum-Graph"], result["epochs"])
    # It is not known how far the members of this space are apart.
    assert found["the default"] == found["the default, said"] == found["intent"]
    assert len({graph for graph, _ in found.values()}) == 5
    assert found["the default"][1] == found["statistics"][1] == 0
    assert found["no shape"][1] > 0
    assert found["Tent"][1] > 0


def test_scan_job_report_names_model_graph_and_options(place: Workplace, scan: bytes) -> None:
    job_id = place.scan_job(scan, output="json", model="organ", personalization="scan")
    run_job(job_id, place.settings)
    answer = place.folder(job_id).read_result()
    assert answer is not None
    report = json.loads(answer.body)
    receipt = report["receipt"]
    assert receipt["input_sha256"] == sha256(scan)
    assert (receipt["model"]["name"], receipt["personalization"]) == ("organ@1", "scan")
    assert receipt["network"]["digest"] == receipt["graph"] == answer.headers["Locum-Graph"]
    assert receipt["options"]["output"] == "json"
    assert report["labels"]["organ"]["voxels"] > 0
    stages = [event.data["stage"] for event in place.events(job_id, "progress")]
    assert list(dict.fromkeys(stages)) == ["preparing", "adapting", "segmenting"]


def test_scan_job_of_an_unfit_scan_fails_and_deletes_it(
    place: Workplace, make_png: Callable[..., bytes]
) -> None:
    colour = np.zeros((32, 32, 3), np.uint8)
    colour[..., 0] = np.arange(32)
    job_id = place.scan_job(make_png(colour))
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert job.state == "failed"
    assert job.reason is not None
    assert "colour" in job.reason
    assert "input" not in place.folder(job_id).names
    assert place.folder(job_id).read_result() is None


def test_scan_job_with_guard_refuse_fails_on_an_unusual_scan(
    place: Workplace, make_png: Callable[..., bytes]
) -> None:
    image = np.random.default_rng(0).integers(0, 255, (64, 64)).astype(np.uint8)
    job_id = place.scan_job(make_png(image), guard="refuse")
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert job.state == "failed"
    assert job.reason is not None
    assert "grey image" in job.reason


def test_scan_job_of_a_vanished_scan_fails_with_a_reason(place: Workplace) -> None:
    job_id = place.scan_job(b"scan")
    place.folder(job_id).delete()
    run_job(job_id, place.settings)
    assert place.job(job_id).reason == "the scan is not there any more; send it again"


def test_scan_personalization_has_the_warnings_of_its_version(
    start: Callable[..., Any], routing_store: Path, tmp_path: Path, scan: bytes
) -> None:
    api = start(shutil.copytree(routing_store, tmp_path / "store"))
    for hospital, site in (("known", "aster"), ("lost", "nowhere")):
        api.client.put(f"/hospitals/{hospital}", json={"name": hospital, "site": site}).raise_for_status()

    def ask(hospital: str, **fields: str) -> Any:
        data = {"model": "organ", "personalization": "scan", "hospital": hospital, **fields}
        return api.client.post("/segment", files={"scan": ("scan", scan)}, data=data)

    def warned(headers: Mapping[str, str]) -> set[str]:
        return {*headers.get("Locum-Warning-Names", "").split(", ")} & {"site-unknown", FLAGGED}

    assert warned(ask("known").headers) == set()
    assert warned(ask("lost").headers) == {"site-unknown"}
    job_id = ask("lost", preset="statistics").json()["id"]
    run_job(job_id, api.settings)
    answer = JobFolder(api.settings.open_files(), job_id).read_result()
    assert answer is not None
    assert warned(answer.headers) == {"site-unknown"}
    api.store.withdraw("organ.birch@1", actor="ada", reason="a site withdrew")
    assert warned(ask("known").headers) == {FLAGGED}
    # A worker needs every part.
    refused = ask("known", preset="statistics")
    assert (refused.status_code, refused.json()["type"]) == (410, "urn:locum:problem:artefact-withdrawn")
    assert queued(api) == []


def test_viewer_waits_for_the_job_and_gets_report_and_mask(
    start: Callable[..., Any], routing_store: Path, scan: bytes
) -> None:
    api = start(routing_store, monailabel="prefix")
    session = api.client.put("/monailabel/session/", files={"files": ("a.nii", scan)}).json()["session_id"]
    params = {"personalization": "scan", "preset": "statistics", "result_compress": False}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            api.client.post,
            "/monailabel/infer/organ",
            params={"session_id": session},
            files={"params": (None, json.dumps(params))},
        )
        wait_for(lambda: queued(api) or waiting.done())
        (job_id,) = queued(api)
        run_job(job_id, api.settings)
        answer = waiting.result(30)
    assert answer.status_code == 200, answer.text
    params, nrrd = parts_as_text(answer)
    assert (params["receipt"]["personalization"], params["label_names"]) == ("scan", {"organ": 1})
    assert voxels_of(nrrd).sum() == params["labels"]["organ"]["voxels"] > 0
    # The viewer never saw the job's id.
    assert not (api.settings.state_dir / "jobs" / job_id).exists()


def queued(api: Any) -> list[str]:
    with api.context.database.read() as session:
        return [job.id for job in records.listed(session, state="queued")]
