"""Cells of `review` on small phantoms, from the command line to the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.accuracy.lens.experiment import INSTANCE
from benchmarks.accuracy.lens.hospital import Cohort, Trained, scores_of
from benchmarks.accuracy.outside.federation import PHANTOM
from benchmarks.accuracy.review.answers import answered, oddness
from benchmarks.accuracy.review.experiment import Review
from benchmarks.accuracy.review.hospital import SCALE
from benchmarks.harness.experiment import Options

OPTIONS = ("--profile", "smoke", "--set", "phantoms=5", "--only", "site=aster", "--workers", "0")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cells were computed there."""
    folder = tmp_path_factory.mktemp("state")
    places = ("--data", folder, "--rows", folder / "review.smoke.jsonl", "--state-dir", folder)
    run = CliRunner().invoke(app, ["run", "review", *OPTIONS, *map(str, places)])
    assert run.exit_code == 0, run.output
    return folder


def test_every_answer_has_its_signals_and_no_name(state: Path) -> None:
    text = (state / "review.smoke.jsonl").read_text()
    for row in map(json.loads, text.splitlines()):
        result, has_norms = row["result"], row["cell"]["set"] == PHANTOM
        assert {name: len(each["dice"]) for name, each in result["outside"].items()} == {"0": 5, "3": 5}
        assert {*result["home"]} == {*result["members"]} == {"birch", "cedar"}
        for tables in result["members"].values():
            assert len(tables) == 7
        for each in [*result["outside"].values(), *result["home"]["birch"].values()]:
            known = {name for name, values in each.items() if None not in values}
            norms = {"R", "half", "statistics"}
            assert known == each.keys() - (set() if has_norms else norms)
            shares = ("dice", "sdc", "entropy", "dose", *(("half", "statistics") if has_norms else ()))
            assert all(0 <= value <= SCALE for name in shares for value in each[name])


def test_the_page_ranks_every_signal_and_names_its_choice(state: Path) -> None:
    page = (state / "review.smoke.md").read_text()
    section = page.split("\n## Hospitals from outside\n")[1].split("The same of dosed")[0]
    header, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line
    ]
    found = {line[0]: [float(cell.split()[0]) for cell in line[1:] if cell] for line in lines}
    assert header == ["signal", PHANTOM, INSTANCE]
    assert {"oracle", "sdc", "entropy", "dose", "free"} < found.keys()
    for shares in found.values():
        assert all(share <= best for share, best in zip(shares, found["oracle"], strict=False))
    assert (state / "review.smoke.svg").exists()
    assert re.search(r"^`[\w, ]+`\. What each signal finds", page, re.MULTILINE)


def test_scored_is_what_is_answered(state: Path) -> None:
    experiment = Review(Options("smoke", state, state_dir=state, settings=("phantoms=5",), workers=0))
    run = experiment.run_of(PHANTOM)("aster", 31)
    trained = Trained.of(run, experiment.folder_of(PHANTOM) / "runs" / run.id, 0)
    cases = experiment.federation(PHANTOM).site("aster").cases
    cohort = Cohort.load(cases, trained.task, trained.reference, None)
    answers = answered(trained.network(), cohort.data)
    assert {name: each.dice for name, each in answers.items()} == scores_of(trained.network(), cohort.data)
    # The middle one of three equals the median.
    some = sorted(answers.values(), key=lambda each: each.logs[0, 0])[:3]
    assert oddness(some[1], some)[0] == 0
