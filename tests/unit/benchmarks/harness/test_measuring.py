from __future__ import annotations

import resource
from functools import partial

import psutil

from benchmarks.harness.measuring import (
    alternated,
    high_water,
    milliseconds,
    quartiles,
)


def test_quartiles_of_seconds_and_as_a_page_has_them() -> None:
    found = quartiles([0.001, 0.002, 0.003, 0.004, 0.009, 0.01, 0.011])
    assert found == {"median": 0.004, "q1": 0.002, "q3": 0.01}
    assert milliseconds(found) == "4.0 [2.0, 10.0]"
    assert milliseconds(found, 0) == "4 [2, 10]"


def test_the_high_water_mark_lies_between_what_is_used_now_and_what_the_kernel_counts() -> None:
    now = psutil.Process().memory_info().rss
    # The kernel's other count may be higher: a forked process starts with its parent's.
    most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert 0.95 * now <= high_water() <= 1.05 * most


def test_steps_alternate_and_take_turns_to_go_first() -> None:
    order: list[str] = []
    found = alternated({name: partial(order.append, name) for name in "ab"}, 3, 1)
    assert "".join(order) == "abbaabba"
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 3, "b": 3}
