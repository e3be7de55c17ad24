"""Dice and false alarms from the rows of `cross_organ`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness import scores as tables
from benchmarks.harness.cells import Row
from benchmarks.harness.scores import Scores

Value = Callable[..., float | None]


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
