"""Every recorded row is one of a cell that today's code would compute: no change made the rows invalid."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.accuracy.dose.experiment import Dose
from benchmarks.accuracy.dose.experiment import cells_of as dose_cells
from benchmarks.accuracy.lens.experiment import LensExperiment
from benchmarks.accuracy.lens.experiment import cells_of as lens_cells
from benchmarks.cost.base import CostExperiment
from benchmarks.cost.round import RoundCost
from benchmarks.harness.cells import Rows, key
from benchmarks.harness.experiment import Table
from benchmarks.registry import EXPERIMENTS, find

RESULTS = Path(__file__).parents[3] / "docs/results"
TABLES = [(name, table) for name in EXPERIMENTS for table in find(name).tables]


@pytest.mark.parametrize(("name", "table"), TABLES, ids=[table.name for _, table in TABLES])
def test_every_row_is_a_cell_of_its_profile(name: str, table: Table) -> None:
    rows = Rows(RESULTS / f"{table.name}.jsonl").read()
    assert rows
    experiment = find(name).of_table(table)
    if isinstance(experiment, Dose | LensExperiment):
        # Sites are in the data, so they are taken from the rows.
        sites: dict[str, set[str]] = {}
        for row in rows:
            sites.setdefault(row["cell"]["set"], set()).add(row["cell"]["site"])
        named = {set_: sorted(there) for set_, there in sites.items()}
        if isinstance(experiment, Dose):
            cells = dose_cells(experiment.profile, named)
        else:
            cells = lens_cells(experiment.profile, named)
    else:
        cells = experiment.cells()
    assert {key(row["cell"]) for row in rows} <= {key(cell) for cell in cells}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_recorded_ratio_is_impossible(name: str) -> None:
    experiment = find(name)
    if not issubclass(experiment, CostExperiment):
        return
    for table in experiment.tables:
        for row in Rows(RESULTS / f"{table.name}.jsonl").read():
            assert not experiment.impossible(row["result"]), row["cell"]


def test_a_ratio_of_which_half_was_not_counted_is_impossible() -> None:
    possible = {"ratio": 1.02, "processor_ratio": 1.03, "operations": 771}
    assert not RoundCost.impossible(possible)
    assert RoundCost.impossible({**possible, "processor_ratio": 0.028}) == ["processor_ratio = 0.028"]
    assert RoundCost.impossible({"ratio": {"median": math.nan}}) == ["ratio.median = nan"]


def test_every_rows_file_belongs_to_a_table() -> None:
    assert {path.stem for path in RESULTS.glob("*.jsonl")} == {table.name for _, table in TABLES}


def test_names_are_those_of_the_registry_and_of_the_files() -> None:
    for name in EXPERIMENTS:
        experiment = find(name)
        assert experiment.name == name
        assert all(table.name.split(".")[0] == name for table in experiment.tables)
        assert all(table.profile in experiment.profiles for table in experiment.tables)
        assert {"smoke", "cpu"} <= experiment.profiles.keys()
