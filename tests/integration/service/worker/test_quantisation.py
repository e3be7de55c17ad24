"""A graph in int8 over HTTP: made and judged by a job, assigned, rolled back, withdrawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.harness import forked
from model_store.manifest import GRAPH, WEIGHTS
from model_store.store import Store
from service.audit import trail
from service.database import Job
from service.quantisation import work
from service.worker.runner import run_job
from tests.helpers.service.quantised import graph_of, manifest, scans

SERVING = "/hospitals/dune/serving/discs"
SCANS = scans(8)


@dataclass
class Made:
    """A hospital's cohort, and the finished job that made a graph of the model that answers it."""

    api: Any
    cohort: str
    job: dict[str, Any]

    @property
    def store(self) -> Store:
        found: Store = self.api.store
        return found

    def decide(self, path: str = "", **body: object) -> httpx.Response:
        tag = self.api.client.get(SERVING).headers["etag"]
        send = self.api.client.post if path else self.api.client.put
        body |= {"actor": "ada", "reason": "cheaper"}
        answer: httpx.Response = send(f"{SERVING}{path}", json=body, headers={"If-Match": tag})
        return answer

    def segment(self, **fields: str) -> httpx.Response:
        asked = {"model": "discs", "hospital": "dune", "output": "json", **fields}
        answer: httpx.Response = self.api.segment(SCANS[0].content, **asked)
        return answer

    def receipt(self, **fields: str) -> dict[str, Any]:
        answer = self.segment(**fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["receipt"]
        return found

    def quantise(self, hospital: str = "dune", **body: object) -> httpx.Response:
        answer: httpx.Response = self.api.client.post(f"/hospitals/{hospital}/quantisations", json=body)
        return answer


def finished(api: Any, job: str) -> dict[str, Any]:
    run_job(job, api.settings)
    found: dict[str, Any] = api.client.get(f"/jobs/{job}").json()
    return found


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")


@pytest.fixture(scope="module")
def made(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("discs") / "store"
    for steps in (40, 30):
        Store(root).publish(manifest(), {WEIGHTS: b"none", GRAPH: graph_of(steps)})
    api = start(root)
    api.client.put("/hospitals/dune", json={"name": "dune"})
    place: str = api.client.post("/hospitals/dune/cohorts").headers["location"]
    for scan in SCANS:
        api.client.put(f"{place}/scans/{scan.name}", content=scan.content)
    cohort = place.rpartition("/")[2]
    accepted = api.client.post("/hospitals/dune/quantisations", json={"cohort": cohort, "model": "discs@1"})
    assert accepted.status_code == 202, accepted.text
    return Made(api, cohort, finished(api, accepted.json()["id"]))


def test_job_publishes_the_graph_and_says_what_it_found(made: Made) -> None:
    assert (made.job["kind"], made.job["state"]) == ("quantisation", "succeeded"), made.job
    graph = made.store.open("discs.int8@1")
    assert made.job["result"]["version"] == str(graph)
    assert made.job["result"]["graph"] == graph.manifest.files[GRAPH].sha256
    assert made.job["gate"] == graph.manifest.lineage.details["gate"]
    assert not any(scan.name in json.dumps(made.job) for scan in SCANS)
    (section,) = made.job["sections"]
    assert section["tone"] == "good"
    assert "discs.int8@1" in section["sentences"][0]
    # It is no model that is offered.
    assert "discs.int8" not in {each["name"] for each in made.api.client.get("/models").json()["models"]}


def test_precision_is_assigned_rolled_back_and_in_every_receipt(made: Made) -> None:
    assert made.decide(version=1).status_code == 200
    plain = made.receipt()
    assert (plain["precision"], plain["network"]["name"]) == ("float32", "discs@1")
    assert made.decide(version=1, precision="int8").status_code == 200
    served = made.receipt()
    graph = made.store.open("discs.int8@1")
    assert (served["precision"], served["model"]["name"]) == ("int8", "discs@1")
    assert served["network"] == {"name": str(graph), "digest": graph.digest}
    assert served["graph"] == graph.manifest.files[GRAPH].sha256 != plain["graph"]
    # The version by its name is the assigned one all the same; without the hospital nothing is assigned.
    assert made.receipt(model="discs@1")["precision"] == "int8"
    assert (
        made.api.segment(SCANS[0].content, model="discs@1", output="json").json()["receipt"]["precision"]
        == "float32"
    )
    history = made.api.client.get(f"{SERVING}/history").json()["entries"]
    assert [each["precision"] for each in history][-2:] == ["float32", "int8"]
    assert history[-1]["reduced"] == graph.digest
    assert made.decide("/rollback").status_code == 200
    assert made.receipt()["graph"] == plain["graph"]
    with made.api.context.database.read() as session:
        trail.verify(session)


def test_graph_that_is_missing_or_on_another_device_is_not_assigned(made: Made) -> None:
    absent = made.decide(version=2, precision="int8")
    assert problem(absent) == (409, "precision-unavailable")
    assert "'discs@2' is to answer in int8: expected a graph of it in the store, found none" in absent.text
    assert problem(made.decide(version=1, precision="float16")) == (409, "precision-unavailable")
    assert made.decide(version=1, precision="int4").status_code == 422


def test_named_graph_answers_for_review_and_is_not_assigned_itself(made: Made) -> None:
    found = made.api.segment(SCANS[0].content, model="discs.int8@1", output="json").json()["receipt"]
    assert (found["precision"], found["model"]["name"]) == ("int8", "discs.int8@1")
    unnamed = made.api.segment(SCANS[0].content, model="discs.int8", output="json")
    assert problem(unnamed) == (422, "version-not-named")
    assert problem(made.decide(version="discs.int8@1")) == (409, "part-of-a-composite")


def test_wrong_requests_are_refused_before_a_job_is_made(made: Made) -> None:
    body = {"cohort": made.cohort, "model": "discs@1"}
    assert problem(made.quantise("erg", **body)) == (404, "hospital-unknown")
    assert problem(made.quantise(**body, precision="float16")) == (409, "precision-unavailable")
    assert problem(made.quantise(**{**body, "model": "discs.int8@1"})) == (422, "not-reducible")
    assert made.quantise(**{**body, "cohort": "0" * 32}).status_code == 404
    assert made.quantise(**body, precision="int4").status_code == 422


def test_graph_that_its_gate_refuses_leaves_the_float32_graph(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A graph of other weights, as a conversion that went wrong would give.
    monkeypatch.setattr(work, "reduced", lambda *_: graph_of(6))
    accepted = made.quantise(cohort=made.cohort, model="discs@2")
    job = finished(made.api, accepted.json()["id"])
    assert job["state"] == "fell_back"
    assert job["reason"] == "the gate refuses the graph in int8: the float32 graph stays"
    assert job["result"]["version"] is None
    assert job["sections"][0]["tone"] == "bad"
    assert made.store.versions.numbers("discs.int8") == [1]


def test_command_makes_the_same_version_as_the_job(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    for scan in SCANS:
        (folder / scan.name).write_bytes(scan.content)
    line = ["model_store", "quantise", "discs@1", "--store", made.api.settings.store]
    done = forked.run(*line, "--scans", folder, "--report", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    assert f"published discs.int8@1  {made.store.open('discs.int8@1').digest}" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is True
    missing = forked.run(*line, "--scans", tmp_path / "none")
    assert missing.returncode == 2
    assert "expected a folder with scans" in missing.stderr


def test_graph_of_a_candidate_waits_for_its_adaptation(
    start: Callable[..., Any], routing_store: Path
) -> None:
    api = start(routing_store)
    api.client.put("/hospitals/dune", json={"name": "dune"})
    place: str = api.client.post("/hospitals/dune/cohorts").headers["location"]
    api.client.put(f"{place}/scans/a.png", content=SCANS[0].content)
    asked = {"cohort": place.rpartition("/")[2], "model": "organ", "quantise": "int8"}
    adaptation = api.client.post("/hospitals/dune/adaptations", json=asked)
    assert adaptation.status_code == 202, adaptation.text
    jobs = api.client.get("/jobs?hospital=dune").json()["jobs"]
    (follower,) = (each["id"] for each in jobs if each["kind"] == "quantisation")
    waiting = finished(api, follower)
    assert (waiting["state"], waiting["options"]["after"]) == ("queued", adaptation.json()["id"])
    assert "is not over" in waiting["progress"]["why"]
    api.client.delete(f"/jobs/{adaptation.json()['id']}")
    with api.context.database.write() as session:
        session.get(Job, follower).retry_at = None
    over = finished(api, follower)
    assert over["state"] == "failed"
    assert "is cancelled and made no candidate" in over["reason"]


def test_withdrawn_graph_is_refused_and_never_replaced_by_float32(made: Made) -> None:
    assert made.decide(version=1, precision="int8").status_code == 200
    made.store.withdraw("discs.int8@1", actor="ada", reason="wrong scales")
    refused = made.segment()
    assert problem(refused) == (410, "artefact-withdrawn")
    assert "assign the version again with precision=float32" in refused.json()["detail"]
    assert made.api.client.get(SERVING).json()["withdrawn"] is True
    assert problem(made.decide(version=1, precision="int8")) == (409, "precision-unavailable")
    assert made.decide(version=1).status_code == 200
    assert made.receipt()["precision"] == "float32"
    # What was served before cannot serve again.
    assert problem(made.decide("/rollback")) == (410, "artefact-withdrawn")
