"""An acceptance sends an answer through a real Orthanc, and says whether it comes back the same."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pydicom
import pytest
from pydicom.uid import generate_uid
from typer.testing import CliRunner

from locum.client import Client
from locum.commands.app import app
from service.database import Job
from service.worker.runner import run_job
from tests.helpers.model_store.dicom_files import series
from tests.helpers.service.coded import SERIES, STUDY, VOLUME, coded_series, publish_coded
from tests.helpers.service.orthanc import Gate, Orthanc, configure
from tests.integration.service.worker.test_acceptance import Hospital, problem

THROUGH = {"name": "main", "study": STUDY, "series": SERIES}


@pytest.fixture(scope="module")
def dune(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, gate: Gate, publish_bright: Any
) -> Hospital:
    root = tmp_path_factory.mktemp("through")
    publish_coded(root / "store", publish_bright)
    api = start(root / "store", pacs=configure(root / "pacs.yaml", gate.url))
    for name in ("dune", "reef"):
        api.client.put(f"/hospitals/{name}", json={"name": name})
    return Hospital(api)


@pytest.fixture(scope="module")
def cohort(dune: Hospital, make_png: Callable[..., bytes]) -> str:
    return dune.cohort(two(make_png), 2)


@pytest.fixture(autouse=True)
def reset(orthanc: Orthanc, gate: Gate) -> None:
    gate.rule, gate.hold_store, gate.let_pass = (lambda method, path: None), None, 0
    gate.seen.clear()
    orthanc.clear()
    orthanc.add(coded_series())


def two(make_png: Callable[..., bytes]) -> dict[str, tuple[bytes, bytes]]:
    """Two images with masks, which an acceptance needs whatever is sent through the PACS."""
    found = {}
    for number in (1, 2):
        pixels = np.random.default_rng(number).integers(0, 200, (32, 32), np.uint8)
        found[f"case-{number}.png"] = make_png(pixels), make_png((pixels > 100).astype(np.uint8))
    return found


def report_of(dune: Hospital, cohort: str, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = dune.measured(cohort, model="coded", **body)["report"]
    return found


def test_answer_comes_back_equal_voxel_by_voxel(dune: Hospital, cohort: str, orthanc: Orthanc) -> None:
    report = report_of(dune, cohort, pacs=THROUGH)
    there = int(np.count_nonzero(VOLUME > 100))
    expected = {"tested": True, "pacs": "main", "found": there, "equal": True, "differing": 0, "why": None}
    assert report["geometry"] == expected
    (stored,) = orthanc.instances("SEG")
    # By Orthanc's own interface, without our reader.
    assert (stored.StudyInstanceUID, int(np.count_nonzero(stored.pixel_array))) == (STUDY, there)
    page = dune.api.client.get(f"/jobs/{report['job']}/acceptance/report.html").text
    assert f"came back from PACS main with all of its {there} labelled voxels" in page
    with dune.api.context.database.read() as session:
        job = session.get_one(Job, report["job"])
        assert STUDY not in json.dumps([job.options, job.result, job.fingerprint])


def changed(orthanc: Orthanc, gate: Gate, change: Callable[[pydicom.Dataset], None]) -> None:
    """The PACS gives segmentations back otherwise than it has them."""

    def rule(method: str, path: str) -> Any:
        series = path.rpartition("/series/")[2]
        if method != "GET" or path.endswith("/instances") or "?" in path or series == SERIES:
            return None
        if "/series/" not in path or "/" in series:
            return None
        (stored,) = orthanc.instances("SEG")
        change(stored)
        content = io.BytesIO()
        stored.save_as(content)
        return 200, {"Content-Type": "application/dicom"}, content.getvalue()

    gate.rule = rule


def test_voxel_that_changed_on_the_way_is_counted(
    dune: Hospital, cohort: str, orthanc: Orthanc, gate: Gate
) -> None:
    def flip(stored: pydicom.Dataset) -> None:
        pixels = bytearray(stored.PixelData)
        pixels[0] ^= 0b101
        stored.PixelData = bytes(pixels)

    changed(orthanc, gate, flip)
    found = report_of(dune, cohort, pacs=THROUGH)["geometry"]
    assert (found["equal"], found["differing"]) == (False, 2)
    assert found["why"] == f"2 of {VOLUME.size} voxels are another label"


def test_planes_that_moved_on_the_way_are_said(
    dune: Hospital, cohort: str, orthanc: Orthanc, gate: Gate
) -> None:
    def move(stored: pydicom.Dataset) -> None:
        for frame in stored.PerFrameFunctionalGroupsSequence:
            frame.PlanePositionSequence[0].ImagePositionPatient[0] += 5

    changed(orthanc, gate, move)
    report = report_of(dune, cohort, pacs=THROUGH)
    found = report["geometry"]
    assert (found["tested"], found["equal"], found["differing"]) == (True, False, None)
    assert found["why"].startswith("it is on another grid: ")
    page = dune.api.client.get(f"/jobs/{report['job']}/acceptance/report.html").text
    assert "NOT equal" in page


def test_without_a_series_the_report_says_what_there_is(
    dune: Hospital, cohort: str, make_png: Callable[..., bytes], gate: Gate
) -> None:
    said = report_of(dune, cohort)["geometry"]
    assert said == {"tested": False, "why": "no series was named; the hospital may use PACS main"}
    assert gate.seen == []
    reef = Hospital(dune.api, "reef")
    said = report_of(reef, reef.cohort(two(make_png), 2))["geometry"]
    assert said == {"tested": False, "why": "no PACS is configured for this hospital"}


def test_series_that_the_guard_warns_of_is_not_stored(dune: Hospital, cohort: str, orthanc: Orthanc) -> None:
    orthanc.clear()
    orthanc.add(series(np.zeros_like(VOLUME)))
    said = report_of(dune, cohort, pacs=THROUGH)["geometry"]
    assert not said["tested"]
    assert "nothing was stored in PACS 'main'" in said["why"]
    assert orthanc.instances("SEG") == []


def test_requests_that_cannot_go_through_are_refused(dune: Hospital, cohort: str) -> None:
    other = dune.ask(cohort, model="coded", pacs={**THROUGH, "name": "other"})
    assert problem(other) == (404, "pacs-unknown")
    assert problem(dune.ask(cohort, model="plain", pacs=THROUGH)) == (422, "output-mismatch")
    assert problem(dune.ask(cohort, model="coded", pacs={**THROUGH, "study": "no uid"}))[0] == 422
    job = dune.ask(cohort, model="coded", pacs={**THROUGH, "series": generate_uid()}).json()["id"]
    run_job(job, dune.api.settings)
    ended: httpx.Response = dune.api.client.get(f"/jobs/{job}")
    assert (ended.json()["state"], "no such series" in ended.json()["reason"]) == ("failed", True)


def test_command_sends_an_answer_through_the_pacs(
    dune: Hospital, cohort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCUM_URL", str(dune.api.client.base_url))
    events = Client.events

    def after(self: Client, job: str, *given: Any, **named: Any) -> Any:
        run_job(job, dune.api.settings)
        return events(self, job, *given, **named)

    monkeypatch.setattr(Client, "events", after)
    words = ["accept", "coded", "--hospital", "dune", "--cohort", cohort, "--actor", "mara"]
    found = CliRunner().invoke(app, [*words, "--pacs", "main", STUDY, SERIES])
    assert found.exit_code == 0, found.output
    assert "geometry through PACS main: equal" in found.output
