"""Dice per arm, seed and patient from the rows of `outside`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import scores as tables
from benchmarks.harness.cells import Row
from benchmarks.harness.scores import Scores

GLOBAL, BAKED = "global (running)", "global (baked)"


def scores_of(rows: Sequence[Row], mode: str) -> Scores:
    """Every patient's Dice by arm and seed: the arms of one mode, and those that learn nothing."""
    scores: Scores = {}
    for row in rows:
        cell, dice = row["cell"], row["result"].get("dice", {})
        for arm, patients in {**dice.get("unadapted", {}), **dice.get(mode, {})}.items():
            tables.add(scores, arm, cell["seed"], cell["site"], patients)
    singles = [arm for arm in scores if arm.startswith("single ") and arm.endswith(" (test)")]
    if singles:
        scores["single models, mean (test)"] = _mean_of(scores, singles)
    return {arm: found for arm, found in scores.items() if not arm.startswith("single ") or "mean" in arm}


def _mean_of(scores: Scores, arms: Sequence[str]) -> dict[int, dict[tables.Patient, float]]:
    """The mean Dice of several arms. Which models there are depends on the site."""
    values: dict[int, dict[tables.Patient, list[float]]] = {}
    for arm in arms:
        for seed, patients in scores[arm].items():
            for patient, dice in patients.items():
                values.setdefault(seed, {}).setdefault(patient, []).append(dice)
    return {
        seed: {patient: float(np.mean(found)) for patient, found in patients.items()}
        for seed, patients in values.items()
    }


def at(by_seed: Mapping[int, Mapping[tables.Patient, float]], site: str) -> dict[int, Any]:
    """The seeds that have the site."""
    return {seed: found for seed, found in by_seed.items() if any(unit[0] == site for unit in found)}


def complete(by_seed: Mapping[int, Mapping[tables.Patient, float]], sites: Sequence[str]) -> dict[int, Any]:
    """The seeds that have every site."""
    return {seed: found for seed, found in by_seed.items() if {unit[0] for unit in found} == set(sites)}
