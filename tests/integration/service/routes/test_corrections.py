"""A person corrects an answer: the mask goes to that answer, and is measured against what was served."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import select, update

from model_store.scan import decode
from service.database import Correction, Job, KeptAnswer, Observation
from service.expiry import expire
from service.worker.runner import run_job
from tests.helpers.model_store.dicom_files import rtstruct, series, squares, zipped
from tests.helpers.service.api import Api
from tests.helpers.waiting import wait_for

NORTH = "/hospitals/north"


@pytest.fixture(scope="module")
def api(
    start: Callable[..., Api],
    tmp_path_factory: pytest.TempPathFactory,
    publish_bright: Callable[[Path], object],
    publish_dark: Callable[[Path], object],
) -> Api:
    root = tmp_path_factory.mktemp("store")
    publish_bright(root)
    publish_dark(root)
    running = start(root)
    for name in ("north", "south"):
        assert running.client.put(f"/hospitals/{name}", json={"name": name}).status_code == 201
    return running


class Scans:
    """Volumes of 2 x 2 x 3 mm with a bright cube, their answers, and masks on their grid."""

    affine = np.diag([2.0, 2.0, 3.0, 1.0])

    def __init__(self, nifti: Callable[..., bytes]) -> None:
        self.nifti = nifti

    def scan(self, seed: int) -> bytes:
        volume = np.random.default_rng(seed).integers(0, 60, (16, 14, 5)).astype(np.int16)
        volume[4:9, 3:8, 1:4] = 200
        return self.nifti(volume, self.affine)

    def mask(self, voxels: NDArray[np.uint8], affine: NDArray[np.float64] | None = None) -> bytes:
        return self.nifti(voxels, self.affine if affine is None else affine)


@pytest.fixture
def scans(make_nifti: Callable[..., bytes]) -> Scans:
    return Scans(make_nifti)


def answered(api: Api, scan: bytes, hospital: str = "north") -> tuple[str, NDArray[np.uint8]]:
    answer = api.segment(scan, hospital=hospital, model="bright")
    assert answer.status_code == 200, answer.text
    return answer.headers["locum-request"], np.array(decode(answer.content).voxels[..., 0], np.uint8)


def send(api: Api, request: str, hospital: str = "north", **parts: Any) -> httpx.Response:
    # A form of text fields alone would not be multipart.
    form = {
        name: (name, value) if name in ("mask", "scan") else (None, str(value))
        for name, value in parts.items()
    }
    return api.client.put(f"/hospitals/{hospital}/corrections/{request}", files=form)


def measure(api: Api) -> None:
    with api.context.database.read() as session:
        query = select(Job.id).where(Job.kind == "correction", Job.state == "queued")
        waiting = list(session.scalars(query))
    for job in waiting:
        run_job(job, api.settings)


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")


def test_mask_is_measured_against_the_answer_of_its_request(api: Api, scans: Scans) -> None:
    scan = scans.scan(1)
    request, mask = answered(api, scan)
    corrected = mask.copy()
    corrected[:, :, 1] = 0  # 25 voxels less
    corrected[4:9, 8, 2] = 1  # 5 voxels more
    stored = send(api, request, mask=scans.mask(corrected), scan=scan, seconds=42, note="apex missed")
    assert stored.status_code == 201, stored.text
    waiting = stored.json()
    assert (waiting["state"], waiting["accepted"], waiting["labels"]) == ("waiting", False, None)
    assert (waiting["seconds"], waiting["note"], waiting["way"]) == (42, "apex missed", "http")
    measure(api)
    found = api.client.get(f"{NORTH}/corrections/{request}").json()
    assert (found["state"], found["exact"], found["reason"]) == ("measured", True, None)
    (label,) = found["labels"]
    change = found["labels"][label]
    both, before, after = (mask & corrected).sum(), mask.sum(), corrected.sum()
    assert change["dice"] == pytest.approx(2 * both / (before + after))
    assert (change["added_voxels"], change["removed_voxels"]) == (5, 25)
    assert change["added_ml"] == pytest.approx(5 * 12 / 1000)
    assert change["removed_ml"] == pytest.approx(25 * 12 / 1000)
    assert 0 < change["surface_dice"] < 1
    assert change["hd95"] >= 2
    # The mask is kept beside its scan, in a cohort that people cannot take for another.
    place = f"{NORTH}/cohorts/{found['cohort']}"
    cohort = api.client.get(place).json()
    assert (cohort["corrections_of"], cohort["may_train"], cohort["name"]) == (
        "bright",
        False,
        "Corrections of bright",
    )
    kept = decode(api.client.get(f"{place}/scans/{found['scan']}/mask").content)
    np.testing.assert_array_equal(kept.voxels[..., 0], corrected)


def test_the_same_again_changes_nothing_and_another_mask_takes_its_place(api: Api, scans: Scans) -> None:
    scan = scans.scan(2)
    request, mask = answered(api, scan)
    first, second = mask.copy(), mask.copy()
    first[5, 5, 2], second[6, 6, 2] = 0, 0
    sent = send(api, request, mask=scans.mask(first), scan=scan).json()
    again = send(api, request, mask=scans.mask(first), scan=scan)
    assert (again.status_code, again.json()) == (200, sent)
    # By now the service has the scan: in the cohort of corrections.
    replaced = send(api, request, mask=scans.mask(second))
    assert replaced.status_code == 201, replaced.text
    assert replaced.json()["id"] == sent["id"]
    measure(api)
    found = api.client.get(f"{NORTH}/corrections/{request}").json()
    (change,) = found["labels"].values()
    assert (change["added_voxels"], change["removed_voxels"]) == (0, 1)


def test_two_answers_to_a_scan_are_compared_with_its_newest_mask(api: Api, scans: Scans) -> None:
    scan = scans.scan(8)
    first, mask = answered(api, scan)
    second, _ = answered(api, scan)
    for request, voxels in ((first, 1), (second, 3)):
        drawn = mask.copy()
        drawn[0, 0, :voxels] = 1
        assert send(api, request, mask=scans.mask(drawn), scan=scan).status_code == 201
    measure(api)
    for request in (first, second):
        (change,) = api.client.get(f"{NORTH}/corrections/{request}").json()["labels"].values()
        assert (change["added_voxels"], change["removed_voxels"]) == (3, 0)


def test_answer_that_was_right_counts_as_accepted(api: Api, scans: Scans) -> None:
    scan = scans.scan(3)
    request, mask = answered(api, scan)
    said = send(api, request, accepted="true", seconds=3)
    assert said.status_code == 201, said.text
    assert (said.json()["accepted"], said.json()["state"], said.json()["cohort"]) == (True, "measured", None)
    (change,) = said.json()["labels"].values()
    assert (change["dice"], change["surface_dice"], change["added_ml"]) == (1, 1, 0)
    # A viewer sends the mask back as it was: the same, and without the scan.
    request, mask = answered(api, scan)
    unchanged = send(api, request, mask=scans.mask(mask))
    assert unchanged.status_code == 201, unchanged.text
    assert unchanged.json()["accepted"]
    for wrong in ({"accepted": "true", "mask": scans.mask(mask)}, {"seconds": 3}):
        assert problem(send(api, request, **wrong)) == (422, "invalid-request")


def test_what_does_not_fit_the_answer_is_refused_and_stores_nothing(api: Api, scans: Scans) -> None:
    scan, other = scans.scan(4), scans.scan(5)
    request, mask = answered(api, scan)
    mask[5, 5, 2] = 0
    sent = scans.mask(mask)
    assert problem(send(api, request, mask=sent)) == (409, "scan-gone")
    assert problem(send(api, request, mask=sent, scan=other)) == (409, "correction-mismatch")
    assert problem(send(api, "0" * 32, mask=sent, scan=scan)) == (404, "answer-unknown")
    assert problem(send(api, request, "south", mask=sent, scan=scan)) == (404, "answer-unknown")
    assert problem(send(api, request, "west", mask=sent, scan=scan)) == (404, "hospital-unknown")
    shifted = scans.affine.copy()
    shifted[0, 3] = 7.0
    moved = send(api, request, mask=scans.mask(mask, shifted), scan=scan)
    assert moved.status_code == 422, moved.text
    assert "affine" in moved.json()["detail"]
    cropped = send(api, request, mask=scans.mask(mask[:-1]), scan=scan)
    assert cropped.status_code == 422
    assert "15" in cropped.json()["detail"]
    assert "16" in cropped.json()["detail"]
    values = send(api, request, mask=scans.mask(mask * 9), scan=scan)
    assert values.status_code == 422
    assert api.client.get(f"{NORTH}/corrections/{request}").status_code == 404


def test_part_of_a_series_is_not_the_scan_that_was_answered(api: Api) -> None:
    files = series(np.random.default_rng(1).integers(0, 200, (6, 16, 14)).astype(np.int16))
    answer = api.segment(zipped(files), hospital="north", model="bright", output="nifti")
    request, few = answer.headers["locum-request"], dict(list(files.items())[:4])
    part = send(api, request, mask=answer.content, scan=zipped(few))
    assert problem(part) == (409, "correction-mismatch")
    assert "16" in part.json()["detail"]
    # The same files in another archive are the same series.
    whole = send(api, request, mask=answer.content, scan=zipped(files, zipfile.ZIP_STORED))
    assert (whole.status_code, whole.json()["accepted"]) == (201, True), whole.text


def test_rtstruct_corrects_with_its_scan_or_with_one_that_is_kept(api: Api) -> None:
    files = series(np.random.default_rng(2).integers(0, 200, (6, 16, 14)).astype(np.int16))

    def ask(output: str) -> tuple[str, bytes]:
        answer = api.segment(zipped(files), hospital="north", model="bright", output=output)
        assert answer.status_code == 200, answer.text
        return answer.headers["locum-request"], answer.content

    (request, mask), (other, own) = ask("nifti"), ask("dicom-rtstruct")
    drawn = decode(mask).voxels[..., 0].transpose(2, 1, 0) > 0
    removed = int(drawn[2].sum())
    drawn[2] = False
    corrected = rtstruct(files, {"body": [], "Bright": squares(files, drawn)})
    # Contours say nothing of a scan that is not there.
    assert problem(send(api, request, mask=corrected)) == (409, "scan-gone")
    stored = send(api, request, mask=corrected, scan=zipped(files))
    assert (stored.status_code, stored.json()["accepted"]) == (201, False), stored.text
    measure(api)
    found = api.client.get(f"{NORTH}/corrections/{request}").json()
    (label,) = found["labels"].values()
    assert (label["added_voxels"], label["removed_voxels"]) == (0, removed)
    unchanged = send(api, other, mask=own, scan=zipped(files))
    assert (unchanged.status_code, unchanged.json()["accepted"]) == (201, True), unchanged.text
    # A scan of a cohort has other UIDs than the series that a person drew on, and is kept again.
    cohort = api.client.post(f"{NORTH}/cohorts", json={"name": "kept"}).json()["id"]
    place = f"{NORTH}/cohorts/{cohort}/scans/1"
    assert api.client.put(place, content=zipped(files)).status_code == 201
    kept = api.client.get(place).content
    answer = api.segment(kept, hospital="north", model="bright")
    sent = send(api, answer.headers["locum-request"], mask=corrected)
    assert (sent.status_code, sent.json()["accepted"]) == (201, False), sent.text


def test_class_of_a_scan_has_no_mask_to_correct(
    api: Api, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    scan = make_png(picture)
    fields = {"hospital": "north", "model": "dark"}
    answer = api.client.post("/classify", files={"scan": ("s.png", scan)}, data=fields)
    request = answer.headers["locum-request"]
    wrong = send(api, request, mask=make_png((picture > 100).astype(np.uint8)), scan=scan)
    assert problem(wrong) == (422, "invalid-request"), wrong.text
    assert send(api, request, accepted="true").status_code == 201


def test_submissions_in_any_order_and_twice_stay_with_their_answers(api: Api, scans: Scans) -> None:
    submissions: dict[str, tuple[bytes, bytes, int]] = {}
    for seed in range(100, 112):
        scan = scans.scan(seed)
        # Two answers of each scan: a mask is of one of them.
        for more in (1, 2):
            request, mask = answered(api, scan)
            mask[0, 0, :more] = 1
            submissions[request] = (scans.mask(mask), scan, more)
    order = [request for request in submissions for _ in range(2)]
    random.Random(5).shuffle(order)
    for request in order:
        sent, scan, _ = submissions[request]
        assert send(api, request, mask=sent, scan=scan, name=f"case-{request}").status_code in (200, 201)
    measure(api)
    for request, (sent, scan, more) in submissions.items():
        found = api.client.get(f"{NORTH}/corrections/{request}").json()
        (change,) = found["labels"].values()
        assert (found["exact"], change["added_voxels"], change["removed_voxels"]) == (True, more, 0)
        place = f"{NORTH}/cohorts/{found['cohort']}/scans/{found['scan']}"
        assert api.client.get(place).content == scan
        assert api.client.get(f"{place}/mask").content == sent


def test_corrections_train_only_with_consent_and_are_summed_up(api: Api, scans: Scans) -> None:
    scan = scans.scan(6)
    request, mask = answered(api, scan)
    mask[4:9, 3:8, 1] = 0
    cohort = send(api, request, mask=scans.mask(mask), scan=scan).json()["cohort"]
    place = f"{NORTH}/cohorts/{cohort}"
    measure(api)
    groups = api.client.get(f"{NORTH}/corrections/summary", params={"model": "bright"}).json()["groups"]
    asked = {"limit": 1000, "model": "bright"}
    everything = api.client.get(f"{NORTH}/corrections", params=asked).json()["corrections"]
    assert sum(group["corrected"] + group["accepted"] for group in groups) == len(everything)
    assert all(group["labels"]["bright"]["median_dice"] <= 1 for group in groups)
    consent = api.client.patch(place, json={"may_train": True})
    assert (consent.status_code, consent.json()["may_train"]) == (200, True)
    assert api.client.patch(place, json={"may_train": False}).json()["may_train"] is False
    assert api.client.delete(f"{NORTH}/corrections/{request}").status_code == 204
    assert problem(api.client.get(f"{NORTH}/corrections/{request}")) == (404, "correction-unknown")


def test_what_cannot_be_measured_says_why(api: Api, scans: Scans) -> None:
    scan = scans.scan(7)
    request, mask = answered(api, scan)
    mask[5, 5, 2] = 0
    sent = send(api, request, mask=scans.mask(mask), scan=scan, name="gone").json()
    scan_at = f"{NORTH}/cohorts/{sent['cohort']}/scans/gone"
    assert api.client.delete(scan_at).status_code == 204
    measure(api)
    found = api.client.get(f"{NORTH}/corrections/{request}").json()
    assert found["state"] == "failed"
    assert "no scan 'gone'" in found["reason"]
    with api.context.database.write() as session:
        old = update(Correction).where(Correction.request == request)
        session.execute(old.values(at=datetime.now(UTC) - timedelta(days=900)))
    expire(api.context.database, api.settings)
    assert api.client.get(f"{NORTH}/corrections/{request}").status_code == 404
    with api.context.database.read() as session:
        chosen = session.scalars(select(Observation.choice).where(Observation.request == request)).one()
    assert (chosen or {})["personalization"] == "global"


def choose(api: Api, days: int | None, hospital: str = "north", **more: Any) -> dict[str, Any]:
    body = {"days": days, "reason": "agreed with the physicists", "actor": "ada", **more}
    said = api.client.put(f"/hospitals/{hospital}/kept-answers", json=body)
    assert said.status_code == 200, said.text
    found: dict[str, Any] = said.json()
    return found


@pytest.fixture
def keeping(api: Api) -> Iterator[Api]:
    """North keeps its answers, and keeps none afterwards."""
    choose(api, 30)
    yield api
    assert choose(api, None)["count"] == 0
    assert api.settings.open_files().names("answers") == []


def kept(api: Api, count: int) -> None:
    """A mask is kept once its answer was sent."""

    def there() -> bool:
        ids = [path.partition("/")[0] for path in api.settings.open_files().names("answers")]
        return len(ids) == count == api.client.get(f"{NORTH}/kept-answers").json()["count"]

    wait_for(there)


def labels_of(api: Api, request: str) -> Any:
    found = api.client.get(f"{NORTH}/corrections/{request}").json()
    assert (found["state"], found["exact"]) == ("measured", True), found
    return found["labels"]


def test_kept_answer_gives_the_figures_of_the_one_that_is_made_again(
    api: Api, scans: Scans, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    turned = np.array([[0.0, -2, 0, 9], [2.5, 0, 0.3, -7], [0, 0.1, 3, 4], [0, 0, 0, 1]])
    volume = np.array(decode(scans.scan(50)).voxels[..., 0])
    for content in (scans.scan(51), scans.nifti(volume, turned), make_png(picture)):
        again = api.segment(content, hospital="north", model="bright", guard="warn")
        choose(api, 30)
        served = api.segment(content, hospital="north", model="bright", guard="warn")
        kept(api, 1)
        assert again.content == served.content
        decoded = decode(served.content)
        mask = np.array(decoded.voxels[..., 0], np.uint8)
        mask[tuple(side // 2 for side in mask.shape)] ^= 1
        mask[1] = 0
        sent = make_png(mask) if decoded.affine is None else scans.nifti(mask, decoded.affine)
        requests = [answer.headers["locum-request"] for answer in (again, served)]
        for request in requests:
            assert send(api, request, mask=sent, scan=content).status_code == 201
        measure(api)
        first, second = (labels_of(api, request) for request in requests)
        assert first == second
        assert choose(api, None)["count"] == 0


def test_kept_answer_is_corrected_without_its_scan(keeping: Api, scans: Scans) -> None:
    api, scan = keeping, scans.scan(52)
    request, mask = answered(api, scan)
    kept(api, 1)
    drawn = mask.copy()
    drawn[5, 5, 2], drawn[0, 0, :2] = 0, 1
    moved = scans.affine.copy()
    moved[0, 3] = 7.0
    assert send(api, request, mask=scans.mask(drawn, moved)).status_code == 422
    stored = send(api, request, mask=scans.mask(drawn))
    assert stored.status_code == 201, stored.text
    assert (stored.json()["cohort"], stored.json()["accepted"]) == (None, False)
    assert send(api, request, mask=scans.mask(drawn)).status_code == 200
    measure(api)
    (change,) = labels_of(api, request).values()
    assert (change["added_voxels"], change["removed_voxels"]) == (2, 1)
    assert send(api, request, mask=scans.mask(mask)).json()["accepted"]
    # Another hospital's mask leads to nothing, nor does one of an answer from before the choice.
    other, _ = answered(api, scans.scan(53), "south")
    assert problem(send(api, other, "south", mask=scans.mask(drawn))) == (409, "scan-gone")


def test_answer_of_a_job_is_kept(keeping: Api, scans: Scans) -> None:
    api = keeping
    form = {"hospital": "north", "model": "bright"}
    files, headers = {"scan": ("s", scans.scan(54))}, {"Prefer": "respond-async"}
    started = api.client.post("/segment", files=files, data=form, headers=headers)
    assert started.status_code == 202, started.text
    run_job(started.json()["id"], api.settings)
    kept(api, 1)
    mask = np.array(decode(api.client.get(f"/jobs/{started.json()['id']}/result").content).voxels[..., 0])
    mask[5, 5, 2] = 0
    request = started.headers["locum-request"]
    assert send(api, request, mask=scans.mask(mask.astype(np.uint8))).status_code == 201
    measure(api)
    (change,) = labels_of(api, request).values()
    assert change["removed_voxels"] == 1


def test_kept_answers_are_bounded_by_days_and_bytes_and_go_with_the_observations(
    keeping: Api, scans: Scans
) -> None:
    api = keeping
    requests = []
    for count, seed in enumerate((55, 56, 57), 1):
        requests.append(answered(api, scans.scan(seed))[0])
        kept(api, count)
    found = choose(api, 30)
    assert choose(api, 30, quota_bytes=found["bytes"] - 1)["count"] == 2
    with api.context.database.write() as session:
        newest = select(KeptAnswer).where(KeptAnswer.request == requests[2])
        session.scalars(newest).one().at = datetime.now(UTC) - timedelta(days=31)
    expire(api.context.database, api.settings)
    with api.context.database.read() as session:
        (left,) = session.scalars(select(KeptAnswer))
    assert left.request == requests[1]
    assert api.settings.open_files().names("answers") == [f"{left.id}/mask"]
    # One of other voxels is not taken for the answer: it is made again.
    api.settings.open_files().write(f"answers/{left.id}/mask", scans.mask(np.zeros((16, 14, 5), np.uint8)))
    assert send(api, requests[1], mask=scans.mask(np.ones((16, 14, 5), np.uint8)), scan=scans.scan(56))
    measure(api)
    (change,) = labels_of(api, requests[1]).values()
    assert change["removed_voxels"] == 0
    too_much = {"days": 1, "quota_bytes": 2**50, "reason": "all of it", "actor": "ada"}
    refused = api.client.put(f"{NORTH}/kept-answers", json=too_much)
    assert problem(refused) == (422, "invalid-request")
    # Nothing is kept by itself.
    assert api.client.get("/hospitals/south/kept-answers").json()["days"] is None
