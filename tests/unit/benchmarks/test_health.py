"""The load of the benchmark of health."""

from __future__ import annotations

from benchmarks.cost.health import LEARNS
from personalization.test_time.config import AdaptationConfig


def test_jobs_of_the_load_learn_until_they_are_cancelled() -> None:
    assert AdaptationConfig(**LEARNS).passes == LEARNS["epochs"]
