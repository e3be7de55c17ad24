from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cost.methods.experiment import shown
from benchmarks.cost.methods.passes import Passes
from benchmarks.cost.methods.recipes import RECIPES, cells
from benchmarks.harness.cells import Rows
from personalization.options.presets import AUTO, PRESETS


def test_convolutions_are_counted_forward_and_backward_by_hand() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(2, 3, 2, stride=2))
    images = torch.ones(5, 1, 4, 6)
    # 24 pixels of the first's answer and of the second's image, times each weight.
    first, second = 5 * 24 * 9 * 2, 5 * 24 * 4 * 2 * 3
    with Passes() as counted:
        answer = network(images)
    assert (counted.forward, counted.backward) == (first + second, 0)
    with Passes() as counted:
        answer.sum().backward()
    assert (counted.forward, counted.backward) == (0, first + second)
    with Passes() as counted:
        network[:2](images)
    assert counted.forward == first


def test_a_gradient_of_weights_and_images_counts_as_one_of_images_alone() -> None:
    layer, image = nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2, requires_grad=True)
    counts = []
    for learned in (True, False):
        with Passes() as counted:
            layer.requires_grad_(learned)(image).sum().backward()
        counts.append(counted.backward)
    assert counts == [4, 4]


def test_every_preset_has_a_cell() -> None:
    found = cells("smoke")
    assert [cell["preset"] for cell in found] == [
        AUTO,
        *(name for name in PRESETS if PRESETS[name].norm != "instance"),
    ]
    units = {cell["preset"]: cell["unit"] for cell in found}
    assert {name for name, unit in units.items() if unit == "scan"} == {"intent"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rows of the profile `smoke` by preset: of `auto`, one that learns, and one for a scan."""
    folder = tmp_path_factory.mktemp("recipes")
    file = folder / "rows.jsonl"
    for preset in (AUTO, "paper", "intent"):
        command = ["run", "method_cost", "--profile", "smoke", "--only", f"preset={preset}"]
        answer = CliRunner().invoke(app, [*command, "--rows", str(file), "--state-dir", str(folder / "s")])
        assert answer.exit_code == 0, answer.output
    return {row["cell"]["preset"]: row for row in Rows(file).read()}


def passes(row: Any, direction: str) -> list[float]:
    return [part[direction] for part in row["result"]["passes"].values()]


def test_auto_takes_three_passes_of_at_most_twelve(rows: dict[str, Any]) -> None:
    # One of the parent, one for the candidate's statistics, one of the candidate; none for the verdict.
    assert passes(rows[AUTO], "forward") == [3, 0]
    assert passes(rows[AUTO], "backward") == [0, 0]


def test_what_learns_passes_backward(rows: dict[str, Any]) -> None:
    # A step goes back through the images and through them with noise.
    assert passes(rows["paper"], "backward") == [pytest.approx(2, abs=0.05)]


def test_for_a_scan_the_answer_counts(rows: dict[str, Any]) -> None:
    # Six rungs, each measured and answered.
    assert passes(rows["intent"], "forward") == [6, 6]
    assert passes(rows["intent"], "backward") == [0, 0]


def test_the_page_has_the_passes_of_every_row(rows: dict[str, Any]) -> None:
    _, table = shown(RECIPES, [*rows.values()])
    assert " 3.0 passes forward, 0.0 backward |" in table
    assert len(table.splitlines()) == 2 + len(rows)
