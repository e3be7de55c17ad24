from __future__ import annotations

from pathlib import Path

from benchmarks.cost.quantised import Quantised
from benchmarks.harness.experiment import Options


def test_graphs_are_compared_on_patients_that_did_not_calibrate_them(tmp_path: Path) -> None:
    cost = Quantised(Options("smoke", data=tmp_path))
    (cell,) = cost.cells()
    row = {"cell": cell, "result": cost.compute(cell, tmp_path)}
    found = row["result"]
    # Four patients, of whom two calibrate.
    assert (found["patients"], found["overlap"]) == (2, False)
    assert found["arms"]["float32"]["worst"] == 1
    assert found["arms"]["as served"]["bytes"] < found["arms"]["float32"]["bytes"]
    assert {*found["milliseconds"]["own"]} >= {"float32", "as served", "min-max"}
    text = "\n".join(cost.sections([row]))
    assert f"{found['arms']['as served']['worst']:.4f}" in text
    assert "goal of 2.5" in text
