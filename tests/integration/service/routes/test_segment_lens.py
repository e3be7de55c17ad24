"""Versions with a lens: what `/segment` answers is the graph's answer to the scan as the lens shows it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.lens import LENS, Lens, seen_of
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.preprocessing import PreparedVolume, prepare_for
from model_store.scan import decode
from model_store.store import Store
from model_store.task import Task
from tests.integration.service.routes.test_segment_volume import PATCH, graph

THRESHOLD = 100
VOXELS = np.random.default_rng(5).integers(0, 220, (16, 16, 9)).astype(np.int16)


def task(**fields: Any) -> Task:
    return Task.model_validate({"name": "bright", "labels": {"bright": [1]}, **fields})


SLICES = task(normalisation={"method": "none"}, size=[16, 16])
VOLUMES = task(
    normalisation={"scope": "volume", "method": "none"}, geometry={"spacing": None, "patch": PATCH}
)


def publish(root: Path, name: str, task: Task, content: bytes, files: Mapping[str, bytes]) -> None:
    manifest = ModelManifest(
        name=name,
        task=task,
        network=NetworkSpec(name="threshold", arguments={}),
        lineage=Lineage(method="by-hand", run="test", sites=(), rounds=0, seed=0),
    )
    Store(root).publish(manifest, {WEIGHTS: b"none", GRAPH: content, **files})


def images_of(task: Task) -> NDArray[np.float32]:
    prepared = prepare_for(task, decode(scan()))
    return prepared.volume[None] if isinstance(prepared, PreparedVolume) else prepared.slices


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, threshold_graph: Callable[..., bytes]) -> Path:
    root = tmp_path_factory.mktemp("store")
    graphs = {"slices": (SLICES, threshold_graph(THRESHOLD)), "volumes": (VOLUMES, graph(1, THRESHOLD))}
    for name, (own, content) in graphs.items():
        axes = own.spatial_dims
        publish(root, name, own, content, {})
        field = seen_of([("the scan", images_of(own))])["field"].mean[0]
        for kind, sign in (("upright", 1), ("negative", -1)):
            lens = Lens(axes=axes, channels=1, upright=(tuple(map(float, sign * field)),))
            publish(root, f"{name}-{kind}", own, content, {LENS: lens.to_bytes()})
        publish(root, f"{name}-damaged", own, content, {LENS: b"{}"})
        other = Lens(axes=axes, channels=3)
        publish(root, f"{name}-of-colours", own, content, {LENS: other.to_bytes()})
    return root


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], store: Path) -> Any:
    return start(store)


def scan() -> bytes:
    image = nib.Nifti1Image(VOXELS, np.diag([-1.0, -1.0, 2.0, 1.0]))
    image.header.set_xyzt_units("mm")
    return bytes(image.to_bytes())


def answer(api: Any, name: str) -> tuple[NDArray[Any], dict[str, Any]]:
    answered = api.segment(scan(), model=name)
    assert answered.status_code == 200, answered.text
    mask: Any = nib.Nifti1Image.from_bytes(gzip.decompress(answered.content))
    receipt = api.segment(scan(), model=name, output="json").json()["receipt"]
    return np.asarray(mask.dataobj), receipt


@pytest.mark.parametrize("name", ["slices", "volumes"])
def test_without_a_lens_and_as_the_members_lie_the_scan_is_seen_as_it_is(api: Any, name: str) -> None:
    mask, receipt = answer(api, name)
    np.testing.assert_array_equal(mask, VOXELS > THRESHOLD)
    assert receipt["lens"] is None
    mask, receipt = answer(api, f"{name}-upright")
    sure = VOXELS != THRESHOLD
    np.testing.assert_array_equal(mask[sure], (VOXELS > THRESHOLD)[sure])
    assert receipt["lens"] is not None


@pytest.mark.parametrize(("name", "axes"), [("slices", (0, 1)), ("volumes", (0, 1, 2))])
def test_a_negative_is_taken_about_the_mean_of_each_slice_or_of_the_volume(
    api: Any, store: Path, name: str, axes: tuple[int, ...]
) -> None:
    mask, receipt = answer(api, f"{name}-negative")
    negative = 2 * VOXELS.mean(axis=axes, keepdims=True) - VOXELS
    sure = abs(negative - THRESHOLD) > 1e-3
    np.testing.assert_array_equal(mask[sure], (negative > THRESHOLD)[sure])
    assert 0.3 < mask.mean() < 0.8
    entry = Store(store).open(f"{name}-negative").manifest.files[LENS]
    assert receipt["lens"] == entry.sha256


@pytest.mark.parametrize("name", ["slices", "volumes"])
@pytest.mark.parametrize(("which", "why"), [("damaged", "is no lens"), ("of-colours", "expected 1 channels")])
def test_a_lens_that_is_none_of_the_task_is_named(api: Any, name: str, which: str, why: str) -> None:
    refused = api.segment(scan(), model=f"{name}-{which}")
    assert refused.status_code == 503
    problem = json.loads(refused.content)
    assert why in problem["detail"]
    assert f"{name}-{which}@1" in problem["detail"]
