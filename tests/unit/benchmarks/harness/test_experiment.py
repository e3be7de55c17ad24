from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.cells import Cell, Row, Rows
from benchmarks.harness.experiment import (
    Experiment,
    OptionError,
    Options,
    Table,
    changed,
    chosen,
    report_experiment,
    run_experiment,
    unknown,
)


@dataclass(frozen=True)
class Inner:
    rate: float | None = None


@dataclass(frozen=True)
class Profile:
    count: int = 2
    seeds: int = 2
    sides: tuple[int, ...] = (1, 2)
    method: Mapping[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


PROFILES = {"smoke": Profile(1, 1), "cpu": Profile()}


class Squares(Experiment[Profile]):
    name = "squares"
    title = "Squares"
    question = "How large are squares?"
    profiles = PROFILES
    tables = (Table("squares"), Table("squares.large", seeds=1))

    def cells(self) -> list[Cell]:
        return [{"n": n, "seed": s} for s in range(self.profile.seeds) for n in range(self.profile.count)]

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        return {"square": cell["n"] ** 2}

    def sections(self, rows: Sequence[Row]) -> list[str]:
        return [" ".join(f"{row['cell']['n']}:{row['result']['square']}" for row in rows)]


class WithTries(Squares):
    shows_tries = True
    data_help = "a folder"


def test_settings_change_fields_and_entries_by_their_types() -> None:
    settings = ["count=5", "sides=[3, 4]", "method.tau=0.5", "method.selection=last", "inner.rate=1e-3"]
    assert changed(Profile(), settings) == Profile(
        5, 2, (3, 4), {"tau": 0.5, "selection": "last"}, Inner(0.001)
    )
    assert changed(Profile(), []) == Profile()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("count", "expected FIELD=VALUE, found 'count'"),
        ("coutn=1", "unknown field 'coutn'; did you mean 'count'"),
        ("count=many", "count: .*integer.*'many'"),
        ("count.x=1", "'count' has no entries"),
        ("inner.rat=1", "unknown field 'rat'; did you mean 'rate'"),
    ],
)
def test_a_setting_that_does_not_fit_is_rejected(setting: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        changed(Profile(), [setting])


CELLS = [{"arms": arms, "seed": seed} for seed in range(2) for arms in ("plain", "routing a", "routing b")]


def test_cells_are_chosen_by_pattern_and_seed() -> None:
    assert chosen(CELLS, ["arms=routing*", "seed=1"], None) == [CELLS[4], CELLS[5]]
    assert chosen(CELLS, ["arms=plain"], 1) == [CELLS[0]]
    assert chosen(CELLS, [], 5) == CELLS


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("arms", "expected FIELD=PATTERN"),
        ("arm=plain", "unknown field 'arm'; did you mean 'arms'"),
        ("arms=plian", "unknown arms 'plian'; did you mean 'plain'"),
    ],
)
def test_a_choice_without_cells_is_rejected(only: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        chosen(CELLS, [only], None)


def test_seeds_are_rejected_where_cells_have_none() -> None:
    with pytest.raises(OptionError, match="--seeds"):
        chosen([{"n": 1}], [], 1)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert unknown("profile", "cup", ["smoke", "cpu"]) == (
        "unknown profile 'cup'; did you mean 'cpu'? There are smoke, cpu"
    )


@pytest.mark.parametrize(
    ("experiment", "options", "message"),
    [
        (Squares, Options(profile="cup"), "did you mean 'cpu'"),
        (Squares, Options(data=Path("x")), "makes its own data"),
        (Squares, Options(settings=("count=1",)), "--rows: a changed profile"),
        (WithTries, Options(), "--data: squares needs it: a folder"),
    ],
)
def test_options_that_do_not_fit_are_rejected(
    experiment: type[Squares], options: Options, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        experiment(options)


def test_the_usual_rows_are_those_of_the_recorded_table() -> None:
    assert Squares.usual_rows("cpu") == Path("docs/results/squares.jsonl")
    assert Squares.usual_rows("smoke") == Path("docs/results/squares.smoke.jsonl")


def test_the_command_has_what_decides_the_page() -> None:
    start = "python -m benchmarks run squares --profile"
    assert Squares.of_table(Squares.tables[0]).command == f"{start} cpu"
    assert Squares.of_table(Squares.tables[1]).command == (
        f"{start} cpu --seeds 1 --rows docs/results/squares.large.jsonl"
    )
    options = Options("smoke", rows=Path("a b.jsonl"), settings=("count=3",), workers=4, only=("n=0",))
    assert Squares(options).command == f"{start} smoke --set count=3 --rows 'a b.jsonl'"
    tried = WithTries(Options(data=Path("d"), settings=("count=3",)))
    assert tried.command == f"{start} cpu --data d"


# Rows name the commit, which git says.
@pytest.mark.process
def test_a_run_writes_rows_and_a_page_in_the_order_of_the_cells(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = {"rows": rows, "state_dir": tmp_path / "state"}
    run_experiment(Squares(Options(**options, only=("n=1",))))
    assert "\n1:1 1:1\n" in rows.with_suffix(".md").read_text()
    run_experiment(Squares(Options(**options, seeds=1)))
    assert [row["cell"]["n"] for row in Rows(rows).read()] == [1, 1, 0]
    assert "\n0:0 1:1 1:1\n" in rows.with_suffix(".md").read_text()


def test_the_page_leaves_out_other_cells_unless_it_shows_tries(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.append({"cell": {"n": 7, "seed": 0}, "result": {"square": 49}})
    report_experiment(Squares(Options(rows=rows.path)))
    assert "No cell of this profile is finished yet." in rows.path.with_suffix(".md").read_text()
    report_experiment(WithTries(Options(rows=rows.path, data=tmp_path)))
    assert "7:49" in rows.path.with_suffix(".md").read_text()
