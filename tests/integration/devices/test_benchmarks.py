"""Cells of `method_cost` that compute with torch, at their smallest, on a device: see `conftest`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost.methods.experiment import MethodCost
from benchmarks.harness.cells import Cell
from benchmarks.harness.experiment import Options
from tests.helpers.gpu import Cuda

# Memory is measured in processes of their own, and graphs are run by onnxruntime.
TORCH = ("trajectory", "training")
# A recipe of each kind; `test_personalization` has them all.
RECIPES = ("auto", "paper", "intent")
COST = MethodCost(Options("smoke"))


def chosen(cell: Cell) -> bool:
    if cell["cost"] == "recipes":
        return cell["preset"] in RECIPES
    # Of sites and lengths, one each.
    same = cell.get("sites", 3) == 3 and cell.get("S", 6) == 6
    timed = cell["cost"] == "adaptation" and cell["what"] == "step"
    return same and (timed or cell.get("what", cell.get("mode")) in TORCH)


def named(cell: Cell) -> str:
    return "-".join(map(str, cell.values()))


@pytest.mark.parametrize("cell", [*filter(chosen, COST.cells())], ids=named)
def test_cell_is_measured(cell: Cell, cuda: Cuda, tmp_path: Path) -> None:
    with cuda.present():
        assert COST.compute({**cell, "device": "cuda"}, tmp_path)
