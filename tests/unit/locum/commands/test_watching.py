"""Alarms in words, and rows of a table."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from locum.answers import Alarm
from locum.commands.terminal import aligned
from locum.commands.watching import in_words

AT = datetime(2026, 1, 5, tzinfo=UTC)


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
