"""Picks that pass their gate, one after the other: assigned as they are, served, and rolled back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from model_store.manifest import GRAPH
from model_store.store import Store
from tests.helpers.service.drawn_clusters import TASK, as_png, finished, pictures, publish, submit
from tests.helpers.service.network_input import seen

SERVING = "/hospitals/oak/serving/shapes"
# By this criterion each hospital's images are nearest to its own cluster, whatever the drawn weights are.
OPTIONS = '{"criterion": "statistics"}'
WHO = {"actor": "ada", "reason": "right on 40 of 50 labelled images"}


@pytest.fixture
def api(start: Callable[..., Any], tmp_path: Path) -> Any:
    publish(Store(tmp_path / "store"), sharpness=4)
    running = start(tmp_path / "store")
    assert running.client.put("/hospitals/oak", json={"name": "Oak"}).status_code == 201
    return running


def if_match(entry: int) -> dict[str, str]:
    return {"If-Match": f'"{entry}"'}


def prediction_of(answer: httpx.Response) -> dict[str, Any]:
    """Return what the network decides in an answer, and the model that the answer names."""
    assert answer.status_code == 200, answer.text
    report = answer.json()
    said = {name: report[name] for name in ("predicted", "probabilities", "entropy", "warnings")}
    headers = ("locum-model", "locum-graph", "locum-personalization")
    return {**said, **{name: answer.headers[name] for name in headers}}


def by_itself(store: Store, reference: str, pixels: NDArray[np.uint8]) -> list[float]:
    session = onnxruntime.InferenceSession(
        store.open(reference).read(GRAPH), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(["probabilities"], {"image": seen(pixels, TASK.size)})
    return [float(p) for p in found[0]]


def test_picked_version_is_assigned_serves_and_is_rolled_back(api: Any) -> None:
    looked_at = [*pictures("elm", 3, 7), *pictures("hazel", 3, 7)]

    def served() -> list[dict[str, Any]]:
        return [prediction_of(api.classify(as_png(pixels), hospital="oak")) for pixels in looked_at]

    answers = {}
    for entry, (site, cluster) in enumerate((("elm", "1"), ("hazel", "2")), start=1):
        done = finished(api, submit(api, pictures(site, 12), OPTIONS))
        assert done["result"]["cluster"] == cluster
        assert all(check["passed"] and check["value"] is not None for check in done["gate"]["checks"])
        assert done["gate"]["passed"]
        reference = done["candidate"]["reference"]
        assert reference == f"shapes.at-oak@{entry}"
        assigned = api.client.put(
            SERVING, json={"version": reference, **WHO}, headers=if_match(entry if entry > 1 else 0)
        )
        assert (assigned.status_code, assigned.json()["override"]) == (200, False), assigned.text
        answers[reference] = served()
        for pixels, answer in zip(looked_at, answers[reference], strict=True):
            assert answer["locum-model"] == reference
            found = list(answer["probabilities"].values())
            assert found == pytest.approx(by_itself(api.store, reference, pixels), abs=1e-5)
            of_cluster = api.classify(
                as_png(pixels), model="shapes", personalization="cluster", cluster=cluster
            )
            assert of_cluster.json()["probabilities"] == answer["probabilities"]
    first, second = answers.values()
    for one, other in zip(first, second, strict=True):
        assert one["probabilities"] != pytest.approx(other["probabilities"], abs=1e-3)

    back = api.client.post(f"{SERVING}/rollback", json=WHO, headers=if_match(3))
    assert back.status_code == 200, back.text
    entry = {name: back.json()[name] for name in ("sequence", "artefact", "restores", "override")}
    assert entry == {"sequence": 4, "artefact": "shapes.at-oak@1", "restores": 2, "override": False}
    assert served() == first
    now = api.client.get(SERVING).json()
    assert (now["artefact"], now["because"]) == ("shapes.at-oak@1", "assigned")

    # Before the first pick no version was assigned.
    left = api.client.post(f"{SERVING}/rollback", json=WHO, headers=if_match(4))
    assert (left.status_code, left.json()["artefact"], left.json()["restores"]) == (200, "shapes@1", 1)
    refused = api.classify(as_png(looked_at[0]), hospital="oak")
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:locum:problem:no-global-model")
    further = api.client.post(f"{SERVING}/rollback", json=WHO, headers=if_match(5))
    assert (further.status_code, further.json()["type"]) == (409, "urn:locum:problem:nothing-to-roll-back")
    back = api.client.put(SERVING, json={"version": "shapes.at-oak@1", **WHO}, headers=if_match(5))
    assert back.json()["artefact"] == "shapes.at-oak@1"
    assert served() == first
