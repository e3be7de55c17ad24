"""An API with the routing space `brain`, the hospitals `north` and `south`, and no worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_store.artefact import Artefact
from model_store.manifest import Lineage, NetworkSpec, RoutingSpaceManifest
from model_store.store import Store


def publish_space(root: Path, publish: Callable[..., Artefact]) -> Artefact:
    parts = {
        role: publish(root, f"brain.{role}", part_of="brain", at=at)
        for at, role in ((50, "global"), (60, "CS"))
    }
    manifest = RoutingSpaceManifest(
        name="brain",
        task=parts["global"].manifest.task,
        lineage=Lineage(method="iop-fl", run="test", sites=("CS",), rounds=1, seed=0),
        global_model=parts["global"].digest,
        inside={"CS": parts["CS"].digest},
    )
    return Store(root).publish(manifest, {})


@pytest.fixture(scope="module")
def api(
    start: Callable[..., Any],
    publish_bright: Callable[..., Artefact],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    store = tmp_path_factory.mktemp("store")

    def alike(root: Path, name: str, **fields: Any) -> Artefact:
        at = fields.pop("at")
        network = NetworkSpec(name="threshold", arguments={})
        return publish_bright(root, name, at=at, network=network, **fields)

    publish_space(store, alike)
    publish_bright(store, "bright")
    running = start(store, max_upload_bytes=64 * 1024, max_cohort_scans=20)
    for name in ("north", "south"):
        running.client.put(f"/hospitals/{name}", json={"name": name})
    return running


@pytest.fixture(scope="module")
def scans(make_png: Callable[..., bytes]) -> list[bytes]:
    draw = np.random.default_rng(0)
    return [make_png(draw.integers(0, 255, (16, 16), np.uint8)) for _ in range(12)]


@pytest.fixture
def cohort(api: Any, scans: list[bytes]) -> str:
    """The id of a cohort of `north` with two scans."""
    place = api.client.post("/hospitals/north/cohorts").headers["location"]
    for number in range(2):
        api.client.put(f"{place}/scans/{number}", content=scans[number])
    return str(place.rpartition("/")[2])
