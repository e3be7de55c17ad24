"""Training on a GPU equals the CPU up to rounding: `pytest -m gpu` on a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.federation import load_federation
from training.run import Run, execute

pytestmark = pytest.mark.gpu


def weights(federation: Path, folder: Path, device: str, workers: int = 1) -> torch.Tensor:
    """All weights after one round without augmentation, as one vector."""
    # Adam's first steps have the size of the learning rate for any gradient: rounding decides the sign of
    # those near zero, and a round later the weights differ by 1e-4.
    config = FedAvgConfig(rounds=1, width=4, augment=False, selection="last", optimiser="sgd")
    settings = RunConfig.model_validate({"device": device})
    result = execute(Run(load_federation(federation), "fedavg", config, settings), folder, workers=workers)
    state = result.publication.models[0].weights
    return torch.cat([state[name].flatten() for name in sorted(state) if state[name].is_floating_point()])


def test_round_on_the_gpu_is_close_to_the_cpu(phantom_federation: Path, tmp_path: Path) -> None:
    on_cpu = weights(phantom_federation, tmp_path / "cpu", "cpu")
    on_gpu = weights(phantom_federation, tmp_path / "gpu", "cuda")
    difference = (on_cpu - on_gpu).abs()
    print(f"0.99 of the weights differ by {difference.quantile(0.99):.2g}, all by {difference.max():.2g}")
    # Noise of 1e-6 of each convolution's mean gives 6e-8 and 1e-5 on a CPU. Noise of 5e-4, as TF32 has, gives
    # 7e-7 and 3e-4.
    assert difference.quantile(0.99) < 3e-7
    assert difference.max() < 1e-4


def test_run_on_the_gpu_is_repeatable(phantom_federation: Path, tmp_path: Path) -> None:
    first = weights(phantom_federation, tmp_path / "first", "cuda")
    # In this process, not in one of its own.
    second = weights(phantom_federation, tmp_path / "second", "cuda", workers=0)
    assert torch.equal(first, second)
