"""Training on a GPU equals the CPU up to rounding: `pytest -m gpu` on a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.config import RunConfig
from training.data.federation import load_federation
from training.methods.fedavg import FedAvgConfig
from training.run import Run, execute

pytestmark = pytest.mark.gpu


def weights(federation: Path, folder: Path, device: str) -> torch.Tensor:
    """All weights after one round without augmentation, as one vector."""
    config = FedAvgConfig(rounds=1, width=4, augment=False, selection="last")
    settings = RunConfig.model_validate({"device": device})
    result = execute(Run(load_federation(federation), "fedavg", config, settings), folder, workers=1)
    state = result.publication.models[0].weights
    return torch.cat([state[name].flatten() for name in sorted(state) if state[name].is_floating_point()])


def test_round_on_the_gpu_is_close_to_the_cpu(phantom_federation: Path, tmp_path: Path) -> None:
    on_cpu = weights(phantom_federation, tmp_path / "cpu", "cpu")
    on_gpu = weights(phantom_federation, tmp_path / "gpu", "cuda")
    # Adam's first steps have the size of the learning rate (1e-3) for any gradient: where the gradient is
    # near zero, rounding decides the sign. Nearly all weights agree far better.
    difference = (on_cpu - on_gpu).abs()
    assert difference.median() < 1e-5
    assert difference.quantile(0.99) < 5e-3


def test_run_on_the_gpu_is_repeatable(phantom_federation: Path, tmp_path: Path) -> None:
    first = weights(phantom_federation, tmp_path / "first", "cuda")
    second = weights(phantom_federation, tmp_path / "second", "cuda")
    assert torch.equal(first, second)
