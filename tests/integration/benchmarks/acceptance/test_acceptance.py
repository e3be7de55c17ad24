"""The coverage of bounds: against normal draws, where Student's t is exact, and the page that rows make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.acceptance.bounds import BOUNDS
from benchmarks.acceptance.experiment import CHOSEN, GOAL, Acceptance
from benchmarks.acceptance.recorded import MADE_UP, recorded
from benchmarks.harness.cells import Rows
from benchmarks.harness.experiment import RESULTS, Options


def test_students_bound_is_scipys_and_covers_normal_draws() -> None:
    draws = np.random.default_rng(0).normal(0.8, 0.02, (4000, 12))
    bounds = BOUNDS["t"](draws)
    assert bounds[0] == pytest.approx(stats.ttest_1samp(draws[0], 0).confidence_interval(0.90).low)
    # Four standard errors.
    assert abs((bounds <= 0.8).mean() - 0.95) < 4 * (0.95 * 0.05 / 4000) ** 0.5


@pytest.mark.parametrize("name", BOUNDS)
def test_every_bound_is_below_the_mean_of_its_draw(name: str) -> None:
    draws = np.random.default_rng(1).beta(8, 2, (50, 12))
    assert (BOUNDS[name](draws) < draws.mean(axis=1)).all()


def test_corrections_of_a_left_skew_go_down() -> None:
    draws = np.random.default_rng(2).beta(8, 2, (500, 12))
    student = np.median(BOUNDS["t"](draws))
    assert all(
        np.median(BOUNDS[name](draws)) < student for name in ("Johnson", "Hall", "bootstrap-t", CHOSEN)
    )


def test_smoke_makes_every_table_and_the_same_cell_the_same_row(tmp_path: Path) -> None:
    experiment = Acceptance(Options("smoke", rows=tmp_path / "rows.jsonl"))
    chosen = ("breast_ultrasound", MADE_UP[0])
    cells = [cell for cell in experiment.cells() if cell["set"] in chosen]
    rows = [{"cell": cell, "result": experiment.compute(cell, tmp_path)} for cell in cells]
    assert experiment.compute(cells[0], tmp_path) == rows[0]["result"]
    coverage, distance, others = experiment.sections(rows)
    assert f"| {MADE_UP[0]} " in coverage
    assert "| breast_ultrasound " in distance
    assert "| breast_ultrasound " in others


def test_the_chosen_bound_holds_in_every_recorded_set() -> None:
    rows = [row for row in Rows(RESULTS / "acceptance.jsonl").read() if row["cell"]["of"] == "bound"]
    at_twelve = [row for row in rows if row["cell"]["set"] in recorded() and row["cell"]["n"] == 12]
    assert len(at_twelve) == len(recorded()) >= 12
    assert min(row["result"][CHOSEN]["covers"] for row in at_twelve) >= GOAL
    assert min(row["result"]["t"]["covers"] for row in at_twelve) < GOAL
