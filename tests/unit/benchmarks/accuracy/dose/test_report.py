"""The page of `dose`: criteria against means that are computed by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.accuracy.dose.report import changes, not_computed, sections
from benchmarks.harness.figures import strip_chart

REAL = ("lungs_cxr", "retina_vessels")


def at(level: float, auto: float, early: float, *, failed: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "arms": {
            "global": level,
            "patients": 8,
            "auto": [auto, 0.0, 0.0],
            "by shift": [early - 0.001, 0.0, 0.0],
            "early": [early, 0.0, 0.0],
        },
        "cohorts": [
            {
                "slices": 4,
                "shift": 2.0,
                "dose": 0.5,
                "doses": [0.5, 0.25, 0.0],
                "checks": {},
                "failed": list(failed),
                "change": early,
            }
        ]
        * 2,
        "planted": [{"kind": "shuffled weights", "failed": ["agreement"], "change": -0.5}],
    }


def row(set_: str, site: str, seed: int, training: str, rungs: dict[str, Any], home: float) -> dict[str, Any]:
    cell = {"part": "served", "set": set_, "site": site, "seed": seed, "training": training}
    return {"cell": cell, "result": {"device": "cpu", "home": {"other": home}, "at": rungs}}


def rows() -> list[dict[str, Any]]:
    found = []
    for seed in (3, 4):
        for set_ in REAL:
            for site, three in (("a", 0.10), ("b", 0.02)):
                rungs = {
                    "0": at(0.9, 0.0, -0.004),
                    "3": at(0.6, three, 0.08),
                    # One seed's loss is averaged with the other's gain.
                    "speckle": at(0.5, -0.03 if seed == 3 else 0.02, 0.03, failed=("size gain",)),
                }
                found.append(row(set_, site, seed, "after", rungs, 0.9))
                before = {"0": at(0.9, 0, 0), "3": at(0.5, 0, 0), "speckle": at(0.3, 0, 0)}
                found.append(row(set_, site, seed, "before", before, 0.91))
    return found


def line(text: str, opening: str) -> list[str]:
    [found] = [line for line in text.splitlines() if line.startswith(f"| {opening}")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_criteria_are_means_over_hospitals_of_means_over_seeds() -> None:
    page = "\n".join(sections(rows(), ""))
    assert line(page, "1. lungs_cxr at severity 0")[1:] == ["+0.0", "yes", "+0.0", "yes"]
    # (10 + 2) / 2 in each set; the best arm without a gate has 8.
    assert line(page, "2. real sets at severity 3")[3:] == ["+6.0, best arm +8.0", "yes"]
    # (-3 + 2) / 2, not the worst seed.
    assert line(page, "4. no hospital below -1")[3:] == ["-0.5 (a of lungs_cxr, speckle)", "yes"]
    assert line(page, "5. planted")[3:] == ["0 of 24", "yes"]
    # Half of the candidates that gain, those behind speckle, are refused.
    assert line(page, "6. candidates that gain")[3:] == ["16 of 32", "**no**"]
    assert line(page, "7. training, severity 3")[1:] == ["+10.0", "yes"]
    assert line(page, "7. training, kinds that are not drawn")[1:] == ["+20.0", "yes"]
    assert line(page, "8. training, retina_vessels at severity 0")[1:] == ["+0.0", "yes"]
    assert line(page, "8. training, retina_vessels at home")[1:] == ["-1.0", "**no**"]


def test_only_the_usual_training_is_shown_in_detail() -> None:
    page = "\n".join(sections(rows(), ""))
    assert "## Served, before" in page
    assert "## Served, after" not in page


def test_a_criterion_without_rows_is_left_out() -> None:
    page = "\n".join(sections([each for each in rows() if each["cell"]["training"] == "before"], ""))
    assert "## Criteria of what is served" in page
    assert "## Criteria of the training" not in page
    assert "## Served, before" in page
    assert "## Served, after" not in page


def test_cells_of_the_first_dose_are_left_out() -> None:
    found = [each for each in rows() if each["cell"]["training"] == "after"]
    for each in found:
        if each["cell"]["seed"] == 3:
            for rung in each["result"]["at"].values():
                rung["cohorts"] = [{**cohort} for cohort in rung["cohorts"]]
                for cohort in rung["cohorts"]:
                    del cohort["doses"]
    page = "\n".join(sections(found, ""))
    assert line(page, "criterion") == ["criterion", "after", "met"]
    # Seed 4 alone gains 2 behind speckle; seed 3 alone loses 3.
    assert line(page, "4. no hospital below -1")[1:] == ["+0.0 (a of lungs_cxr, severity 0)", "yes"]


def test_kinds_of_shift_are_a_line_with_the_worst_hospital() -> None:
    after = [each for each in rows() if each["cell"]["training"] == "after"]
    page = "\n".join(sections(after, "")).split("## Served, after")[1]
    kinds = next(each for each in page.splitlines() if "lungs_cxr" in each and "seven kinds" in each)
    # Global, R, dose, then what `auto` changes: (-3 + 2) / 2 at both hospitals.
    assert [cell.strip() for cell in kinds.split("|")[3:7]] == ["50.0", "2.0", "0.50", "-0.5 (-0.5)"]


def test_a_figure_has_a_dot_for_each_hospital_and_seed() -> None:
    found = changes(rows())
    assert found["lungs_cxr"] == {"severity 0": [0.0] * 4, "severity 3": [0.0] * 4, "speckle": [0.0] * 4}
    svg = strip_chart(found, "points")
    assert all(f">{name}</text>" in svg for name in (*REAL, "severity 3", "speckle"))
    assert svg == strip_chart(found, "points")
    assert "![what `auto` changes](dose.svg)" in sections(rows(), "dose.svg")


def test_what_is_planned_and_has_no_row_is_listed_with_its_command() -> None:
    def cell(set_: str, site: str, seed: int) -> dict[str, Any]:
        return {"cell": {"part": "served", "training": "before", "set": set_, "site": site, "seed": seed}}

    rows = [cell("eyes", "A", 3), cell("eyes", "B", 3), cell("eyes", "A", 4)]
    planned = {("served", "before", set_): (3, 4, 5) for set_ in ("eyes", "lungs")}
    title, listed = not_computed(rows, planned, "run dose")
    assert title == "## Not computed yet"
    assert listed.splitlines() == [
        "- `served`, training before, eyes, seeds 4, 5:",
        "  `run dose --only part=served --only training=before --only set=eyes`",
        "- `served`, training before, lungs, seeds 3, 4, 5:",
        "  `run dose --only part=served --only training=before --only set=lungs`",
    ]
    assert not_computed(rows[:2], {("served", "before", "eyes"): (3,)}, "run dose") == []
