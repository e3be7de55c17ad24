from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.accuracy.inside.report import page, scores_of

METHOD = {"rounds": 2, "tau": 0.9}
SETTING = {"profile": "cpu", "size": 96, "folds": 2, "tuning_rounds": 5, "method": METHOD}


def _row(trained: str, seed: int, fold: int, dice: dict[str, Any], **method: Any) -> dict[str, Any]:
    cell = {"trained": trained, "seed": seed, "fold": fold, **SETTING, "method": {**METHOD, **method}}
    return {"cell": cell, "result": {"dice": dice}}


ROWS = [
    _row("federation", 0, 0, {"global": {"CS": {"a": 0.5}}, "personal": {"CS": {"a": 0.7}}}),
    _row("federation", 0, 1, {"global": {"CS": {"b": 0.6}}, "personal": {"CS": {"b": None}}}),
    _row("federation", 1, 0, {"global": {"CS": {"a": 0.7}}, "personal": {"CS": {"a": 0.8}}}),
    _row("federation", 1, 1, {"global": {"CS": {"b": 0.6}}, "personal": {"CS": {"b": 0.7}}}),
    _row("local-only", 0, 0, {"local-only": {"CS": {"a": 0.4}}}),
    _row("federation", 0, 0, {"global": {"CS": {"a": 0.5}}, "personal": {"CS": {"a": 0.1}}}, tau=0.5),
]


def _page(tmp_path: Path) -> str:
    rows = tmp_path / "inside.cpu.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    page(rows, SETTING, "python -m benchmarks.accuracy.inside.experiment")
    return (tmp_path / "inside.cpu.md").read_text(encoding="utf-8")


def test_folds_make_one_score_per_patient_and_seed() -> None:
    scores = scores_of(ROWS[:4])
    assert scores["global"][0] == {("CS", "a"): 0.5, ("CS", "b"): 0.6}
    assert scores["personal"][1] == {("CS", "a"): 0.8, ("CS", "b"): 0.7}


def test_means_spreads_and_paired_differences(tmp_path: Path) -> None:
    main, _, tries = _page(tmp_path).partition("## Try: tau = 0.5")
    lines = {line.split("|")[1].strip(): line for line in main.splitlines() if line.startswith("|")}
    # global: seed means 0.55 and 0.65; personal: 0.7 (b undefined) and 0.75
    assert "0.600 ± 0.071" in lines["CS"]
    assert "0.725 ± 0.035" in lines["CS"]
    assert "Left out as undefined: 1 values" in main
    # patient a: (0.2 + 0.1) / 2 over both seeds; b: 0.1 from the seed in which both are defined
    assert "+0.125 [" in lines["personal − global"]
    # local-only has one patient of one seed
    assert "+0.300 [+0.300, +0.300]" in lines["personal − local-only"]
    assert "-0.400" in tries


def test_page_says_how_much_is_finished_and_how_to_get_it(tmp_path: Path) -> None:
    text = _page(tmp_path)
    assert "4 of federation, 1 of local-only" in text
    assert "python -m benchmarks.accuracy.inside.experiment" in text
    assert "inside.cpu.jsonl" in text
