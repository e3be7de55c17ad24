"""The page of `unseen`: what each gate judged stands apart."""

from __future__ import annotations

from typing import Any

from benchmarks.accuracy.unseen.report import GATE_CHANGED, figure_of, sections


def served(seed: int, change: float, *, passed: bool) -> dict[str, Any]:
    tried = {"recipe": "ladder", "predicted": 0.02, "bound": 0.0, "failed": [] if passed else ["giant"]}
    at = {
        "arms": {"global": 0.7, "patients": 4, "auto": [change], "ladder": [0.04], "shuffled 0": [0.0]},
        "cohorts": [{"chosen": "ladder", "passed": passed, "tried": [{**tried, "change": 0.04}]}],
        "planted": [{**tried, "change": -0.2}],
    }
    cell = {"set": "lungs_cxr", "site": "JSRT", "seed": seed, "part": "served"}
    return {"cell": cell, "result": {"at": {"3": at}}}


def line(text: str, beginning: str) -> list[str]:
    (found,) = [each for each in text.splitlines() if each.startswith(f"| {beginning}")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_rows_of_one_gate_have_one_column() -> None:
    text = "\n".join(sections([served(0, 0.0, passed=False), served(1, 0.0, passed=False)], "x.svg"))
    assert line(text, "criterion") == ["criterion", "found", "met"]
    assert line(text, "2. real sets at severity 3")[1:] == ["+0.0", "**no**"]


def test_seeds_of_the_gate_before_are_not_averaged_with_those_of_todays() -> None:
    rows = [served(GATE_CHANGED - 1, 0.0, passed=False), served(GATE_CHANGED, 0.04, passed=True)]
    text = "\n".join(sections(rows, "x.svg"))
    assert line(text, "2. real sets at severity 3")[1:] == ["+4.0", "yes", "+0.0", "**no**"]
    for which in ("chosen by the playbook", "every one"):
        found = line(text, f"5. more than half of the candidates that gain a point are accepted: {which}")
        assert found[1:] == ["1 of 1", "yes", "0 of 1", "**no**"]
    assert line(text, "5. no planted")[1:] == ["1 of 1 accepted", "**no**", "0 of 1 accepted", "yes"]
    assert "## Outside by today's gate, seed 2: what is served" in text
    assert "## Outside by the gate before" not in text
    figure = figure_of(rows)
    assert "severity 3 by today's gate, seed 2" in figure
    assert "severity 3 by the gate before, seed 1" in figure
