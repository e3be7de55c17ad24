"""Cells of the benchmarks of cost that compute with torch, at their smallest, on a device: see `conftest`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost.adaptation import AdaptationCost
from benchmarks.cost.attention import AttentionCost
from benchmarks.cost.base import CostExperiment
from benchmarks.cost.bilevel import BilevelCost
from benchmarks.cost.recipes import RecipeCost
from benchmarks.harness.cells import Cell
from benchmarks.harness.experiment import Options
from tests.helpers.gpu import Cuda

# Memory is measured in processes of their own, and graphs are run by onnxruntime.
TORCH = ("step", "trajectory", "training")
# A recipe of each kind; `test_personalization` has them all.
RECIPES = ("auto", "paper", "intent")


def cells() -> list[tuple[CostExperiment[object], Cell]]:
    found = []
    for experiment in (AdaptationCost, AttentionCost, BilevelCost, RecipeCost):
        cost = experiment(Options("smoke"))
        for cell in cost.cells():
            kind = cell.get(cost.by, "")
            # Of sites and lengths, one each.
            same = cell.get("sites", 3) == 3 and cell.get("S", 6) == 6
            if same and (kind in TORCH if kind else cell["preset"] in RECIPES):
                found.append((cost, cell))
    return found


def named(given: CostExperiment[object] | Cell) -> str:
    return given.name if isinstance(given, CostExperiment) else "-".join(map(str, given.values()))


@pytest.mark.parametrize(("cost", "cell"), cells(), ids=named)
def test_cell_is_measured(cost: CostExperiment[object], cell: Cell, cuda: Cuda, tmp_path: Path) -> None:
    with cuda.present():
        assert cost.compute({**cell, "device": "cuda"}, tmp_path)
