"""DENSE through the command's engine: one upload, and one model that serves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from model_store.store import Store
from training.config import RunConfig
from training.data.federation import load_federation
from training.errors import ConfigurationError, EgressRefused
from training.methods.dense import DenseConfig
from training.phantom.shapes import write_shapes
from training.run import Run, execute

CONFIG = {
    "width": 2,
    "local_epochs": 2,
    "batch_size": 8,
    "epochs": 4,
    "generator_steps": 2,
    "synthesis_batch": 8,
    "noise_size": 8,
    "generator_width": 4,
    "pool": 2,
}
SITES = ("elm", "fir", "hazel")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes"), SITES, images_per_site=12, size=8)


def run_of(data: Path, **settings: object) -> Run:
    return Run(load_federation(data), "dense", DenseConfig(**CONFIG), RunConfig(**{"seed": 4, **settings}))


def test_one_upload_per_hospital_becomes_one_model_that_serves(data: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    result = execute(run_of(data), tmp_path / "run", workers=0, store=store)
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


def test_uploads_cannot_have_differential_privacy_and_the_run_says_so(data: Path, tmp_path: Path) -> None:
    privacy = {"groups": {"model": {"clip": 1.0, "noise": 1.0}}}
    with pytest.raises(ConfigurationError, match=r"'model' in phase 'local' is reduced by collect"):
        execute(run_of(data, privacy=privacy), tmp_path / "run", workers=0)
    with pytest.raises(EgressRefused, match="fir: phase 'local' uploads 'model'"):
        execute(run_of(data, egress={"fir": ("statistics",)}), tmp_path / "run", workers=0)
