"""The pause before an embedded worker is started again."""

from __future__ import annotations

from service.runtime.embedded_worker import Pauses


def test_workers_that_do_not_live_for_long_are_started_ever_more_rarely() -> None:
    pauses = Pauses()
    # Importing alone takes seconds, so that seconds of life say nothing.
    assert [pauses.after(12.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_one_that_lived_for_long_is_started_at_once() -> None:
    pauses = Pauses()
    for _ in range(5):
        pauses.after(0.5)
    assert [pauses.after(age) for age in (3600.0, 5.0, 5.0)] == [1, 2, 4]
