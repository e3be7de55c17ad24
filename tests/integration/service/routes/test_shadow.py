"""A second version answers unseen: what is served stays as it is, and both are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import select

from model_store.scan import decode
from service.database import Job, Shadow
from service.worker.runner import run_job
from tests.helpers.service.api import Api
from tests.helpers.waiting import wait_for

SERVING = "/hospitals/north/serving/bright"
WHO = {"actor": "ada", "reason": "a newer version"}
AFFINE = np.diag([2.0, 2.0, 3.0, 1.0])


@pytest.fixture
def api(
    start: Callable[..., Api],
    tmp_path_factory: pytest.TempPathFactory,
    publish_bright: Callable[..., object],
) -> Api:
    """Version 1 of `bright` serves; version 2 takes what is brighter than 180, not 100."""
    root = tmp_path_factory.mktemp("store")
    publish_bright(root)
    publish_bright(root, at=180)
    running = start(root)
    assert running.client.put("/hospitals/north", json={"name": "north"}).status_code == 201
    first = {"version": 1, **WHO}
    assert running.client.put(SERVING, json=first, headers={"If-None-Match": "*"}).status_code == 200
    return running


def scan(nifti: Callable[..., bytes], seed: int) -> bytes:
    return nifti(np.random.default_rng(seed).integers(0, 255, (12, 10, 4)).astype(np.int16), AFFINE)


def segment(api: Api, content: bytes) -> tuple[str, NDArray[np.uint8], bytes]:
    answer = api.segment(content, hospital="north", model="bright")
    assert answer.status_code == 200, answer.text
    found = np.array(decode(answer.content).voxels[..., 0], np.uint8)
    return answer.headers["locum-request"], found, answer.content


def second_answer(api: Api, content: bytes) -> NDArray[np.uint8]:
    """What a caller gets who names the second version."""
    answer = api.segment(content, hospital="north", model="bright@2")
    return np.array(decode(answer.content).voxels[..., 0], np.uint8)


def run_jobs(api: Api, kind: str, count: int) -> None:
    def waiting() -> list[str]:
        with api.context.database.read() as session:
            return list(session.scalars(select(Job.id).filter_by(kind=kind, state="queued")))

    wait_for(lambda: len(waiting()) >= count)
    for job in waiting():
        run_job(job, api.settings)


def shadow_of(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = api.client.get(f"{SERVING}/shadow").json()["shadows"][0]
    return found


def test_shadow_answers_unseen_and_is_compared_with_what_is_served(
    api: Api, make_nifti: Callable[..., bytes]
) -> None:
    content = scan(make_nifti, 1)
    _, before, body = segment(api, content)
    assert api.client.get(f"{SERVING}/shadow").json() == {"shadows": []}
    assert api.client.post(f"{SERVING}/shadow/end", json=WHO).status_code == 404
    itself = api.client.put(f"{SERVING}/shadow", json={"version": 1, **WHO})
    assert itself.status_code == 422
    assert "serves north already" in itself.text
    began = api.client.put(f"{SERVING}/shadow", json={"version": 2, "every": 1, **WHO})
    assert began.status_code == 201, began.text
    assert (began.json()["artefact"], began.json()["answers"]) == ("bright@2", 0)
    again = api.client.put(f"{SERVING}/shadow", json={"version": 2, **WHO})
    assert (again.status_code, again.json()["type"]) == (409, "urn:locum:problem:shadow-runs")
    request, served, same = segment(api, content)
    assert same == body
    run_jobs(api, "shadow", 1)
    second = second_answer(api, content)
    both = int((served & second).sum())
    agreement = 2 * both / int(served.sum() + second.sum())
    found = shadow_of(api)
    (label,) = found["labels"].values()
    assert (found["answers"], found["exact"], found["corrected"]) == (1, 1, 0)
    assert label["agreement"] == pytest.approx(agreement)
    assert label["bias_ml"] == pytest.approx((int(second.sum()) - int(served.sum())) * 12 / 1000)
    (point,) = found["points"]
    assert (point["request"], point["gain"]) == (request, None)
    both = point["labels"][next(iter(found["labels"]))]
    voxels = both["served_voxels"], both["shadow_voxels"]
    assert voxels == (int(served.sum()), int(second.sum()))
    assert (both["served_ml"], both["served_dice"]) == (pytest.approx(voxels[0] * 12 / 1000), None)
    np.testing.assert_array_equal(served, before)
    # The person draws what the second version found: it gains what the first one lacks.
    drawn = {"mask": ("mask", make_nifti(second, AFFINE)), "scan": ("scan", content)}
    assert api.client.put(f"/hospitals/north/corrections/{request}", files=drawn).status_code == 201
    run_jobs(api, "correction", 1)
    found = shadow_of(api)
    assert found["corrected"] == 1
    assert found["gain"] == pytest.approx(1 - agreement)
    both = found["points"][0]["labels"][next(iter(found["labels"]))]
    assert (both["served_dice"], both["shadow_dice"]) == (pytest.approx(agreement), 1)
    ended = api.client.post(f"{SERVING}/shadow/end", json=WHO)
    assert (ended.status_code, ended.json()["ended"] is not None) == (200, True)
    assert api.client.get(SERVING).json()["artefact"] == "bright@1"
    with api.context.database.read() as session:
        jobs = session.query(Job).filter_by(kind="shadow").count()
    segment(api, content)
    with api.context.database.read() as session:
        assert session.query(Job).filter_by(kind="shadow").count() == jobs


def test_one_scan_in_k_is_taken_and_a_rule_promotes_what_corrections_prefer(
    api: Api, make_nifti: Callable[..., bytes]
) -> None:
    rule = {"corrections": 12, "gain": 0.02}
    body = {"version": 2, "every": 1, "rule": rule, **WHO}
    assert api.client.put(f"{SERVING}/shadow", json=body).status_code == 201
    for seed in range(12):
        content = scan(make_nifti, 100 + seed)
        request, _, _ = segment(api, content)
        # Sent before the second version has answered: either order is compared.
        mask = make_nifti(second_answer(api, content), AFFINE)
        drawn = {"mask": ("mask", mask), "scan": ("scan", content)}
        assert api.client.put(f"/hospitals/north/corrections/{request}", files=drawn).status_code == 201
        assert api.client.get(SERVING).json()["artefact"] == "bright@1"
        run_jobs(api, "correction", 1)
        run_jobs(api, "shadow", 1)
    assert api.client.get(SERVING).json()["artefact"] == "bright@2"
    last = api.client.get(f"{SERVING}/history").json()["entries"][-1]
    assert last["actor"] == "rule:ada"
    assert "on 12 corrected answers" in last["reason"]
    found = shadow_of(api)
    assert found["ended_by"] == "service"
    assert found["at_least"] > 0.02


def test_share_of_scans_is_that_of_the_shadow(api: Api) -> None:
    assert api.client.put(f"{SERVING}/shadow", json={"version": 2, "every": 4, **WHO}).status_code == 201
    taken = [api.context.shadows.taken("north", "bright", f"request-{number}") for number in range(4000)]
    assert 900 < sum(number is not None for number in taken) < 1100
    assert api.context.shadows.taken(None, "bright", "request-1") is None
    with api.context.database.read() as session:
        assert session.query(Shadow).count() == 1
