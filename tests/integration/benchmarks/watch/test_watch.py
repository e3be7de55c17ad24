"""The simulated watch: every kind of cell, and the page that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.experiment import Options
from benchmarks.watch.experiment import Watch


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of `smoke`, one of every kind and every law."""
    watch = Watch(Options("smoke", settings=("repeats=40",), rows=Path("unused.jsonl")))
    work = tmp_path_factory.mktemp("watch")
    cells = [
        cell
        for cell in watch.cells()
        if cell["of"] == "years"
        or (cell["of"] == "level" and (cell["before"], cell["shift"]) == (500, 2.0))
        or (cell["of"] == "share" and (cell["before"], cell["changed"]) == (500, 0.3))
        or (cell["of"] == "silence" and cell["weeks"] == 4)
        or (cell["of"] == "limit" and cell["shift"] == 2.0)
    ]
    return [{"cell": cell, "result": watch.compute(cell, work)} for cell in cells]


def results(rows: list[dict[str, Any]], of: str, **fields: Any) -> list[dict[str, Any]]:
    return [
        row["result"]
        for row in rows
        if row["cell"]["of"] == of and all(row["cell"][name] == value for name, value in fields.items())
    ]


def test_a_change_is_found_about_when_theory_says(rows):
    (known,) = results(rows, "level", law="normal", by_weekday=False)
    assert known["found"] == 1
    assert known["mean"] == pytest.approx(known["theory"], rel=0.3)
    (by_weekday,) = results(rows, "level", law="normal", by_weekday=True)
    assert by_weekday["mean"] > known["mean"]


def test_more_scans_a_day_make_silence_known_sooner(rows):
    days = [each["mean"] for each in results(rows, "silence")]
    assert days == sorted(days, reverse=True)
    assert days[-1] == 1


def test_the_chain_is_what_is_simulated(rows):
    for each in results(rows, "limit"):
        assert abs(each["mean"] - each["theory"]) < 5 * each["error"]


def test_the_same_cell_gives_the_same_row(rows, tmp_path):
    watch = Watch(Options("smoke"))
    row = next(row for row in rows if row["cell"]["of"] == "years")
    assert watch.compute(row["cell"], tmp_path) == row["result"]


def test_the_page_has_every_table(rows):
    years, levels, shares, silence, limits = Watch(Options("smoke")).sections(rows)
    for law in ("normal", "skewed", "heavy tails", "weekly", "two scanners", "zeros", "together", "daily"):
        assert f"| {law} " in years
    assert "normal, by weekday" in levels
    assert "0% to 30%" in shares
    assert "| 10 " in silence
    assert "| 465 |" not in limits
    assert "4.01" in limits
