"""Ranks of answers, and alarms in words."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime

import numpy as np
import pytest

from locum.answers import Alarm, Observation, ObservedLabel
from locum.commands.terminal import aligned
from locum.commands.watching import in_words, rank, ranked
from service.observation.review import _rank

AT = datetime(2026, 1, 5, tzinfo=UTC)


def observed(number: int, version: str, **confidences: float) -> Observation:
    labels = {name: ObservedLabel(value, 9, None, 1, False) for name, value in confidences.items()}
    return Observation(number, AT, "organ", version, f"r{number}", "http", "s", None, None, (), labels)


def test_rank_is_the_service_s() -> None:
    # One decimal: many are equal.
    values = np.random.default_rng(0).uniform(size=60).round(1).tolist()
    for place, own in enumerate(values):
        others = deque([*values[:place], *values[place + 1 :]])
        assert rank(own, values) == _rank(others, own)
    assert rank(0.5, [0.5] * 20) is None
    assert rank(0.5, [0.5] * 21) == 0.5


def test_least_sure_label_ranks_an_answer_and_versions_are_apart() -> None:
    # Of version `a` the liver is never sure, and the spleen seldom unsure.
    a = [observed(n, "a", liver=0.1 + n / 1000, spleen=0.9 - n / 1000) for n in range(30)]
    b = [observed(100 + n, "b", liver=0.9) for n in range(5)]
    found = ranked([*a, *b])
    assert [(each.answer.id, each.label, each.rank) for each in found[:2]] == [
        (0, "liver", 0),
        (29, "spleen", 0),
    ]
    assert {each.rank for each in found[-5:]} == {None}
    assert [each.answer.id for each in found[-5:]] == [100, 101, 102, 103, 104]


def test_answer_without_labels_has_no_rank() -> None:
    (found,) = ranked([observed(1, "a")])
    assert (found.label, found.rank) == (None, None)


@pytest.mark.parametrize(
    ("stream", "up", "words"),
    [
        ("silence", None, "nothing arrives"),
        ("warned", True, "the guard warns more often"),
        ("no liver", True, "more answers have no liver"),
        ("volume of liver", False, "volume of liver is lower"),
        ("shift", True, "shift is higher"),
    ],
)
def test_alarm_is_told_in_words(stream: str, up: bool | None, words: str) -> None:
    assert in_words(Alarm(1, stream, AT, AT, up)) == words


def test_rows_are_aligned_and_move_no_cursor() -> None:
    assert aligned([("a", "b\x1b[2J"), ("long", "x\ny")]) == ["a     b[2J", "long  x y"]
