"""From a candidate to what serves its hospital, and back, over HTTP."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model_store.artefact import Artefact
from model_store.store import Store
from personalization.options.presets import FOR_COHORTS
from service.jobs import records
from service.jobs.files import JobFolder
from tests.helpers.service.adapted_store import (
    FIRST,
    GLOBAL,
    PASSED,
    REFUSED,
    SECOND,
    SITE,
    publish_adapted,
    publish_space,
    record_job,
)

Publish = Callable[..., Artefact]
WHO = {"actor": "ada", "reason": "looked at all of them"}


@dataclass
class Place:
    """A hospital of a test's own: of its two candidates the first passed its gate, the second failed."""

    api: Any
    publish: Publish
    hospital: str = field(default_factory=lambda: f"h-{uuid.uuid4().hex[:8]}")

    def __post_init__(self) -> None:
        assert self.client.put(f"/hospitals/{self.hospital}", json={"name": "H"}).status_code == 201
        self.job_of = {
            number: record_job(self.api.context, self.adapt(at), gate)
            for number, (at, gate) in enumerate(((FIRST, PASSED), (SECOND, REFUSED)), start=1)
        }

    @property
    def client(self) -> httpx.Client:
        client: httpx.Client = self.api.client
        return client

    @property
    def store(self) -> Store:
        return Store(self.api.settings.store)

    @property
    def serving(self) -> str:
        return f"/hospitals/{self.hospital}/serving/bright"

    def adapt(self, at: int) -> Artefact:
        space = self.store.open("bright@1")
        return publish_adapted(self.store.root, self.publish, space, self.hospital, at)

    def candidate(self, number: int) -> str:
        return f"bright.at-{self.hospital}@{number}"

    def assign(self, version: int | str, entry: int, model: str = "bright", **more: Any) -> httpx.Response:
        return self.client.put(
            f"/hospitals/{self.hospital}/serving/{model}",
            json={"version": version, **WHO, **more},
            headers={"If-Match": f'"{entry}"'},
        )

    def segment(self, scan: bytes, **fields: str) -> httpx.Response:
        answer: httpx.Response = self.api.segment(
            scan, **{"model": "bright", "hospital": self.hospital, **fields}
        )
        return answer


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Publish) -> Any:
    """On a store with bright@1 and dark@1."""
    root = tmp_path_factory.mktemp("store")
    publish_space(root, publish_bright)
    publish_bright(root, "dark", 10)
    return start(root)


@pytest.fixture
def place(api: Any, publish_bright: Publish) -> Place:
    return Place(api, publish_bright)


@pytest.fixture
def scan(make_png: Callable[..., bytes]) -> bytes:
    """A grey ramp, one pixel of each value from 0 to 199."""
    return make_png(np.arange(200, dtype=np.uint8).reshape(10, 20).repeat(4, axis=0).repeat(2, axis=1))


def threshold(answer: httpx.Response) -> int:
    """The grey value at which the network that answered begins to mark."""
    assert answer.status_code == 200, answer.text
    mask: NDArray[np.uint8] = np.asarray(Image.open(io.BytesIO(answer.content)))
    return int(200 - (mask > 0).sum() / 8)


def test_candidate_that_passed_its_gate_is_assigned_and_serves_only_its_hospital(
    place: Place, publish_bright: Publish, scan: bytes
) -> None:
    assert abs(threshold(place.segment(scan)) - GLOBAL) < 6
    entry = place.assign(place.candidate(1), 0)
    assert entry.status_code == 200
    assert (entry.json()["artefact"], entry.json()["version"]) == (place.candidate(1), 1)
    assert entry.json()["override"] is False
    answer = place.segment(scan)
    assert abs(threshold(answer) - FIRST) < 6
    assert answer.headers["locum-model"] == place.candidate(1)
    assert answer.headers["locum-personalization"] == f"hospital; hospital={place.hospital}"
    receipt = place.segment(scan, output="json", personalization="hospital").json()["receipt"]
    assert (receipt["personalization"], receipt["model"]["name"]) == ("hospital", place.candidate(1))
    assert receipt["why"].startswith(f"the version assigned to hospital '{place.hospital}'")
    assert abs(threshold(place.segment(scan, personalization="global")) - GLOBAL) < 6
    site = place.segment(scan, personalization="member", site="aster")
    assert abs(threshold(site) - SITE) < 6
    assert site.headers["locum-model"] == "bright@1"
    assert abs(threshold(Place(place.api, publish_bright).segment(scan)) - GLOBAL) < 6


def test_unassigned_candidate_answers_only_when_named(
    place: Place, publish_bright: Publish, scan: bytes
) -> None:
    preview = place.segment(scan, model=place.candidate(2), hospital="")
    assert abs(threshold(preview) - SECOND) < 6
    assert place.client.get(place.serving).json()["because"] == "newest"
    other = Place(place.api, publish_bright).segment(scan, model=place.candidate(2))
    assert (other.status_code, other.json()["type"]) == (422, "urn:locum:problem:contradiction")
    none = place.segment(scan, personalization="hospital")
    assert (none.status_code, none.json()["type"]) == (404, "urn:locum:problem:no-adapted-version")


def test_assigning_a_candidate_with_a_failed_gate_is_409_with_its_checks(place: Place) -> None:
    refused = place.assign(place.candidate(2), 0)
    problem = refused.json()
    assert (refused.status_code, problem["type"]) == (409, "urn:locum:problem:gate-refused")
    assert f"/jobs/{place.job_of[2]}/card" in problem["detail"]
    assert "fragments" in problem["detail"]
    assert "agreement" not in problem["detail"]
    assert (problem["gate"], problem["job"]) == (REFUSED, place.job_of[2])
    assert place.client.get(place.serving).headers["etag"] == '"0"'


def test_override_is_logged_with_actor_and_reason(place: Place, scan: bytes) -> None:
    entry = place.assign(place.candidate(2), 0, override=True)
    assert (entry.status_code, entry.json()["override"]) == (200, True)
    assert abs(threshold(place.segment(scan)) - SECOND) < 6
    before, kept = place.client.get(f"{place.serving}/history").json()["entries"]
    assert (before["artefact"], before["by_default"]) == ("bright@1", True)
    assert kept == entry.json()
    assert (kept["actor"], kept["reason"], kept["override"]) == (*WHO.values(), True)


@pytest.mark.parametrize("override", ["true", 1, None])
def test_override_that_is_not_a_boolean_is_422(place: Place, override: object) -> None:
    assert place.assign(place.candidate(2), 0, override=override).status_code == 422


def test_unnecessary_override_is_recorded_as_false(place: Place) -> None:
    assert place.assign(place.candidate(1), 0, override=True).json()["override"] is False
    assert place.assign(1, 2, override=True).json()["override"] is False


def test_candidate_without_a_verdict_needs_an_override(place: Place) -> None:
    unknown, never_judged = (place.adapt(at) for at in (150, 160))
    record_job(place.api.context, never_judged, None)
    for candidate in (unknown, never_judged):
        refused = place.assign(str(candidate), 0)
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:locum:problem:gate-refused")
        assert "no verdict" in refused.json()["detail"]
    assert place.assign(str(unknown), 0, override=True).json()["override"] is True


def test_rollback_returns_to_the_earlier_version_and_its_override(place: Place, scan: bytes) -> None:
    place.assign(1, 0)
    place.assign(place.candidate(2), 2, override=True)
    place.assign(place.candidate(1), 3)

    def roll_back(entry: int) -> dict[str, Any]:
        answer = place.client.post(f"{place.serving}/rollback", json=WHO, headers={"If-Match": f'"{entry}"'})
        assert answer.status_code == 200
        body: dict[str, Any] = answer.json()
        return body

    second = roll_back(4)
    assert (second["artefact"], second["restores"], second["override"]) == (place.candidate(2), 3, True)
    assert abs(threshold(place.segment(scan)) - SECOND) < 6
    first = roll_back(5)
    assert (first["artefact"], first["restores"], first["override"]) == ("bright@1", 2, False)
    assert abs(threshold(place.segment(scan)) - GLOBAL) < 6


def test_serving_names_the_served_version_and_its_reason(place: Place) -> None:
    before = place.client.get(place.serving).json()
    assert (before["artefact"], before["because"]) == ("bright@1", "newest")
    place.assign(place.candidate(1), 0)
    now = place.client.get(place.serving).json()
    assert (now["artefact"], now["version"], now["because"]) == (place.candidate(1), 1, "assigned")
    assert now["withdrawn"] is False
    place.store.withdraw(place.candidate(1), actor="ada", reason="wrong")
    assert place.client.get(place.serving).json()["withdrawn"] is True


def test_adapted_version_is_assigned_by_digest(place: Place) -> None:
    name, digest = f"bright.at-{place.hospital}", place.store.open(place.candidate(1)).digest
    assert place.assign(digest, 0).json()["artefact"] == place.candidate(1)
    assert place.assign(f"{name}@{digest}", 2).json()["artefact"] == place.candidate(1)
    assert place.assign(place.store.open("bright@1").digest, 3).json()["artefact"] == "bright@1"


def test_assigning_an_unfit_version_is_rejected_with_its_problem_type(
    place: Place, publish_bright: Publish
) -> None:
    name, second = f"bright.at-{place.hospital}", place.candidate(2)
    number = place.assign(2, 0, override=True)
    assert f"named in full: '{second}'" in number.json()["detail"]
    place.store.withdraw(place.candidate(1), actor="ada", reason="wrong")
    answers = {
        "a candidate's number": number,
        "another hospital's": place.assign(Place(place.api, publish_bright).candidate(1), 0),
        "another model's": place.assign("dark@1", 0),
        "under its own name": place.assign(2, 0, model=name, override=True),
        "under another model": place.assign(second, 0, model="dark", override=True),
        "withdrawn": place.assign(place.candidate(1), 0),
        "unknown": place.assign(place.candidate(9), 0),
        "a part": place.assign("bright.aster@1", 0),
        "no reference": place.assign("../bright@1", 0),
        "without a version": place.assign(name, 0),
    }
    assert {what: (a.status_code, a.json()["type"].split(":")[-1]) for what, a in answers.items()} == {
        "a candidate's number": (404, "artefact-not-found"),
        "another hospital's": (409, "adapted-to-another"),
        "another model's": (409, "another-model"),
        "under its own name": (409, "another-model"),
        "under another model": (409, "another-model"),
        "withdrawn": (410, "artefact-withdrawn"),
        "unknown": (404, "artefact-not-found"),
        "a part": (409, "part-of-a-composite"),
        "no reference": (422, "invalid-request"),
        "without a version": (422, "invalid-request"),
    }
    assert place.client.get(place.serving).headers["etag"] == '"0"'


def test_assigning_a_candidate_of_a_withdrawn_parent_is_410(
    start: Callable[..., Any], tmp_path: Path, publish_bright: Publish
) -> None:
    publish_space(tmp_path, publish_bright)
    place = Place(start(tmp_path), publish_bright)
    place.store.withdraw("bright@1", actor="ada", reason="mislabelled")
    orphan = place.assign(place.candidate(1), 0)
    assert orphan.status_code == 410
    assert "mislabelled" in orphan.json()["detail"]


def test_stale_assignment_is_412_before_the_gate_is_checked(place: Place) -> None:
    place.assign(1, 0)
    assert place.assign(place.candidate(2), 0).status_code == 412


def test_models_list_the_hospital_of_adapted_versions(place: Place) -> None:
    listed = {model["name"]: model["hospital"] for model in place.client.get("/models").json()["models"]}
    assert listed["bright"] is None
    assert listed[f"bright.at-{place.hospital}"] == place.hospital


@pytest.mark.parametrize("preset", ["vptta", "prompt", "distilled", "anchored", "sar", "grata"])
def test_stored_job_of_a_preset_that_is_gone_is_read_as_before_and_a_new_request_names_those_there(
    place: Place, preset: str
) -> None:
    job = place.job_of[1]
    before = place.client.get(f"/jobs/{job}").json()
    options = {"preset": preset, "epochs": 3}
    chosen = {
        **{"recipe": f"{preset}, slow", "promise": "", "members": {"aster": [0.02, -0.01, 0.05]}},
        "tried": [{"recipe": f"{preset}, slow", "predicted": 0.031, "bound": -0.008}],
    }
    with place.api.context.database.write() as session:
        stored = records.get(session, job, lock=True)
        stored.options = options
        stored.result = {**stored.result, "options": options, "playbook": chosen}
    after = place.client.get(f"/jobs/{job}").json()
    practised = [
        each
        for each in after["sections"]
        if each["title"]
        in ("What the federation's practice expects", "Recipes that were tried on these scans")
    ]
    assert len(practised) == 2
    assert after == {
        **before,
        "options": options,
        "result": {**before["result"], "options": options, "playbook": chosen},
        "sections": after["sections"],
    }
    assert [each for each in after["sections"] if each not in practised] == before["sections"]
    listed = place.client.get("/jobs", params={"hospital": place.hospital}).json()["jobs"]
    assert job in {each["id"] for each in listed}
    card = place.client.get(f"/jobs/{job}/card")
    assert card.status_code == 200, card.text
    assert f"Change of Dice by “{preset}, slow”" in card.text
    assert preset in card.text.partition("options")[2]
    # Its version serves.
    assert place.assign(1, 0).status_code == 200
    # A new request.
    body = {"cohort": "c" * 32, "model": "bright", "options": options}
    refused = place.client.post(f"/hospitals/{place.hospital}/adaptations", json=body)
    assert refused.status_code == 422, refused.text
    assert all(f"'{name}'" in refused.text for name in ("auto", *FOR_COHORTS))


def test_card_of_a_candidate_shows_gate_pictures_and_decisions(place: Place) -> None:
    job = place.job_of[2]
    folder = JobFolder(place.api.settings.open_files(), job)
    for when in ("before", "after"):
        folder.write(f"pictures/1-{when}.png", f"picture {when}".encode())
    place.assign(place.candidate(2), 0, override=True)
    card = place.client.get(f"/jobs/{job}/card")
    assert (card.status_code, card.headers["cache-control"]) == (200, "no-store")
    assert card.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in card.headers["content-security-policy"]
    for said in (
        place.candidate(2),
        "✗ failed",
        "≤ 2",
        "looked at all of them",
        "gate overridden",
        "scan 1, before",
        "encoder1",
        '<polyline class="curve"',
        "cGljdHVyZSBhZnRlcg==",
    ):
        assert said in card.text
    assert 'http-equiv="refresh"' not in card.text
    assert place.client.delete(f"/jobs/{job}/files").status_code == 204
    without = place.client.get(f"/jobs/{job}/card").text
    assert "cGljdHVyZSBhZnRlcg==" not in without
    assert "have expired or were deleted" in without
    place.store.withdraw(place.candidate(2), actor="ada", reason="too many pieces")
    assert "too many pieces (ada)" in place.client.get(f"/jobs/{job}/card").text


def test_card_of_an_unknown_job_is_404(api: Any) -> None:
    assert api.client.get(f"/jobs/{'0' * 32}/card").status_code == 404
    assert api.client.get("/jobs/none/card").status_code == 422
