from __future__ import annotations

from pathlib import Path

from benchmarks.cost.methods.bilevel import BILEVEL
from benchmarks.cost.methods.experiment import shown

SHARED = {"width": 2, "batch": 200, "J": 2}


def test_both_ways_come_to_the_same_slope_and_the_second_order_needs_more_memory(tmp_path: Path) -> None:
    cell = {"what": "step", "repeats": 2, **SHARED}
    result = BILEVEL.measure(cell, tmp_path)
    # In fp32; the unit tests hold them together in fp64.
    assert result["slopes_apart"] < 1e-3
    assert 0 < result["peak_bytes"]["plain"] < result["peak_bytes"]["method"]
    _, table = shown(BILEVEL, [{"cell": cell, "result": result}])
    assert f"{result['ratio']:.2f}" in table


def test_w_moves_only_where_it_is_learned(tmp_path: Path) -> None:
    cell = {"what": "trajectory", "T": 3, "width": 1, "batch": 10, "J": 2}
    moved = [BILEVEL.measure({**cell, "S": outer}, tmp_path)["moved"] for outer in (0, 2)]
    assert moved[0] == 0 < moved[1]
