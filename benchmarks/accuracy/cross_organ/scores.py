"""Dice, false alarms and differences from the rows of `cross_organ`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import scores as tables
from benchmarks.harness.cells import Row
from benchmarks.harness.scores import Patient, Scores
from benchmarks.harness.tables import Interval, verdict

Value = Callable[..., float | None]
BySeed = Mapping[int, Mapping[Patient, float]]
# An interval of fewer patients at a site would describe the draw, not the site.
FEWEST_PATIENTS = 8
FEWEST_SEEDS = 3
_DRAWS = 10_000


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


def difference(first: BySeed, second: BySeed, sites: Sequence[str], seed: int = 0) -> Difference | None:
    """First - second, with sites weighted equally; None when a site has no patient with both.

    A patient's value is the mean over the seeds that test it, and one unit of the bootstrap.
    """
    pairs: dict[str, dict[str, list[float]]] = {site: {} for site in sites}
    each = []
    for number in sorted(first.keys() & second.keys()):
        own: dict[str, list[float]] = {site: [] for site in sites}
        for (site, patient), value in first[number].items():
            if site in own and (site, patient) in second[number]:
                found = value - second[number][site, patient]
                own[site].append(found)
                pairs[site].setdefault(patient, []).append(found)
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


def dice_scores(rows: Sequence[Row], place: str = "inside", budget: str = "") -> Scores:
    """Mean Dice of every patient with a tumour, by arm; `outside`, after training on `budget` images."""
    return _scores(rows, place, budget, _dice)


def alarm_scores(rows: Sequence[Row]) -> Scores:
    """The share of false alarms in every patient's images without a tumour."""
    return _scores(rows, "inside", "", _alarms)


def _dice(dice: float | None, *_: int) -> float | None:
    return dice


def _alarms(_dice: float | None, _bearing: int, alarms: int, empty: int) -> float | None:
    return alarms / empty if empty else None


def _scores(rows: Sequence[Row], place: str, budget: str, value: Value) -> Scores:
    scores: Scores = {}
    for row in rows:
        for arm, sites in row["result"][place].items():
            for site, found in sites.items():
                patients = found.get(budget, {}) if place == "outside" else found
                values = {patient: value(*numbers) for patient, numbers in patients.items()}
                defined = {patient: v for patient, v in values.items() if v is not None}
                if defined:
                    tables.add(scores, arm, row["cell"]["seed"], site, defined)
    return scores
