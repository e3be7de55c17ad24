"""Tables of Dice per patient over arms, seeds and sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.tables import Interval, verdict

Patient: TypeAlias = tuple[str, str]  # site and name
BySeed: TypeAlias = Mapping[int, Mapping[Patient, float]]
# arm -> seed -> patient -> Dice; an undefined Dice is NaN
Scores: TypeAlias = dict[str, dict[int, dict[Patient, float]]]
# An interval of fewer patients at a site would describe the draw, not the site.
FEWEST_PATIENTS = 8
FEWEST_SEEDS = 3
_DRAWS = 10_000


def sites_of(scores: Scores) -> list[str]:
    """Every site once, sorted."""
    return sorted({site for arm in scores.values() for seed in arm.values() for site, _ in seed})


def count_patients(scores: Scores) -> int:
    """The number of patients that any arm was tested on."""
    return len({u for arm in scores.values() for seed in arm.values() for u in seed})


def site_mean(scores: Mapping[Patient, float], sites: Sequence[str]) -> float:
    """Mean over patients, then over sites; NaN where there is none."""
    by_site = ([v for (own, _), v in scores.items() if own == site] for site in sites)
    return _average([_average(values) for values in by_site])


def pair(first: float, second: float) -> tuple[float, float]:
    """Two Dice of one patient, to be compared.

    A Dice is undefined (NaN) where there is no target and none is found. Beside the 0 of a network that finds
    one there, it counts as 1; where both are undefined they stay so.
    """
    if math.isnan(first) == math.isnan(second):
        return first, second
    return (1.0, second) if math.isnan(first) else (first, 1.0)


@dataclass(frozen=True)
class Difference:
    """First - second of two arms: the mean over sites of the mean over patients, and that of each seed.

    `interval` is 95 %, paired bootstrap over patients, drawn within sites; `fewest` is how many patients the
    site with the fewest has.
    """

    interval: Interval
    each: tuple[float, ...]
    fewest: int

    def __str__(self) -> str:
        """The difference with its interval, without it for too few patients."""
        found = self.interval
        return str(found) if self.fewest >= FEWEST_PATIENTS else f"{found.mean:+.3f}"

    @property
    def verdict(self) -> str:
        """The verdict of `tables`, or the reason why there is none."""
        if self.fewest < FEWEST_PATIENTS:
            return "too few patients"
        if len(self.each) < FEWEST_SEEDS:
            return "too few seeds"
        return verdict(self.interval, self.each)


def difference_of_sites(
    first: BySeed, second: BySeed, sites: Sequence[str], seed: int = 0
) -> Difference | None:
    """First - second, with sites weighted equally; None when a site has no patient with both.

    A patient's value is the mean over the seeds that test it, and one unit of the bootstrap.
    """
    pairs: dict[str, dict[str, list[float]]] = {site: {} for site in sites}
    each = []
    for number in sorted(first.keys() & second.keys()):
        own: dict[str, list[float]] = {site: [] for site in sites}
        for (site, patient), value in first[number].items():
            if site in own and (site, patient) in second[number]:
                one, other = pair(value, second[number][site, patient])
                if math.isfinite(one):
                    own[site].append(one - other)
                    pairs[site].setdefault(patient, []).append(one - other)
        if all(own.values()):
            each.append(float(np.mean([np.mean(values) for values in own.values()])))
    if not all(pairs.values()):
        return None
    units = [np.array([np.mean(values) for values in by.values()]) for by in pairs.values()]
    draw = np.random.default_rng(seed)
    drawn = np.mean([_drawn_means(values, draw) for values in units], axis=0)
    low, high = np.quantile(drawn, [0.025, 0.975])
    mean = float(np.mean([values.mean() for values in units]))
    interval = Interval(mean, float(low), float(high), sum(map(len, units)))
    return Difference(interval, tuple(each), min(map(len, units)))


def _drawn_means(values: NDArray[np.float64], draw: np.random.Generator) -> NDArray[np.float64]:
    """Means of bootstrap samples of the values."""
    means: NDArray[np.float64] = values[draw.integers(len(values), size=(_DRAWS, len(values)))].mean(axis=1)
    return means


def _average(values: Sequence[float]) -> float:
    """Mean of the defined values; NaN when there is none."""
    defined = [value for value in values if math.isfinite(value)]
    return float(np.mean(defined)) if defined else math.nan
