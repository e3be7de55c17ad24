"""A few of the random faults of `benchmarks.faults.experiment`, and its page."""

from __future__ import annotations

from pathlib import Path

from benchmarks.faults.experiment import compute
from benchmarks.faults.kinds import KINDS
from benchmarks.faults.report import sections


def test_a_short_campaign_breaks_nothing(tmp_path: Path) -> None:
    cell = {"batch": 0, "faults": 2, "jobs": 1, "seed": 1, "workers": "forked", "auth": "keys"}
    result = compute(cell, tmp_path)
    assert result["violations"] == []
    assert len(result["faults"]) == 2
    assert {fault["kind"] for fault in result["faults"]} <= KINDS.keys()
    assert all(fault["recovered_s"] is not None for fault in result["faults"])
    assert sum(result["jobs"].values()) == len(result["attempts"]) == len(result["seconds_to_end"])
    row = {"cell": cell, "result": result}
    page = "\n\n".join(sections([row, row], 1))
    assert page.startswith("4 faults in 2 batches")
    assert "Violated invariants: 0" in page
    broken = {"cell": cell, "result": result | {"violations": ["job 7 was accepted and is not there"]}}
    assert "- job 7 was accepted" in "\n\n".join(sections([row, broken], 1))
