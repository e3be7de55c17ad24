"""Every recorded row is one of a cell that today's code would compute: no change made the rows invalid."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.cross_organ.experiment import CrossOrgan
from benchmarks.accuracy.cross_organ.experiment import cells_of as cross_organ_cells
from benchmarks.accuracy.inside.experiment import Inside
from benchmarks.accuracy.outside.experiment import Outside, Tries
from benchmarks.accuracy.outside.experiment import cells_of as outside_cells
from benchmarks.accuracy.unseen.experiment import Unseen
from benchmarks.accuracy.unseen.experiment import cells_of as unseen_cells
from benchmarks.harness.cells import Cell, Row, Rows, key
from benchmarks.harness.experiment import Experiment, Table, changed
from benchmarks.registry import EXPERIMENTS, find

RESULTS = Path(__file__).parents[3] / "docs/results"
TABLES = [(name, table) for name in EXPERIMENTS for table in find(name).tables]
# How many rows are of a changed profile; they were recorded to compare other settings with the profile's.
TRIES = {"inside.cpu": 2, "outside.cpu": 12, "outside.phantom": 24}
# How many of these were recorded before a cell named the gate's limits; today's cells of these tries do.
TRIES_WITHOUT_GATE = {"outside.cpu": 9}


def cells_of(experiment: Experiment[Any], profile: Any, rows: list[Row]) -> list[Cell]:
    """The experiment's cells; names of sites and patients, which are in the data, are taken from the rows."""
    name, first = experiment.options.profile, rows[0]["cell"]
    if isinstance(experiment, Outside):
        return outside_cells(first["set"], sorted({row["cell"]["site"] for row in rows}), name, profile)
    if isinstance(experiment, CrossOrgan):
        return cross_organ_cells(name, profile, first["patients"])
    if isinstance(experiment, Unseen):
        sites: dict[str, set[str]] = {}
        for row in rows:
            sites.setdefault(row["cell"]["set"], set()).add(row["cell"]["site"])
        return unseen_cells(name, profile, {set_: sorted(there) for set_, there in sites.items()})
    experiment.profile = profile
    return experiment.cells()


def settings_of(experiment: Experiment[Any], cell: Cell, usual: list[Cell]) -> list[str]:
    """The --set options that make the cell out of the profile."""
    if isinstance(experiment, Outside):
        [profiled] = [c for c in usual if all(c[n] == cell[n] for n in ("arms", "seed", "site"))]
        changes = {name: (cell["adaptation"][name], profiled["adaptation"][name]) for name in TRIED}
        return [f"adaptation.{name}={now}" for name, (now, before) in changes.items() if now != before]
    assert isinstance(experiment, Inside)
    changes = {name: (value, usual[0]["method"][name]) for name, value in cell["method"].items()}
    return [f"method.{name}={now}" for name, (now, before) in changes.items() if now != before]


TRIED = [field.name for field in fields(Tries)]


@pytest.mark.parametrize(("name", "table"), TABLES, ids=[table.name for _, table in TABLES])
def test_every_row_is_a_cell_of_its_profile_or_a_try(name: str, table: Table) -> None:
    rows = Rows(RESULTS / f"{table.name}.jsonl").read()
    assert rows
    experiment = find(name).of_table(table)
    cells = cells_of(experiment, experiment.baseline, rows)
    known = {key(cell) for cell in cells}
    tries = [row["cell"] for row in rows if key(row["cell"]) not in known]
    assert len(tries) == TRIES.get(table.name, 0)
    without_gate = 0
    for cell in tries:
        settings = settings_of(experiment, cell, cells)
        assert settings
        tried = cells_of(experiment, changed(experiment.baseline, settings), rows)
        if isinstance(experiment, Outside) and "gate" not in cell:
            tried = [{name: value for name, value in other.items() if name != "gate"} for other in tried]
            without_gate += 1
        assert key(cell) in {key(other) for other in tried}, settings
    assert without_gate == TRIES_WITHOUT_GATE.get(table.name, 0)


def test_every_rows_file_belongs_to_a_table() -> None:
    assert {path.stem for path in RESULTS.glob("*.jsonl")} == {table.name for _, table in TABLES}


def test_names_are_those_of_the_registry_and_of_the_files() -> None:
    for name in EXPERIMENTS:
        experiment = find(name)
        assert experiment.name == name
        assert all(table.name.split(".")[0] == name for table in experiment.tables)
        assert all(table.profile in experiment.profiles for table in experiment.tables)
        assert {"smoke", "cpu"} <= experiment.profiles.keys()
