"""DAFL, FedISCA and Co-Boosting through the engine: one upload, and one model that serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from model_store.store import Store
from training.config import RunConfig
from training.data.federation import load_federation
from training.errors import ConfigurationError, EgressRefused
from training.methods.registry import method
from training.phantom.shapes import write_shapes
from training.run import Run, execute

STUDENT: dict[str, Any] = {"width": 2, "local_epochs": 2, "batch_size": 8, "epochs": 4, "synthesis_batch": 8}
GENERATED: dict[str, Any] = {**STUDENT, "generator_steps": 2, "noise_size": 8, "generator_width": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "dafl": GENERATED,
    "fedisca": {**STUDENT, "steps": 3},
    "co-boosting": {**GENERATED, "pool": 2},
}
METHODS = tuple(CONFIGS)
SITES = ("elm", "fir", "hazel")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes"), SITES, images_per_site=12, size=8)


def run_of(data: Path, name: str, **settings: object) -> Run:
    config = method(name).config(**CONFIGS[name])
    return Run(load_federation(data), name, config, RunConfig(**{"seed": 4, **settings}))


@pytest.mark.parametrize("name", METHODS)
def test_one_upload_per_hospital_becomes_one_model_that_serves(data: Path, tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / "store")
    result = execute(run_of(data, name), tmp_path / "run", workers=0, store=store)
    assert store.versions.names() == ["shapes"]
    artefact = store.open("shapes")
    assert (artefact.manifest.kind, artefact.manifest.role) == ("model", "global")
    assert 0 <= artefact.manifest.metrics["val_accuracy"] <= 1
    session = onnxruntime.InferenceSession(artefact.read("graph.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"image": np.zeros((2, 1, 8, 8), np.float32)})
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    (draft,) = result.publication.models
    size = sum(tensor.numel() * tensor.element_size() for tensor in draft.weights.values())
    local, *stage, validate, tested = result.history
    assert [entry.phase for entry in stage] == ["distil"] * 4
    for site in local.sites.values():
        assert (site.sent["model"], site.received) == (size, {"seed": 8})
    for entry, group in ((validate, "counts"), (tested, "tested")):
        for site in entry.sites.values():
            assert (set(site.sent), site.received) == ({group, "metrics"}, {"weights": size})


@pytest.mark.parametrize("name", METHODS)
def test_a_policy_that_keeps_weights_and_privacy_are_refused(data: Path, tmp_path: Path, name: str) -> None:
    privacy = {"groups": {"model": {"clip": 1.0, "noise": 1.0}}}
    with pytest.raises(ConfigurationError, match=r"'model' in phase 'local' is reduced by collect"):
        execute(run_of(data, name, privacy=privacy), tmp_path / "run", workers=0)
    with pytest.raises(EgressRefused, match="fir: phase 'local' uploads 'model'"):
        execute(run_of(data, name, egress={"fir": ("statistics",)}), tmp_path / "run", workers=0)
