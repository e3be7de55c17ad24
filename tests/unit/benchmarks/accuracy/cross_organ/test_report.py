from __future__ import annotations

from typing import Any

from benchmarks.accuracy.cross_organ.arms import (
    FEDAVG,
    LONG_FEDAVG,
    LONG_WHOLE,
    NO_BANK,
    SCRATCH,
    TRAINED,
    WHOLE,
    WHOLE_PBL,
)
from benchmarks.accuracy.cross_organ.experiment import PROFILES, cells_of
from benchmarks.accuracy.cross_organ.plateau import controls, plateau
from benchmarks.accuracy.cross_organ.report import comparable, inside, keep, outside, twice_as_long
from benchmarks.accuracy.cross_organ.scores import alarm_scores, dice_scores

EIGHT = "abcdefgh"


def _row(arm: str, seed: int, **found: Any) -> dict[str, Any]:
    return {"cell": {"seed": seed}, "result": {"inside": {arm: found}, "outside": {}, "curves": {}}}


def _same(dice: float, patients: str = EIGHT) -> dict[str, list[float]]:
    return {patient: [dice, 1, 0, 0] for patient in patients}


def test_scores_are_of_patients_who_have_them() -> None:
    rows = [_row(WHOLE, 2, east={"a": [0.5, 3, 1, 4], "b": [None, 0, 0, 2], "c": [0.25, 1, 0, 0]})]
    assert dice_scores(rows) == {WHOLE: {2: {("east", "a"): 0.5, ("east", "c"): 0.25}}}
    assert alarm_scores(rows) == {WHOLE: {2: {("east", "a"): 0.25, ("east", "b"): 0.0}}}


def _kept(*by_seed: float, patients: str = EIGHT) -> str:
    """What is said of the bank by differences at two sites, one for each seed."""
    rows = []
    for seed, found in enumerate(by_seed):
        own = "".join(f"{patient}{seed}" for patient in patients)
        for arm, dice in ((WHOLE, 0.5 + found), (NO_BANK, 0.5)):
            names = {name: [dice, 1, 0, 0] for name in (own[i : i + 2] for i in range(0, len(own), 2))}
            rows.append(_row(arm, seed, east=names, west=names))
    return keep(dice_scores(rows))[1]


def test_a_part_earns_its_keep_only_where_interval_and_every_seed_agree() -> None:
    said = _kept(0.2, 0.2, 0.2)
    assert "The bank, the attention being left, earns its keep: +0.200 [+0.200, +0.200] Dice" in said
    assert "(by seed +0.200, +0.200, +0.200)" in said
    assert "does harm: -0.200" in _kept(-0.2, -0.2, -0.2)
    assert "is not shown to help: +0.000" in _kept(0, 0, 0)
    # Its interval leaves zero out, and one training disagrees.
    assert "is not shown to help: +0.123 [+0.0" in _kept(0.2, 0.2, -0.03)
    assert "does harm" not in _kept(-0.2, -0.2, 0.03)


def test_few_patients_give_no_interval_and_few_seeds_no_word() -> None:
    few = _kept(0.2, 0.2, 0.2, patients="ab")
    assert "cannot be judged (too few patients): +0.200 Dice" in few
    assert "[" not in few
    assert "earns its keep" in _kept(0.2, 0.2, 0.2, patients="abc")  # nine over three seeds
    assert "cannot be judged (too few seeds): +0.200 [" in _kept(0.2, 0.2)


def test_the_differences_are_of_sites_and_their_mean() -> None:
    rows = [
        _row(arm, seed, east=_same(east, EIGHT), west=_same(west, "ab"))
        for arm, east, west in ((WHOLE, 0.6, 0.9), (FEDAVG, 0.5, 0.5))
        for seed in range(3)
    ]
    text = "\n".join(inside(rows))
    line = next(line for line in text.splitlines() if line.startswith(f"| {WHOLE} − {FEDAVG}"))
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells == ["+0.100 [+0.100, +0.100]", "+0.400", "+0.250", "too few patients"]
    assert "Patients tested, over all seeds: 8 of east, 2 of west" in text


def _outside_row(arm: str, seed: int, breast: dict[str, Any], brain: dict[str, Any]) -> dict[str, Any]:
    cell = {"seed": seed, "budgets": [5], "joining": {"steps": 60, "batch": 4}}
    found = {arm: {"breast_dce_mri": breast, "brain_mri_t1ce": brain}}
    return {"cell": cell, "result": {"inside": {}, "outside": found, "curves": {}}}


def test_breast_is_zero_shot_only_and_the_page_says_why() -> None:
    rows = [
        _outside_row(arm, seed, zero, {**zero, "5": _same(dice)})
        for arm, dice, zero in (
            (WHOLE, 0.7, {"0": _same(0.2, "abcd")}),
            (WHOLE_PBL, 0.7, {}),
            (SCRATCH, 0.6, {}),
        )
        for seed in range(3)
    ]
    brain, breast = "\n".join(outside(rows)).split("### breast_dce_mri")
    assert "22 show one tumour of one patient" in brain
    assert "rests on brain_mri_t1ce alone" in brain
    assert "`FedOAP, perturbed loss`, which joins as the product does" in brain
    assert "+0.100 [+0.100, +0.100] helps" in brain
    assert "5 images |" in brain
    assert "Patients tested, over all seeds: 4 of breast_dce_mri." in breast
    assert "images |" not in breast
    assert SCRATCH not in breast
    assert "[" not in breast


def _curves(arm: str, seed: int = 0, **sites: Any) -> dict[str, Any]:
    return {"cell": {"seed": seed}, "result": {"inside": {}, "outside": {}, "curves": {arm: sites}}}


def test_a_rise_is_of_one_stage_and_the_largest_over_sites() -> None:
    rising = {"1": [[0, 0.0], [4, 0.3], [8, 0.5], [10, 0.6]], "2": [[1, 0.9], [2, 0.65]]}
    falling = {"1": [[0, 0.0], [4, 0.9], [8, 0.9], [10, 0.4]], "2": [[1, 0.4], [2, 0.2]]}
    shown = plateau([_curves(WHOLE, east=rising, west=falling), _curves(FEDAVG, east={"1": rising["1"]})])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown[2].splitlines()]
    # Means over sites would be -0.200 and -0.075.
    assert [WHOLE, "0.425 ± 0.318", "+0.100 (east)", "+0.050 (east)"] in lines
    assert [FEDAVG, "0.600", "+0.100 (east)", "–"] in lines
    assert "nothing here is called a plateau" in shown[3]


def test_a_plateau_is_where_twice_the_rounds_gain_nothing_anywhere() -> None:
    def said(gain: float) -> list[str]:
        base = {"1": [[0, 0.1], [4, 0.7]], "2": [[1, 0.8]]}
        rows = [
            _curves(WHOLE, east=base, west=base),
            # Another seed, which has no control.
            _curves(WHOLE, 1, east={"1": [[0, 0.1], [4, 0.2]]}),
            _curves(LONG_WHOLE, east={**base, "2": [[1, 0.8 + gain]]}, west={**base, "2": [[1, 0.6]]}),
            _curves(LONG_FEDAVG, east=base),
        ]
        lines = controls(rows)[1].splitlines()
        return [cell.strip() for cell in lines[2].split("|")[1:-1]]

    assert said(0.009) == [LONG_WHOLE, "+0.009", "-0.200", "-0.096", "a plateau"]
    assert said(0.011) == [LONG_WHOLE, "+0.011", "-0.200", "-0.095", "no plateau"]


def test_controls_are_tested_on_the_seeds_that_have_them() -> None:
    rows = [_row(WHOLE, seed, east=_same(dice)) for seed, dice in enumerate((0.5, 0.6, 0.9))]
    assert twice_as_long(rows) == []
    rows += [_row(LONG_WHOLE, seed, east=_same(dice)) for seed, dice in enumerate((0.55, 0.75))]
    rows += [_row(LONG_FEDAVG, seed, east=_same(0.25)) for seed in range(2)]
    lines = twice_as_long(rows)[1].splitlines()[2:]
    shown = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines}
    assert shown == {
        f"{LONG_WHOLE} − {WHOLE}": "+0.100 [+0.100, +0.100]",
        f"{LONG_WHOLE} − {LONG_FEDAVG}": "+0.400 [+0.400, +0.400]",
    }


def test_seeds_that_some_arms_have_not_finished_are_not_counted() -> None:
    cells = cells_of("smoke", PROFILES["smoke"], "these patients")
    seconds = [{**cell, "seed": 1} for cell in cells if cell["trained"] in TRAINED]
    rows = [{"cell": cell} for cell in cells]
    assert comparable(rows, cells) == rows
    assert comparable([*rows, {"cell": seconds[0]}], [*cells, *seconds]) == rows
    # Controls are no arms: a seed is whole without them.
    arms = rows[: len(TRAINED)]
    assert comparable([*arms, {"cell": seconds[0]}], [*cells, *seconds]) == arms
    # A try of one arm shows what there is.
    assert comparable(rows[1:3], cells) == rows[1:3]
