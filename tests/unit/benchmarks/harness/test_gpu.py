"""The `gpu` profiles: complete, each cell on the GPU, and a clear refusal where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness.experiment import Options
from benchmarks.registry import EXPERIMENTS, find

# Nothing in them runs on a GPU: calls to a pretended one; bytes over a network; authentication, listings and
# rows; int8.
WITHOUT = {"device_calls", "network_cost", "page_cost", "quantised", "scale", "security_cost"}
COST = [
    name
    for name, place in EXPERIMENTS.items()
    if place.startswith(("benchmarks.cost.", "benchmarks.network.cost")) and name not in WITHOUT
]


def cells(name: str, profile: str) -> list[Any]:
    experiment = find(name)
    return experiment(Options(profile)).cells()


@pytest.mark.parametrize("name", COST)
def test_gpu_profile_puts_every_cell_on_the_gpu_and_only_there(name: str) -> None:
    assert {cell["device"] for cell in cells(name, "gpu")} == {"cuda"}
    assert [cell for cell in cells(name, "cpu") if "device" in cell] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", COST)
def test_gpu_profile_without_a_gpu_is_refused_before_a_cell_is_computed(name: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = ["run", name, "--profile", "gpu", "--rows", str(rows), "--state-dir", str(tmp_path / "state")]
    ended = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert ended.exit_code == 2
    assert "--profile gpu: expected an NVIDIA GPU" in ended.output
    assert list(tmp_path.iterdir()) == []
