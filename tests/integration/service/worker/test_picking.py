"""A hospital from outside and a federation's clusters: its scans pick one, which it is then served."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_store.manifest import GRAPH
from model_store.store import Store
from personalization.options.picking import CRITERIA
from service.settings import Settings
from tests.helpers.service.drawn_clusters import as_png, finished, pictures, publish, submit
from tests.helpers.service.workplace import Workplace


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    publish(Store(root))
    return root


@pytest.fixture
def api(start: Any, store: Path, tmp_path: Path) -> Any:
    running = start(shutil.copytree(store, tmp_path / "store"))
    assert running.client.put("/hospitals/oak", json={"name": "Oak"}).status_code == 201
    return running


def test_picking_job_publishes_the_cluster_that_fits_the_scans(api: Any) -> None:
    scan = as_png(pictures("hazel", 1, 7)[0])
    unknown = api.classify(scan, hospital="oak")
    assert (unknown.status_code, unknown.json()["type"]) == (422, "urn:locum:problem:no-global-model")
    job = submit(api, pictures("hazel", 9), '{"criterion": "statistics"}')
    done = finished(api, job)
    assert (done["state"], done["reason"]) == ("succeeded", None)
    result = done["result"]
    assert result["cluster"] == "2"
    assert result["costs"].keys() == set(CRITERIA)
    assert result["costs"]["statistics"]["2"] < result["costs"]["statistics"]["1"]
    assert (result["scans"], result["images"]) == (9, 9)
    assert result["sites"] == {"1": ["elm"], "2": ["hazel"]}
    checks = {check["name"]: check for check in done["gate"]["checks"]}
    assert checks["statistics_distance"]["value"] == pytest.approx(
        result["costs"]["statistics"]["2"], abs=1e-6
    )
    assert checks["stability"]["value"] == 1.0
    # What was never trained says the same of everything.
    assert not checks["information"]["passed"]
    assert not done["gate"]["passed"]

    reference = done["candidate"]["reference"]
    assert reference == "shapes.at-oak@1"
    picked = api.store.open("shapes.cluster-2")
    candidate = api.store.open(reference)
    assert candidate.manifest.files == picked.manifest.files
    assert candidate.manifest.lineage.parents == (api.store.open("shapes").digest,)
    looked_at = api.classify(scan, model=reference)
    assert looked_at.headers["locum-personalization"] == "hospital; hospital=oak"
    by_name = api.classify(scan, model="shapes", personalization="cluster", cluster="2")
    assert looked_at.json()["probabilities"] == by_name.json()["probabilities"]
    assert by_name.headers["locum-personalization"] == "cluster; cluster=2"
    assert by_name.json()["receipt"]["cluster"] == "2"

    card = api.client.get(f"/jobs/{job}/card").text
    assert "Which cluster was picked" in card
    assert "mean answer of all clusters" in card
    assert card.count("data:image/png;base64,") == 8

    decision = {"version": reference, "actor": "ada", "reason": "looked at it"}
    serving, first = "/hospitals/oak/serving/shapes", {"If-Match": '"0"'}
    refused = api.client.put(serving, json=decision, headers=first)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:locum:problem:gate-refused")
    assigned = api.client.put(serving, json={**decision, "override": True}, headers=first)
    assert assigned.status_code == 200, assigned.text
    served = api.classify(scan, hospital="oak")
    assert served.headers["locum-personalization"] == "hospital; hospital=oak"
    assert served.headers["locum-graph"] == picked.manifest.files[GRAPH].sha256
    # What it was made from is still there to be asked.
    assert api.classify(scan, hospital="oak", personalization="cluster", cluster="1").status_code == 200


def test_job_opens_the_store_once(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job, opened = submit(api, pictures("elm", 3), '{"criterion": "statistics"}'), []
    open_store = Settings.open_store
    monkeypatch.setattr(Settings, "open_store", lambda self: opened.append(1) or open_store(self))
    assert finished(api, job)["state"] == "succeeded"
    assert len(opened) == 1


def test_picking_is_repeatable_and_follows_the_scans(api: Any) -> None:
    here = Workplace(api.settings, api.context.database)
    options = '{"criterion": "statistics"}'
    first, again = (finished(api, submit(api, pictures("elm", 3), options)) for _ in range(2))
    assert first["result"] == again["result"]
    assert first["gate"] == again["gate"]
    assert first["result"]["cluster"] == "1"
    assert [e.data["cluster"] for e in here.events(first["id"], "progress") if e.data["stage"] == "comparing"]
    # Of so few scans no draws are made.
    stability = first["gate"]["checks"][0]
    assert (stability["name"], stability["value"], stability["passed"]) == ("stability", None, True)


def test_picking_with_an_unfit_scan_or_withdrawn_cluster_fails_with_a_reason(api: Any) -> None:
    colour = np.zeros((20, 20, 3), np.uint8)
    colour[..., 1] = np.arange(20) * 12
    failed = finished(api, submit(api, [*pictures("elm", 1), colour]))
    assert failed["state"] == "failed"
    cohort = f"/hospitals/{failed['hospital']}/cohorts/{failed['cohort']}"
    listed = api.client.get(f"{cohort}/scans").json()["scans"]
    assert f"scan {listed[1]['sha256'].removeprefix('sha256:')[:12]}: " in failed["reason"]
    job = submit(api, pictures("elm", 2))
    api.store.withdraw("shapes.cluster-1@1", actor="ada", reason="wrong labels")
    gone = finished(api, job)
    assert (gone["state"], gone["candidate"]) == ("failed", None)
    assert "wrong labels" in gone["reason"]


@pytest.mark.parametrize("options", ['{"epochs": 3}', '{"criterion": "accuracy"}'])
def test_picking_with_options_of_another_kind_is_422(api: Any, options: str) -> None:
    refused = api.client.post(
        "/hospitals/oak/adaptations",
        files=[("scans", ("a", as_png(pictures("elm", 1)[0])))],
        data={"model": "shapes", "options": options},
    )
    assert refused.status_code == 422
    assert "options" in refused.json()["detail"]


def test_scan_personalization_of_clusters_is_422(api: Any) -> None:
    scan = as_png(pictures("elm", 1)[0])
    refused = api.segment(scan, model="shapes", personalization="scan")
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:locum:problem:another-kind-of-task")
