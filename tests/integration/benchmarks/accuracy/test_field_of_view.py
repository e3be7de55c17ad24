"""A cell of `field_of_view` on the phantom, from training to what is served."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.accuracy.field_of_view.experiment import FieldOfView
from benchmarks.harness.experiment import Options


def test_a_wider_phantom_is_asked_for_its_scale_and_reported(tmp_path: Path) -> None:
    experiment = FieldOfView(Options("smoke", data=tmp_path, state_dir=tmp_path, workers=0))
    cell = experiment.cells()[0]
    row = {"cell": cell, "result": experiment.compute(cell, tmp_path / "work")}
    (found,) = row["result"]["at"].values()
    assert len(found["cohorts"]) == 2
    for cohort in found["cohorts"]:
        assert cohort["zoom"] == 2
        assert cohort["change"] == 0 or not cohort["gate"]["failed"]
    page = "\n".join(experiment.sections([row]))
    assert re.search(r"^\| 2 times +\| +2 \| +2 \|", page, re.MULTILINE)
