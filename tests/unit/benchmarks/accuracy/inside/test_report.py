from __future__ import annotations

from typing import Any

from benchmarks.accuracy.inside.report import scores_of, sections

METHOD = {"rounds": 2, "tau": 0.9}
SETTING = {"profile": "cpu", "size": 96, "folds": 2, "tuning_rounds": 5, "method": METHOD}


def _row(trained: str, seed: int, fold: int, dice: dict[str, Any], **method: Any) -> dict[str, Any]:
    cell = {"trained": trained, "seed": seed, "fold": fold, **SETTING, "method": {**METHOD, **method}}
    return {"cell": cell, "result": {"dice": dice}}


ROWS = [
    _row("federation", 0, 0, {"global": {"CS": {"a": 0.5}}, "personal": {"CS": {"a": 0.7}}}),
    _row("federation", 0, 1, {"global": {"CS": {"b": 0.0}}, "personal": {"CS": {"b": None}}}),
    _row("federation", 1, 0, {"global": {"CS": {"a": 0.7}}, "personal": {"CS": {"a": 0.8}}}),
    _row("federation", 1, 1, {"global": {"CS": {"b": 0.6}}, "personal": {"CS": {"b": 0.7}}}),
    _row("local-only", 0, 0, {"local-only": {"CS": {"a": 0.4}}}),
    _row("federation", 0, 0, {"global": {"CS": {"a": 0.5}}, "personal": {"CS": {"a": 0.1}}}, tau=0.5),
]


def _page() -> str:
    return "\n\n".join(sections(ROWS, SETTING))


def test_folds_make_one_score_per_patient_and_seed() -> None:
    scores = scores_of(ROWS[:4])
    assert scores["global"][0] == {("CS", "a"): 0.5, ("CS", "b"): 0.0}
    assert scores["personal"][1] == {("CS", "a"): 0.8, ("CS", "b"): 0.7}


def test_means_spreads_and_paired_differences() -> None:
    main, _, tries = _page().partition("## Try: tau = 0.5")
    lines = {line.split("|")[1].strip(): line for line in main.splitlines() if line.startswith("|")}
    # global: seed means 0.25 and 0.65; personal: 0.7 (b undefined) and 0.75
    assert "0.450 ± 0.283" in lines["CS"]
    assert "0.725 ± 0.035" in lines["CS"]
    assert "Left out as undefined: 1 values" in main
    # patient a: (0.2 + 0.1) / 2 over both seeds; b: (1 + 0.1) / 2, since the global model invented a target
    assert "+0.350 [" in lines["personal − global"]
    # local-only has one patient of one seed
    assert "+0.300 [+0.300, +0.300]" in lines["personal − local-only"]
    assert "-0.400" in tries


def test_page_says_how_much_is_finished() -> None:
    assert "4 of federation, 1 of local-only" in _page()
