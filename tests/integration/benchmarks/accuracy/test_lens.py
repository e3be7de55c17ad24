"""A cell of `lens` on the phantom without batch norm, from training to what is served."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy.lens.experiment import INSTANCE, LensExperiment
from benchmarks.accuracy.lens.report import figure_of, sections
from benchmarks.harness.experiment import Options
from model_store.lens import STEPS

ABLATIONS = {f"{how} {step}" for how in ("only", "without") for step in STEPS}


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    state = tmp_path_factory.mktemp("state")
    experiment = LensExperiment(Options("smoke", data=state, state_dir=state, workers=0))
    cell = next(cell for cell in experiment.cells() if cell["set"] == INSTANCE)
    return {"cell": cell, "result": experiment.compute(cell, state / "work")}


def test_a_network_without_batch_norm_has_every_arm_but_the_dose(row: dict[str, Any]) -> None:
    at = row["result"]["at"]
    assert set(at) == {"0", "inverted"}
    for each in at.values():
        arms = {"global", "patients", "lens", "served", "best", "each scan"}
        assert set(each["arms"]) == arms | ABLATIONS
    assert row["cell"]["site"] not in row["result"]["own"]


def test_inverted_scans_are_put_right_as_a_cohort_and_one_by_one(row: dict[str, Any]) -> None:
    arms = row["result"]["at"]["inverted"]["arms"]
    assert arms["only polarity"][0] > 0.05
    assert arms["without polarity"][0] < arms["only polarity"][0]
    assert arms["each scan"][0] > 0.05
    assert all("polarity" in cohort["steps"] for cohort in row["result"]["at"]["inverted"]["cohorts"])


def test_what_is_served_is_one_of_the_arms(row: dict[str, Any]) -> None:
    for each in row["result"]["at"].values():
        served = {cohort["served"] for cohort in each["cohorts"]}
        assert served <= {"lens", "nothing"}
        if served == {"nothing"}:
            assert each["arms"]["served"] == [0.0, 0.0, 0.0]
        if served == {"lens"}:
            assert each["arms"]["served"] == each["arms"]["lens"]


def test_planted_cohorts_and_lenses_are_judged(row: dict[str, Any]) -> None:
    planted = row["result"]["at"]["0"]["planted"]
    kinds = {f"a {what} of {kind}" for what in ("cohort", "lens") for kind in ("noise", "smooth noise")}
    assert {each["kind"] for each in planted} == kinds
    assert row["result"]["at"]["inverted"]["planted"] == []


def test_the_page_has_the_criteria_and_says_what_lacks(row: dict[str, Any]) -> None:
    page = "\n".join(sections([row], {INSTANCE: 3}, "make it", "lens.svg"))
    assert "9. R of a member's own scans" in page
    assert "| each scan " in page
    assert "![what is served](lens.svg)" in page
    assert ">phantom, instance norm</text>" in figure_of([row])
    assert "make it --only set=phantom,?instance?norm" in page
