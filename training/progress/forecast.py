"""Forecast how long a run takes, before its first round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from training.engine.device import default_workers
from training.engine.pool import spread
from training.run import Run


@runtime_checkable
class Forecasts(Protocol):
    """A method with few and long rounds, which it forecasts. For other methods the first round is enough."""

    def forecast(self, images: int, sites: int, threads: int) -> Mapping[str, float]:
        """Measure this machine for a few seconds; returns the seconds of one round, or step, by phase.

        `images` are the training images that one process goes through in a round, `sites` the sites of the
        run, `threads` those of a step.
        """


def expected_seconds(job: Run, workers: int | None) -> Mapping[str, float]:
    """Seconds of one round by phase, as the method forecasts them for this machine's CPU; empty if it cannot.

    `workers` is that of `training.run.execute`. Raises as `Run.specs`.
    """
    algorithm, settings = job.algorithm(), job.settings
    if not isinstance(algorithm, Forecasts) or settings.device != "cpu":
        return {}
    specs = job.specs()
    workers = default_workers(settings.device) if workers is None else workers
    worker_of = spread(specs, max(1, min(workers, len(specs))))
    images: Counter[int] = Counter()
    for site in job.sites():
        images[worker_of[site.name]] += site.counts.files["train"]
    return algorithm.forecast(max(images.values()), len(specs), settings.threads)
