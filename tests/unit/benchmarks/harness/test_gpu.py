"""The `gpu` profiles: complete, each cell on the GPU, and a clear refusal where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cost.base import Kind
from benchmarks.harness import gpu
from benchmarks.harness.experiment import Options
from benchmarks.registry import EXPERIMENTS, find
from service.errors import GpuUnavailable

# Nothing in them runs on a GPU: calls to a pretended one; bytes over a network; authentication, listings and
# rows; int8.
WITHOUT = {
    *(
        "device_calls",
        "network_cost",
        "observation_cost",
        "page_cost",
        "quantised",
        "scale",
        "security_cost",
        "shadow_cost",
    )
}
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


def test_page_has_every_gpu_profile_in_its_commands() -> None:
    page = (Path(__file__).parents[4] / "docs/how-to/gpu.md").read_text()
    commands = page.partition("## Try it on yours")[2]
    with_one = [name for name in EXPERIMENTS if "gpu" in find(name).profiles]
    assert [name for name in with_one if name not in commands] == []
    assert set(COST) <= set(with_one)


def test_gpu_that_onnxruntime_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(device: str) -> str:
        raise GpuUnavailable(f"LOCUM_DEVICE={device}, but onnxruntime cannot use it here")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "probe_provider", refuses)
    assert "found one for torch alone: LOCUM_DEVICE=cuda, but onnxruntime" in (gpu.missing("cuda") or "")
    assert gpu.missing("cpu") is None


def test_cell_of_a_gpu_is_measured_in_the_mode_of_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cudnn = torch.backends.cudnn
    for name, value in {"deterministic": False, "allow_tf32": True, "benchmark": True}.items():
        monkeypatch.setattr(cudnn, name, value)

    def measure(*_: object) -> dict[str, bool]:
        return {"repeats": cudnn.deterministic, "tf32": cudnn.allow_tf32, "searches": cudnn.benchmark}

    cost = find("round_cost")(Options("smoke"))
    monkeypatch.setattr(cost, "kinds", lambda: {"": Kind(measure, lambda _: [])})
    assert cost.compute({"device": "cuda"}, tmp_path) == {"repeats": True, "tf32": False, "searches": False}
    assert cost.compute({}, tmp_path) == {"repeats": False, "tf32": True, "searches": True}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", COST)
def test_gpu_profile_without_a_gpu_is_refused_before_a_cell_is_computed(name: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = ["run", name, "--profile", "gpu", "--rows", str(rows), "--state-dir", str(tmp_path / "state")]
    ended = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert ended.exit_code == 2
    assert "--profile gpu: expected an NVIDIA GPU" in ended.output
    assert list(tmp_path.iterdir()) == []
