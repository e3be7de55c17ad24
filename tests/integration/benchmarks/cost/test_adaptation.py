from __future__ import annotations

from pathlib import Path

from benchmarks.cost.methods.adaptation import ADAPTATION
from benchmarks.cost.methods.experiment import shown

SIZE = {"size": 32, "width": 2}


def test_a_step_and_a_graph_are_timed_beside_their_floor(tmp_path: Path) -> None:
    cells = [
        {"what": "step", "preset": "paper", "router": "pooled", "K": 1, **SIZE, "repeats": 3},
        {"what": "graph", "K": 2, **SIZE, "repeats": 3},
    ]
    rows = [{"cell": cell, "result": ADAPTATION.measure(cell, tmp_path)} for cell in cells]
    for row in rows:
        assert row["result"]["ratio"] > 0
        assert row["result"]["seconds"]["method"]["median"] > 0
    text = "\n".join(shown(ADAPTATION, rows))
    assert "paper, pooled" in text
    assert f"{rows[1]['result']['ratio']:.2f}" in text


def test_the_models_count_in_the_peak_of_a_process_of_its_own(tmp_path: Path) -> None:
    # Models of 8 MiB each, so that they stand out of the interpreter's own hundreds.
    cells = [{"what": "memory", "K": inside, "size": 16, "width": 16} for inside in (1, 7)]
    few, many = (ADAPTATION.measure(cell, tmp_path) for cell in cells)
    few, many = few["peak_bytes"], many["peak_bytes"]
    assert many["plain"] == 4 * few["plain"]
    assert many["method"] - few["method"] > 0.9 * (many["plain"] - few["plain"])
