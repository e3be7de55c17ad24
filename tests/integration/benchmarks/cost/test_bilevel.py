from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost.bilevel import SIDES, BilevelCost
from benchmarks.harness.experiment import Options

COST = BilevelCost(Options("smoke"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    shared = {"width": 1, "batch": 10, "J": 2}
    cells = [
        {"what": "step", "repeats": 2, **shared},
        *({"what": "trajectory", "T": 3, "S": outer, **shared} for outer in (0, 2)),
    ]
    work: Path = tmp_path_factory.mktemp("work")
    return [{"cell": cell, "result": COST.compute(cell, work)} for cell in cells]


def test_both_ways_come_to_the_same_slope(rows: list[dict[str, dict[str, object]]]) -> None:
    result = rows[0]["result"]
    # In fp32; the unit tests hold them together in fp64.
    assert result["slopes_apart"] < 1e-3  # type: ignore[operator]


def test_a_step_needs_memory_and_a_second_order_needs_more(tmp_path: Path) -> None:
    found = COST.compute({"what": "memory", "width": 2, "batch": 200, "J": 2}, tmp_path)["peak_bytes"]
    exact, second = (found[side] for side in SIDES)
    assert 0 < exact < second


def test_w_moves_only_where_it_is_learned(rows: list[dict[str, dict[str, object]]]) -> None:
    never, learned = (row["result"]["mixing"] for row in rows[1:])
    assert never == [[0.5, 0.5], [0.5, 0.5]]
    assert learned != never


def test_the_page_has_a_line_for_each(rows: list[dict[str, object]]) -> None:
    memory = {"cell": {"what": "memory", "J": 2}, "result": {"peak_bytes": dict.fromkeys(SIDES, 2**20)}}
    _, steps, _, memories, _, trajectories = COST.sections([*rows, memory])
    lines = [len(table.splitlines()) - 2 for table in (steps, memories, trajectories)]
    assert lines == [1, 1, 2]
    assert memories.endswith("| 2         |     1 |            1 |  1.00 |")
