"""Models with hostile graphs, asked for over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.store import Store
from tests.helpers.model_store.graphs import endless_graph, plant, spying_graph
from tests.integration.service.conftest import BRIGHT

HOSTILE = ModelManifest(
    name="hostile",
    task=BRIGHT,
    network=NetworkSpec(name="unet", arguments={}),
    lineage=Lineage(method="by-hand", run="test", sites=(), rounds=0, seed=0),
)


def test_planted_model_that_reads_the_service_s_files_answers_nothing(
    start: Any,
    tmp_path: Path,
    make_png: Callable[..., bytes],
    picture: NDArray[np.uint8],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = bytes(range(128))
    (tmp_path / ".locum" / "state").mkdir(parents=True)
    (tmp_path / ".locum" / "state" / "locum.db").write_bytes(secret)
    monkeypatch.chdir(tmp_path)
    plant(tmp_path / "store", HOSTILE, {WEIGHTS: b"none", GRAPH: spying_graph(".locum/state/locum.db")})
    refused = start(tmp_path / "store").segment(make_png(picture), model="hostile")
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:locum:problem:graph-refused")
    digest = Store(tmp_path / "store").open("hostile", verify=False).manifest.files[GRAPH].sha256
    assert f"graph {digest}: " in refused.json()["detail"]
    assert "in another file, '.locum/state/locum.db'" in refused.json()["detail"]


def test_model_without_an_end_is_ended_and_gives_its_slot_back(
    start: Any,
    publish_bright: Any,
    tmp_path: Path,
    make_png: Callable[..., bytes],
    picture: NDArray[np.uint8],
) -> None:
    publish_bright(tmp_path)
    Store(tmp_path, operators=("Loop",)).publish(HOSTILE, {WEIGHTS: b"none", GRAPH: endless_graph()})
    unknown = start(tmp_path).segment(make_png(picture), model="hostile")
    assert (unknown.status_code, unknown.json()["type"]) == (503, "urn:locum:problem:graph-refused")
    assert "found Loop" in unknown.json()["detail"]
    api = start(tmp_path, graph_operators="Loop", seconds_per_slice=0.5, inference_slots=1)
    for _ in range(2):
        ended = api.segment(make_png(picture), model="hostile")
        assert (ended.status_code, ended.json()["type"]) == (503, "urn:locum:problem:run-too-long")
        assert "LOCUM_SECONDS_PER_SLICE" in ended.json()["detail"]
    assert api.segment(make_png(picture), model="bright").status_code == 200
