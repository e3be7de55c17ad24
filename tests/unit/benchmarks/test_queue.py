"""The queue of what is not computed yet: it leaves out what has a row, and ends its pieces in time."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import queue, registry
from benchmarks.harness import experiment
from benchmarks.harness.cells import Cell, Row, Rows
from benchmarks.harness.experiment import Experiment, Table
from benchmarks.queue import WANTED, Wanted, left, piece


@dataclass(frozen=True)
class Profile:
    count: int = 3
    device: str = "cpu"


class Squares(Experiment[Profile]):
    name, title, question = "squares", "Squares", "How large are squares?"
    profiles: ClassVar = {"cpu": Profile()}
    tables = (Table("squares.cpu"),)

    def cells(self) -> list[Cell]:
        return [{"n": number} for number in range(self.profile.count)]

    def compute(self, cell: Cell, work: Path) -> Mapping[str, Any]:
        return {"square": cell["n"] ** 2}

    def sections(self, rows: Sequence[Row]) -> list[str]:
        return []


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Those of the experiment `squares`, the only one that is wanted."""
    monkeypatch.setattr(experiment, "RESULTS", tmp_path)
    monkeypatch.setitem(registry.EXPERIMENTS, "squares", f"{__name__}:Squares")
    monkeypatch.setattr(queue, "WANTED", (Wanted("squares"),))
    return Rows(tmp_path / "squares.cpu.jsonl")


def finish(rows: Rows, number: int) -> None:
    rows.append({"cell": {"n": number}, "result": {}, "seconds": 60.0, "made_with": {}})


def test_what_is_wanted_is_there() -> None:
    for wanted in WANTED:
        assert wanted.profile in registry.find(wanted.experiment).profiles


def test_cells_with_a_row_are_left_out(rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    finish(rows, 1)
    assert left(Wanted("squares"), None).cells == [{"n": 0}, {"n": 2}]
    assert left(Wanted("squares", only=("n=2",)), None).cells == [{"n": 2}]
    queue.show(None)
    assert "squares cpu: 2 cells, about 2 minutes" in capsys.readouterr().out


def test_pieces_follow_each_other_until_every_cell_has_its_row(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def ended(command: Sequence[str], seconds: float) -> None:
        assert command[1:] == ["-m", "benchmarks", "run", "squares", "--profile", "cpu"]
        finish(rows, len(asked))
        asked.append(seconds)

    monkeypatch.setattr(queue, "piece", ended)
    queue.compute(None, minutes=60)
    assert asked == [480.0] * 3
    queue.compute(None, minutes=60)
    assert len(asked) == 3


def test_part_that_fails_is_not_begun_again(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(queue, "piece", lambda command, seconds: asked.append(seconds) or 1)
    queue.compute(None, minutes=4)
    assert len(asked) == 1
    assert asked[0] <= 240


@pytest.mark.process
def test_piece_is_ended_in_time() -> None:
    assert piece([sys.executable, "-c", "import time; time.sleep(600)"], 0.2) is None
    assert piece([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3
