"""Dice of recorded patients, by set: what `review`, `volumes` and `paper-iop-fl` wrote in docs/results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Values = NDArray[np.float64]
# `review` records ten-thousandths.
_UNIT = 10_000
_RESULTS = Path(__file__).parents[2] / "docs/results"
RUNGS = {"0": "", "2": ", scanner changed"}


@dataclass(frozen=True)
class Patients:
    """Dice [n] of the patients of a set, and the rank of their confidence [n] where it was recorded."""

    dice: Values
    rank: Values | None = None


@cache
def recorded() -> Mapping[str, Patients]:
    """Patients by set. A site's first seed, so that no patient is there twice."""
    found: dict[str, Patients] = {}
    for row in _rows("review.cpu"):
        cell, outside = row["cell"], row["result"]["outside"]
        if cell["set"] == "phantom" or cell["ablation"]:
            continue
        for rung, words in RUNGS.items():
            own, name = outside[rung], f"{cell['set']}{words}"
            if name not in found:
                dice, sure = (np.array(own[each]) / _UNIT for each in ("dice", "sdc"))
                found[name] = Patients(dice, rankdata(sure) / len(sure))
    for row in _rows("volumes.cpu"):
        cell = row["cell"]
        if (cell["arm"], cell["seed"], cell["set"]) == ("3-D", 0, "hippocampus_nifti"):
            patients = row["result"]["models"]["global"].values()
            for index in range(2):
                dice = np.array([each["dice"][index] for each in patients])
                found.setdefault(f"hippocampus, label {index + 1}", Patients(dice))
    for row in _rows("paper-iop-fl.cpu"):
        cell = row["cell"]
        if (cell["part"], cell["arm"], cell["seed"]) == ("inside", "FedAvg", 0):
            sites = row["result"]["sites"].values()
            dice = np.array([value for site in sites for value in site["ours"].values()])
            found.setdefault(f"{cell['set']}, all sites", Patients(dice))
    return found


def made_up(name: str) -> Values:
    """Dice of 1000 patients of whom some fail altogether: `1 in 50 fails`, `1 in 20 fails`."""
    share = 1 / int(name.split()[2])
    dice = 0.95 + 0.01 * np.random.default_rng(0).standard_normal(1000)
    dice[: round(share * len(dice))] = 0.0
    return np.asarray(dice)


MADE_UP = ("1 in 50 fails", "1 in 20 fails")


def _rows(name: str) -> Iterator[dict[str, Any]]:
    with (_RESULTS / f"{name}.jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)
