"""The page of `dose`: criteria against means that are computed by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.accuracy.dose.report import changes_by_severity, not_computed, sections
from training.report.charts import forest_chart

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
            {"slices": 4, "shift": 2.0, "dose": 0.5, "checks": {}, "failed": list(failed), "change": early}
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
    page = "\n".join(sections(rows(), {}))
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


def test_a_criterion_without_rows_is_left_out() -> None:
    page = "\n".join(sections([each for each in rows() if each["cell"]["training"] == "before"], {}))
    assert "## Criteria of what is served" in page
    assert "## Criteria of the training" not in page
    assert "## Served, before" in page
    assert "## Served, after" not in page


def test_cells_that_the_amended_gate_judged_have_a_table_of_their_own() -> None:
    found = rows()
    for each in found:
        if each["cell"]["seed"] == 4:
            for rung in each["result"]["at"].values():
                rung["cohorts"] = [{**cohort, "checks": {"shift_left": 0.5}} for cohort in rung["cohorts"]]
            if each["cell"]["set"] == REAL[0]:
                each["result"]["amendment"] = 8
    page = "\n".join(sections(found, {}))
    tables = page.split("## Training after, first dose: the gate ")[1:]
    assert [table.splitlines()[0] for table in tables] == [
        "before the fourth amendment",
        "since the fourth amendment",
        "since the eighth amendment",
    ]
    # Two sets, two hospitals, three rungs, two cohorts by the first gate; those behind speckle are refused.
    accepted = [line(table, "what `auto`")[1] for table in tables]
    assert accepted == ["16 of 24", "8 of 12", "8 of 12"]


def test_the_doses_before_and_since_the_seventh_amendment_are_apart() -> None:
    found = [each for each in rows() if each["cell"]["training"] == "after"]
    for each in found:
        if each["cell"]["seed"] == 4:
            for rung in each["result"]["at"].values():
                rung["cohorts"] = [{**cohort, "doses": [0.5, 0.25, 0.0]} for cohort in rung["cohorts"]]
    page = "\n".join(sections(found, {}))
    assert line(page, "criterion") == ["criterion", "after", "met", "after, first dose", "met"]
    # Seed 4 alone gains 2 behind speckle; seed 3 alone loses 3.
    assert line(page, "4. no hospital below -1")[1:] == [
        "+0.0 (a of lungs_cxr, severity 0)",
        "yes",
        "-3.0 (a of lungs_cxr, speckle)",
        "**no**",
    ]


def test_a_figure_has_each_hospital_by_the_dose_of_now() -> None:
    found = rows()
    assert changes_by_severity(found) == {}
    for each in found:
        for rung in each["result"]["at"].values():
            rung["cohorts"] = [{**cohort, "doses": [0.5, 0.25, 0.0]} for cohort in rung["cohorts"]]
    drawn = {severity: forest_chart(own) for severity, own in changes_by_severity(found).items()}
    assert list(drawn) == ["0", "3"]
    assert all(f">{set_}, {site}</text>" in drawn["3"] for set_ in REAL for site in "ab")
    page = "\n".join(sections(found, {"3": "three.svg"}))
    assert "![severity 3](three.svg)" in page


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
