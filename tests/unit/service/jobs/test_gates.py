"""What a verdict by masks changes in a gate, and what it leaves."""

from __future__ import annotations

from typing import Any

import pytest

from service.jobs.gates import decided, gate_with_masks, words

VERDICT = {
    "decision": "accepts",
    "masks": 8,
    "patients": 40,
    "change": 0.031,
    "at_least": 0.012,
    "at_most": 0.05,
}


def gate(*passed: bool) -> dict[str, Any]:
    checks = [{"name": f"check {i}", "passed": value} for i, value in enumerate(passed)]
    return {"passed": all(passed), "checks": checks, "summary": ["said"]}


@pytest.mark.parametrize(
    ("low", "high", "decision"),
    [(0.0, 0.1, "accepts"), (-0.001, 0.1, "undecided"), (-0.2, -0.001, "refuses"), (-0.1, 0.0, "undecided")],
)
def test_only_a_bound_on_one_side_of_0_decides(low: float, high: float, decision: str) -> None:
    assert decided(low, high) == decision


@pytest.mark.parametrize(
    ("decision", "failed", "passed"),
    [
        ("accepts", True, True),
        ("refuses", False, False),
        ("undecided", True, False),
        ("undecided", False, True),
    ],
)
def test_masks_decide_what_the_checks_could_not(decision: str, failed: bool, passed: bool) -> None:
    before = gate(True, not failed)
    found = gate_with_masks(before, {**VERDICT, "decision": decision})
    assert found["passed"] is passed
    assert found["masks"]["decision"] == decision
    assert (found["checks"], found["summary"]) == (before["checks"], before["summary"])
    assert gate_with_masks(found, None) == before


def test_later_verdict_replaces_the_earlier_one() -> None:
    accepted = gate_with_masks(gate(False), VERDICT)
    undecided = gate_with_masks(accepted, {**VERDICT, "decision": "undecided"})
    assert (accepted["passed"], undecided["passed"]) == (True, False)


def test_words_say_the_change_the_bound_and_the_decision() -> None:
    said = words(VERDICT)
    for part in ("Masks of 8 scans", "40 patients", "+3.1 points", "at least +1.2", "they accept"):
        assert part in said
    assert "at most +5.0" in words({**VERDICT, "decision": "refuses"})
    assert "from +1.2 to +5.0" in words({**VERDICT, "decision": "undecided"})
