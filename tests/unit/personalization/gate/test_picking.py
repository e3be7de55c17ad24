"""The gate of a pick: every check by itself, at its limit and beyond."""

from __future__ import annotations

from dataclasses import replace

import pytest

from personalization.gate.picking import PickEvidence, PickThresholds, judge_pick

LIMITS = PickThresholds()
JUST = PickEvidence(
    stability=LIMITS.stability,
    information=LIMITS.information,
    statistics_distance=LIMITS.statistics_distance,
    source_warnings=LIMITS.source_warnings,
)


def test_at_every_limit_it_passes() -> None:
    verdict = judge_pick(JUST)
    assert verdict.passed
    assert [check.limit for check in verdict.checks] == [check.value for check in verdict.checks]


@pytest.mark.parametrize(
    ("name", "worse"),
    [("stability", -0.01), ("information", -0.01), ("statistics_distance", 0.01), ("source_warnings", 0.01)],
)
def test_beyond_one_it_does_not_and_says_by_which(name: str, worse: float) -> None:
    for value in (getattr(JUST, name) + worse, float("nan")):
        verdict = judge_pick(replace(JUST, **{name: value}))
        assert not verdict.passed
        assert [check.name for check in verdict.checks if not check.passed] == [name]


def test_what_was_not_measured_does_not_count() -> None:
    verdict = judge_pick(replace(JUST, stability=None))
    assert verdict.passed
    assert verdict.to_json()["checks"][0]["value"] is None
