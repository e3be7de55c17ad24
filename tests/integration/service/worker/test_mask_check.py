"""A candidate is checked over HTTP with masks of the scans where it differs most from the global model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import select

from model_store.scan import decode
from service.database import AuditRow
from service.errors import LeaseLost
from service.jobs import records
from service.jobs.files import JobFolder
from service.worker.runner import run_job
from tests.helpers.service.joining_federation import drawn_scans
from training.phantom.federation import nifti_bytes

SCANS = drawn_scans(6, "heath")


@dataclass
class Checked:
    """A hospital's cohort of six scans without masks, and the finished job that made a candidate from it."""

    api: Any
    cohort: str
    job: dict[str, Any]

    @property
    def scans(self) -> str:
        return f"/hospitals/dune/cohorts/{self.cohort}/scans"

    def names(self) -> dict[str, str]:
        listed = self.api.client.get(self.scans).json()["scans"]
        return {scan["sha256"]: scan["name"] for scan in listed}

    def post(self, path: str = "", **more: Any) -> httpx.Response:
        answer: httpx.Response = self.api.client.post(f"/jobs/{self.job['id']}/checks{path}", **more)
        return answer

    def chosen(self, **body: Any) -> dict[str, Any]:
        accepted = self.post(json=body)
        assert accepted.status_code == 202, accepted.text
        return finished(self.api, accepted.json()["id"])

    def draw(self, check: dict[str, Any], masks: Callable[[str], bytes]) -> None:
        names = self.names()
        for each in check["result"]["draws"]:
            name = names[each["scan"]]
            answer = self.api.client.put(f"{self.scans}/{name}/mask?model=organ", content=masks(name))
            assert answer.status_code in (200, 201), answer.text

    def clear(self) -> None:
        for scan in self.api.client.get(self.scans).json()["scans"]:
            if scan["mask"]:
                assert self.api.client.delete(f"{self.scans}/{scan['name']}/mask").status_code == 204

    def gate(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.client.get(f"/jobs/{self.job['id']}").json()["gate"]
        return found


def finished(api: Any, job: str) -> dict[str, Any]:
    run_job(job, api.settings)
    found: dict[str, Any] = api.client.get(f"/jobs/{job}").json()
    assert found["state"] in ("succeeded", "fell_back"), found["reason"]
    return found


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")


def truth(name: str) -> bytes:
    return SCANS[name][1]


@pytest.fixture(scope="module")
def module(
    start: Callable[..., Any], routing_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Checked:
    store = shutil.copytree(routing_store, tmp_path_factory.mktemp("copy") / "store")
    api = start(store)
    api.client.put("/hospitals/dune", json={"name": "dune"})
    place: str = api.client.post("/hospitals/dune/cohorts").headers["location"]
    for name, (scan, _) in SCANS.items():
        api.client.put(f"{place}/scans/{name}", content=scan)
    cohort = place.rpartition("/")[2]
    asked = {"cohort": cohort, "model": "organ", "options": {"preset": "ladder", "doses": [1, 1, 1]}}
    made = api.client.post("/hospitals/dune/adaptations", json=asked)
    return Checked(api, cohort, finished(api, made.json()["id"]))


@pytest.fixture
def checked(module: Checked) -> Checked:
    """As after its adaptation: without masks, and without a verdict by masks."""
    module.clear()
    assert module.api.client.delete(f"/jobs/{module.job['id']}/checks/verdict").status_code == 200
    assert module.gate() == module.job["gate"]
    return module


def answered_by_parent(checked: Checked) -> Callable[[str], bytes]:
    """Masks that are the global model's own answers: the candidate is worse by all its changes."""

    def mask(name: str) -> bytes:
        answer = checked.api.segment(SCANS[name][0], model="organ", personalization="global")
        scan = decode(answer.content)
        assert scan.affine is not None
        return nifti_bytes(np.asarray(scan.voxels[..., 0], np.uint8), scan.affine)

    return mask


def test_check_chooses_the_scans_that_differ(checked: Checked) -> None:
    found = checked.chosen(masks=3, seed=1)
    result = found["result"]
    assert (found["kind"], result["patients"]) == ("mask-check", 6)
    names = checked.names()
    assert 1 < len(result["draws"]) <= 3
    for each in result["draws"]:
        assert each["scan"] in names
        assert each["disagreement"] > 0
        assert 0 < each["probability"] < 1
    assert sum(each["times"] for each in result["draws"]) == 3
    assert checked.chosen(masks=3, seed=1)["result"] == result
    assert checked.gate() == checked.job["gate"]  # nothing is decided yet


def test_masks_that_show_a_gain_accept_what_the_gate_refused_and_can_be_taken_back(checked: Checked) -> None:
    assert checked.job["gate"]["passed"] is False
    check = checked.chosen(masks=6)
    checked.draw(check, truth)
    path = f"/{check['id']}/verdict"
    accepted = checked.post(path, headers={"Idempotency-Key": "once"})
    assert accepted.status_code == 202, accepted.text
    verdict = finished(checked.api, accepted.json()["id"])["result"]["verdict"]
    assert (verdict["decision"], verdict["masks"], verdict["patients"]) == ("accepts", 6, 6)
    assert 0 <= verdict["at_least"] <= verdict["change"] <= verdict["at_most"]
    gate = checked.gate()
    assert gate["passed"] is True
    assert gate["masks"] == verdict
    assert gate["checks"] == checked.job["gate"]["checks"]
    again = checked.post(path, headers={"Idempotency-Key": "once"})
    assert (again.json()["id"], again.headers["idempotency-replayed"]) == (accepted.json()["id"], "true")
    page = checked.api.client.get(f"/jobs/{checked.job['id']}/card").text
    assert "they accept the candidate" in page
    listed = checked.api.client.get(f"/jobs/{checked.job['id']}/checks").json()["checks"]
    assert [listed[0]["kind"], listed[1]["kind"]] == ["mask-verdict", "mask-check"]
    body = {"version": checked.job["candidate"]["reference"], "actor": "ines", "reason": "six masks"}
    made = checked.api.client.put("/hospitals/dune/serving/organ", json=body, headers={"If-None-Match": "*"})
    assert (made.status_code, made.json()["override"]) == (200, False), made.text
    back = checked.api.client.delete(f"/jobs/{checked.job['id']}/checks/verdict")
    assert back.json()["gate"] == checked.job["gate"]
    with checked.api.context.database.read() as session:
        rows = session.scalars(select(AuditRow).where(AuditRow.action.startswith("gate."))).all()
    assert [row.action for row in rows][-2:] == ["gate.decided", "gate.restored"]
    assert rows[-2].details["decision"] == "accepts"
    assert rows[-2].version == checked.job["candidate"]["digest"]


def test_masks_that_show_a_loss_refuse_the_candidate(checked: Checked) -> None:
    check = checked.chosen(masks=6)
    checked.draw(check, answered_by_parent(checked))
    verdict = finished(checked.api, checked.post(f"/{check['id']}/verdict").json()["id"])["result"]["verdict"]
    assert verdict["decision"] == "refuses"
    assert verdict["change"] <= verdict["at_most"] < 0
    assert checked.gate()["passed"] is False
    body = {"version": checked.job["candidate"]["reference"], "actor": "ines", "reason": "all the same"}
    state = checked.api.client.get("/hospitals/dune/serving/organ").headers["etag"]
    refused = checked.api.client.put("/hospitals/dune/serving/organ", json=body, headers={"If-Match": state})
    assert problem(refused) == (409, "gate-refused")
    assert "masks of its scans refused it" in refused.json()["detail"]


def test_verdict_needs_the_masks_of_all_chosen_scans(checked: Checked) -> None:
    check = checked.chosen(masks=6)
    none = checked.post(f"/{check['id']}/verdict")
    assert problem(none) == (422, "masks-missing")
    assert "6 are missing, first: scan 'patient-" in none.json()["detail"]
    foreign = checked.post(f"/{checked.job['id']}/verdict")
    assert problem(foreign) == (409, "candidate-not-checkable")


def test_check_refuses_what_has_no_candidate(checked: Checked) -> None:
    check = checked.chosen(masks=2)
    answer = checked.api.client.post(f"/jobs/{check['id']}/checks", json={})
    assert problem(answer) == (409, "candidate-not-checkable")
    assert problem(checked.api.client.post(f"/jobs/{'0' * 32}/checks", json={})) == (404, "job-unknown")
    assert problem(checked.post(json={"masks": 1})) == (422, "invalid-request")
    waiting = checked.api.client.post(
        "/hospitals/dune/adaptations",
        json={"cohort": checked.cohort, "model": "organ", "options": {"preset": "ladder"}},
    ).json()["id"]
    assert problem(checked.api.client.post(f"/jobs/{waiting}/checks", json={})) == (409, "job-not-over")
    checked.api.client.delete(f"/jobs/{waiting}")


def test_candidate_that_learned_from_masks_is_not_checked_with_them(checked: Checked) -> None:
    names = sorted(SCANS)
    for name in names[:4]:
        checked.api.client.put(f"{checked.scans}/{name}/mask", content=truth(name))
    options = {"preset": "masks", "steps": 20, "folds": 2}
    asked = {"cohort": checked.cohort, "model": "organ", "options": options}
    made = finished(
        checked.api, checked.api.client.post("/hospitals/dune/adaptations", json=asked).json()["id"]
    )
    check = finished(checked.api, checked.api.client.post(f"/jobs/{made['id']}/checks", json={}).json()["id"])
    assert check["result"]["patients"] == 2
    listed = checked.names()
    assert {listed[each["scan"]] for each in check["result"]["draws"]} <= set(names[4:])


def test_killed_check_goes_on_after_the_scans_it_has_compared(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checked.chosen(masks=4, seed=3)
    job = checked.post(json={"masks": 4, "seed": 3}).json()["id"]
    write, dead = JobFolder.write, []

    def dies(self: JobFolder, name: str, content: bytes) -> None:
        write(self, name, content)
        dead.append(name)
        if len(dead) == 3:
            raise LeaseLost("as if the process were gone")

    with monkeypatch.context() as patched:
        patched.setattr(JobFolder, "write", dies)
        run_job(job, checked.api.settings)
    with checked.api.context.database.write() as session:
        records.get(session, job).lease_until = records.get(session, job).created_at
    found = finished(checked.api, job)
    assert (found["attempt"], found["result"]) == (2, whole["result"])
