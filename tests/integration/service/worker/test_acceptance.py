"""An acceptance over HTTP: what is scored is what `/segment` answers, and two persons stand behind it."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sqlalchemy import select, update

from model_store.signing import TrustedKeys, make_key
from service.database import Assignment, AuditRow, Job, Observation, ObservedLabel
from service.errors import LeaseLost
from service.jobs import records
from service.jobs.files import JobFolder
from service.worker import acceptance
from service.worker.runner import run_job
from tests.helpers.service.volume_federation import publish_volumes
from tests.helpers.service.volume_federation import scans as volumes

ASKED = {"labels": {"bright": {"least_dice": 0.5, "largest_bias_share": 0.5}}}


def drawings(count: int, make_png: Callable[..., bytes]) -> dict[str, tuple[bytes, bytes]]:
    """Bright discs beside bright specks, and a mask that is a little larger than each disc."""
    rows, columns = np.mgrid[:40, :48]
    made = {}
    for number in range(count):
        draw = np.random.default_rng(number)
        far = np.hypot(rows - draw.uniform(14, 26), columns - draw.uniform(16, 32))
        pixels = np.where(far < 8, 180, 40) + draw.integers(0, 20, far.shape)
        pixels[1:4, 1:4] = 220
        mask = (far < 8 + draw.uniform(0, 2)).astype(np.uint8)
        made[f"patient-{number}.png"] = make_png(pixels.astype(np.uint8)), make_png(mask)
    return made


@dataclass
class Hospital:
    """A hospital, and what its acceptances need."""

    api: Any
    name: str = "dune"

    def cohort(self, files: Mapping[str, tuple[bytes, bytes]], drawn: int) -> str:
        """A cohort of scans, of which the first have their masks."""
        place: str = self.api.client.post(f"/hospitals/{self.name}/cohorts").headers["location"]
        for number, (name, (scan, mask)) in enumerate(files.items()):
            assert self.api.client.put(f"{place}/scans/{name}", content=scan).status_code == 201
            if number < drawn:
                answer = self.api.client.put(f"{place}/scans/{name}/mask", content=mask)
                assert answer.status_code == 201, answer.text
        return place.rpartition("/")[2]

    def ask(self, cohort: str, **body: Any) -> httpx.Response:
        body = {"cohort": cohort, "actor": "mara", **body}
        answer: httpx.Response = self.api.client.post(f"/hospitals/{self.name}/acceptances", json=body)
        return answer

    def measured(self, cohort: str, **body: Any) -> dict[str, Any]:
        accepted = self.ask(cohort, **body)
        assert accepted.status_code == 202, accepted.text
        job = accepted.json()["id"]
        run_job(job, self.api.settings)
        answer = self.api.client.get(f"/jobs/{job}/acceptance")
        assert answer.status_code == 200, answer.text + self.api.client.get(f"/jobs/{job}").text
        found: dict[str, Any] = answer.json()
        return found

    def decide(self, document: Mapping[str, Any], **body: Any) -> httpx.Response:
        body = {"accepted": True, "actor": "ines", "reason": "looked at it", **body}
        path = f"/jobs/{document['report']['job']}/acceptance"
        answer: httpx.Response = self.api.client.post(path, json=body)
        return answer

    def assign(self, model: str, version: int) -> httpx.Response:
        path = f"/hospitals/{self.name}/serving/{model}"
        tag = self.api.client.get(path).headers["etag"]
        body = {"version": version, "actor": "ines", "reason": "accepted"}
        answer: httpx.Response = self.api.client.put(path, json=body, headers={"If-Match": tag})
        return answer


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "store.pem"
    make_key(path)
    return path


@pytest.fixture(scope="module")
def dune(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Any, key: Path
) -> Hospital:
    """A hospital with `bright@1`; `bright@2` keeps the largest component, and `ball` sees volumes."""
    store = tmp_path_factory.mktemp("models") / "store"
    publish_volumes(store)
    first = publish_bright(store)
    task = first.manifest.task.model_copy(update={"keep_largest": ("bright",)})
    publish_bright(store, task=task)
    api = start(store, signing_key=key)
    api.client.put("/hospitals/dune", json={"name": "dune"})
    hospital = Hospital(api)
    path = "/hospitals/dune/serving/bright"
    body = {"version": 1, "actor": "ines", "reason": "first"}
    made = api.client.put(path, json=body, headers={"If-None-Match": "*"})
    assert made.status_code == 200, made.text
    return hospital


@pytest.fixture(scope="module")
def discs(make_png: Callable[..., bytes]) -> dict[str, tuple[bytes, bytes]]:
    return drawings(16, make_png)


@pytest.fixture(scope="module")
def cohort(dune: Hospital, discs: dict[str, tuple[bytes, bytes]]) -> str:
    """Sixteen images, twelve of them with masks."""
    return dune.cohort(discs, 12)


@pytest.fixture(scope="module")
def accepted(dune: Hospital, cohort: str) -> dict[str, Any]:
    """The document of an acceptance of `bright@2`."""
    return dune.measured(cohort, model="bright@2", thresholds=ASKED)


def image(content: bytes) -> NDArray[Any]:
    return np.asarray(Image.open(io.BytesIO(content)))


def voxels(content: bytes) -> NDArray[Any]:
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    return np.asarray(nib.Nifti1Image.from_bytes(content).dataobj)


def naive(found: NDArray[Any], drawn: NDArray[Any]) -> float:
    both = total = 0
    for one, other in zip(found.ravel().tolist(), drawn.ravel().tolist(), strict=True):
        both += one > 0 and other > 0
        total += (one > 0) + (other > 0)
    return 2 * both / total


def check_each_scan(
    dune: Hospital,
    report: Mapping[str, Any],
    files: Mapping[str, tuple[bytes, bytes]],
    read: Callable[[bytes], NDArray[Any]],
) -> None:
    """Dice of every scan is that of the mask that `/segment` gives."""
    label, *_ = report["labels"]
    by_scan = {each["scan"]: each for each in report["scans"]}
    compared = 0
    for scan, mask in files.values():
        own = by_scan[f"sha256:{sha256(scan).hexdigest()}"]
        if not own["labels"]:
            continue
        answer = dune.api.segment(scan, model=report["version"], hospital="dune", guard="warn")
        assert answer.status_code == 200, answer.text
        assert own["labels"][label]["dice"] == pytest.approx(
            naive(read(answer.content), read(mask)), abs=1e-12
        )
        compared += 1
    assert compared == report["n"]


def test_dice_of_images_is_that_of_the_masks_that_segment_gives(
    dune: Hospital, accepted: dict[str, Any], discs: dict[str, tuple[bytes, bytes]]
) -> None:
    report = accepted["report"]
    check_each_scan(dune, report, discs, image)
    own = report["labels"]["bright"]
    dice = [each["labels"]["bright"]["dice"] for each in report["scans"] if each["labels"]]
    assert own["dice"] == pytest.approx(np.mean(dice), abs=1e-6)
    assert own["lower_bound"] < min(own["dice"], own["prediction_powered"]["mean"])
    assert (own["n"], own["missed"], own["bias_ml"], report["distance_unit"]) == (12, 0, None, "pixels")
    assert own["prediction_powered"]["others"] == 4


def test_report_has_what_is_observed_of_an_answer(
    dune: Hospital, accepted: dict[str, Any], discs: dict[str, tuple[bytes, bytes]]
) -> None:
    """The watch ranks answers among these numbers, so that they are the same to the last digit."""
    report = accepted["report"]
    by_scan = {each["scan"]: each for each in report["scans"]}
    scan, _ = discs["patient-15.png"]
    answer = dune.api.segment(scan, model=report["version"], hospital="dune", guard="warn")
    with dune.api.context.database.read() as session:
        query = select(Observation).where(Observation.request == answer.headers["Locum-Request"])
        row = session.scalars(query).one()
        labels = session.scalars(select(ObservedLabel).where(ObservedLabel.observation == row.id)).all()
        own = by_scan[f"sha256:{sha256(scan).hexdigest()}"]
        assert own["labels"] == {}
        assert (own["shift"], len(own["unlike"])) == (row.shift, row.unlike)
        assert own["confidence"] == {each.label: each.confidence for each in labels}
        found = {each.label: {"voxels": each.voxels, "volume_ml": each.volume_ml} for each in labels}
        assert own["seen"] == found


def test_largest_component_is_kept_as_in_the_answer(
    dune: Hospital, cohort: str, accepted: dict[str, Any]
) -> None:
    """`bright@1` is the same graph without that: its specks cost Dice."""
    first = dune.measured(cohort, model="bright@1")["report"]
    assert first["verdict"] == "no-thresholds"
    assert first["rollback"] == {"rehearsed": False, "why": "'bright@1' serves this hospital already"}
    assert first["labels"]["bright"]["dice"] < accepted["report"]["labels"]["bright"]["dice"] - 0.01


def test_dice_of_volumes_is_that_of_the_masks_that_windows_give(dune: Hospital) -> None:
    files = volumes(10)
    cohort = dune.cohort(files, 10)
    asked = {"labels": {"ball": {"least_dice": 0.99, "largest_bias_ml": 50}}}
    report = dune.measured(cohort, model="ball", thresholds=asked)["report"]
    check_each_scan(dune, report, files, voxels)
    own = report["labels"]["ball"]
    ml = [each["labels"]["ball"]["found_ml"] - each["labels"]["ball"]["drawn_ml"] for each in report["scans"]]
    low, high = own["limits"]
    assert own["bias_ml"] == pytest.approx(np.mean(ml), abs=1e-6)
    assert (high - low) / 2 == pytest.approx(1.96 * np.std(ml, ddof=1), abs=1e-5)
    assert (report["verdict"], report["distance_unit"], own["n"]) == ("not-met", "mm", 10)
    assert [each["outcome"] for each in report["checks"]] == ["failed", "passed"]
    assert own["prediction_powered"] is None


def test_report_is_signed_and_in_the_trail(dune: Hospital, accepted: dict[str, Any], key: Path) -> None:
    plain = json.dumps(accepted["report"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert accepted["digest"] == f"sha256:{sha256(plain.encode()).hexdigest()}"
    trusted = TrustedKeys.load(key.with_name("store.pub.pem"))
    assert trusted.check_document("report", "acceptance", accepted["digest"], accepted["signature"])
    with dune.api.context.database.read() as session:
        query = select(AuditRow).where(AuditRow.action == "acceptance.measured")
        rows = [row for row in session.scalars(query) if row.details["digest"] == accepted["digest"]]
    assert [(row.actor, row.version) for row in rows] == [("mara", accepted["report"]["version_digest"])]
    assert "patient-" not in plain


def test_rollback_is_rehearsed_and_leaves_no_trace(dune: Hospital, accepted: dict[str, Any]) -> None:
    rollback = accepted["report"]["rollback"]
    assert (rollback["rehearsed"], rollback["returns_to"], rollback["same"]) == (True, "bright@1", True)
    with dune.api.context.database.read() as session:
        reasons = session.scalars(select(Assignment.reason)).all()
        rows = session.scalars(select(AuditRow.details)).all()
    assert not any("rehearsal" in each for each in (*reasons, *map(json.dumps, rows)))


def test_page_has_the_report_and_the_worst_as_pictures(dune: Hospital, accepted: dict[str, Any]) -> None:
    report = accepted["report"]
    dice = sorted(each["labels"]["bright"]["dice"] for each in report["scans"] if each["labels"])
    assert [each["dice"] for each in report["worst"]] == pytest.approx(dice[:5], abs=1e-6)
    page = dune.api.client.get(f"/jobs/{report['job']}/acceptance/report.html")
    assert page.status_code == 200
    assert page.text.count('src="data:image/png;base64,') == 10
    embedded = re.search(r'id="report">(.*)</script>', page.text)
    assert embedded is not None
    assert json.loads(embedded[1]) == report
    assert accepted["digest"] in page.text
    section, figures = dune.api.client.get(f"/jobs/{report['job']}").json()["sections"]
    assert (section["title"], figures["body"]["rows"][0]["name"]) == ("The thresholds are met", "bright")
    folder = JobFolder(dune.api.settings.open_files(), report["job"])
    folder.write_picture("1", "answer", b"another")
    page = dune.api.client.get(f"/jobs/{report['job']}/acceptance/report.html")
    assert page.text.count('src="data:image/png;base64,') == 9


def test_a_hospital_that_demands_an_acceptance_is_assigned_nothing_else(
    dune: Hospital, cohort: str, accepted: dict[str, Any]
) -> None:
    demanded = {"demanded": True, "actor": "ines", "reason": "our rule"}
    assert dune.api.client.put("/hospitals/dune/acceptances", json=demanded).json()["demanded"]
    refused = dune.assign("bright", 2)
    assert problem(refused) == (409, "acceptance-missing")
    assert accepted["report"]["job"] in refused.json()["acceptances"]
    assert problem(dune.decide(accepted, actor="mara")) == (403, "second-person-needed")
    assert dune.decide(accepted, accepted=False).json()["accepted"] is False
    assert "ines rejected it" in dune.assign("bright", 2).json()["detail"]
    decided = dune.decide(accepted).json()
    assert (decided["measured_by"], decided["actor"], decided["override"]) == ("mara", "ines", False)
    assert dune.assign("bright", 2).status_code == 200
    listed = dune.api.client.get("/hospitals/dune/acceptances").json()
    assert [each["accepted"] for each in listed["decisions"]] == [True, False]
    shown = dune.api.client.get(f"/jobs/{accepted['report']['job']}/acceptance").json()
    assert shown["decision"] == listed["decisions"][0]
    assert shown["digest"] == accepted["digest"]
    card = dune.api.client.get("/models/bright/versions/2/card", params={"hospital": "dune"}).json()
    on_card, _ = card["hospitals"][0]["acceptances"]
    assert (on_card["accepted"], on_card["digest"]) == (True, accepted["digest"])
    figures = accepted["report"]["labels"]["bright"]
    assert on_card["labels"]["bright"] == {name: figures[name] for name in on_card["labels"]["bright"]}
    # A rollback needs none.
    tag = dune.api.client.get("/hospitals/dune/serving/bright").headers["etag"]
    body = {"actor": "ines", "reason": "back"}
    back = dune.api.client.post(
        "/hospitals/dune/serving/bright/rollback", json=body, headers={"If-Match": tag}
    )
    assert (back.status_code, back.json()["version"]) == (200, 1)
    assert problem(dune.assign("bright", 1)) == (409, "acceptance-missing")
    demanded |= {"demanded": False}
    assert not dune.api.client.put("/hospitals/dune/acceptances", json=demanded).json()["demanded"]
    assert dune.assign("bright", 1).status_code == 200


def test_killed_acceptance_goes_on_after_the_scans_it_has_scored(
    dune: Hospital, cohort: str, accepted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = dune.ask(cohort, model="bright@2", thresholds=ASKED).json()["id"]
    write, written = JobFolder.write, []

    def dies(self: JobFolder, name: str, content: bytes) -> None:
        write(self, name, content)
        written.append(len(json.loads(content)))
        if len(written) == 3:
            raise LeaseLost("as if the process were gone")

    with monkeypatch.context() as patched:
        patched.setattr(JobFolder, "write", dies)
        run_job(job, dune.api.settings)
    assert written == [1, 2, 3]
    with dune.api.context.database.write() as session:
        records.get(session, job).lease_until = records.get(session, job).created_at
    of, scored = acceptance._scored, []

    def counted(*given: Any) -> dict[str, Any]:
        scored.append(given)
        return of(*given)

    with monkeypatch.context() as patched:
        patched.setattr(acceptance, "_scored", counted)
        run_job(job, dune.api.settings)
    assert len(scored) == 13
    found = dune.api.client.get(f"/jobs/{job}/acceptance").json()["report"]
    assert found["labels"] == accepted["report"]["labels"]
    assert dune.api.client.get(f"/jobs/{job}").json()["attempt"] == 2


def test_too_few_masks_have_no_bound_and_no_verdict(
    dune: Hospital, discs: dict[str, tuple[bytes, bytes]]
) -> None:
    few = dune.measured(dune.cohort(discs, 9), model="bright@2", thresholds=ASKED)
    report, own = few["report"], few["report"]["labels"]["bright"]
    assert (report["verdict"], own["n"], own["lower_bound"]) == ("too-few", 9, None)
    assert own["dice"] > 0.5
    assert report["acceptances_before"] > 0
    assert problem(dune.decide(few)) == (409, "acceptance-not-met")
    assert dune.decide(few, override=True).json()["override"] is True


def test_wrong_requests_are_refused(
    dune: Hospital, cohort: str, discs: dict[str, tuple[bytes, bytes]]
) -> None:
    unknown = dune.ask(cohort, model="bright", thresholds={"labels": {"liver": {"least_dice": 0.9}}})
    assert problem(unknown) == (422, "invalid-request")
    assert "it has bright" in unknown.text
    assert problem(dune.ask(cohort, model="bright", thresholds={"labels": {"bright": {}}}))[0] == 422
    assert problem(dune.ask(cohort, actor=None, model="bright"))[0] == 422
    assert problem(dune.ask(dune.cohort(discs, 0), model="bright")) == (422, "masks-missing")
    assert problem(dune.ask("0" * 32, model="bright")) == (404, "cohort-unknown")
    waiting = dune.ask(cohort, model="bright@2").json()["id"]
    assert problem(dune.api.client.get(f"/jobs/{waiting}/acceptance")) == (409, "job-not-over")
    dune.api.client.delete(f"/jobs/{waiting}")
    assert problem(dune.api.client.get(f"/jobs/{waiting}/acceptance")) == (409, "no-acceptance")


def test_a_later_report_on_the_same_scans_supersedes_the_earlier(
    dune: Hospital, discs: dict[str, tuple[bytes, bytes]]
) -> None:
    cohort = dune.cohort(discs, 12)
    first = dune.measured(cohort, model="bright@1", thresholds=ASKED)
    # Other scans supersede nothing, and neither does another version.
    fewer = dict(list(discs.items())[:11])
    dune.measured(dune.cohort(fewer, 11), model="bright@1", thresholds=ASKED)
    dune.measured(cohort, model="bright@2", thresholds=ASKED)
    path = f"/jobs/{first['report']['job']}/acceptance"
    assert first["superseded_by"] is None
    assert dune.api.client.get(path).json()["superseded_by"] is None
    second = dune.measured(dune.cohort(discs, 12), model="bright@1", thresholds=ASKED)
    assert dune.api.client.get(path).json()["superseded_by"] == second["report"]["job"]
    assert f"by job {second['report']['job']}" in dune.api.client.get(f"{path}/report.html").text
    refused = dune.decide(first)
    assert problem(refused) == (409, "acceptance-superseded")
    assert second["report"]["job"] in refused.json()["detail"]
    assert dune.decide(second, override=True).status_code == 200


def test_a_report_that_was_changed_in_the_database_decides_nothing(
    dune: Hospital, accepted: dict[str, Any]
) -> None:
    job, database = accepted["report"]["job"], dune.api.context.database
    with database.write() as session:
        before = session.get_one(Job, job).result
        assert before is not None
        changed = {**before, "report": {**before["report"], "verdict": "met", "n": 400}}
        session.execute(update(Job).where(Job.id == job).values(result=changed))
    try:
        assert problem(dune.decide(accepted)) == (409, "no-acceptance")
    finally:
        with database.write() as session:
            session.execute(update(Job).where(Job.id == job).values(result=before))
