"""The pause before an embedded worker is started again."""

from __future__ import annotations

from service.runtime.embedded_worker import Pauses


def test_pause_doubles_after_short_lived_workers() -> None:
    pauses = Pauses()
    # Importing alone takes seconds, so that seconds of life say nothing.
    assert [pauses.after(12.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_pause_is_reset_after_a_long_lived_worker() -> None:
    pauses = Pauses()
    for _ in range(5):
        pauses.after(0.5)
    assert [pauses.after(age) for age in (3600.0, 5.0, 5.0)] == [1, 2, 4]
