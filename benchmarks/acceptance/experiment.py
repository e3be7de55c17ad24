"""How often a lower bound of the mean Dice is below it, over draws of few patients from recorded ones."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.acceptance.bounds import BOUNDS
from benchmarks.acceptance.recorded import MADE_UP, made_up, recorded
from benchmarks.harness.cells import Cell, Row, key
from benchmarks.harness.experiment import Experiment, Table
from benchmarks.harness.tables import crossed
from personalization.acceptance import powered

CHOSEN, GOAL = "one unseen", 0.93


@dataclass(frozen=True)
class Profile:
    """Draws of each cell, patients of a draw, and patients without a mask beside them."""

    draws: int = 2000
    patients: tuple[int, ...] = (10, 12, 20, 40)
    others: int = 100


PROFILES = {"smoke": Profile(50, (12,), 20), "cpu": Profile()}


class Acceptance(Experiment[Profile]):
    """Coverage of the bounds, and what prediction-powered inference is worth."""

    name = "acceptance"
    title = "Whether the bounds of an acceptance hold"
    question = "How often is a lower bound of the mean Dice below it, with 10 to 40 masks?"
    profiles = PROFILES
    tables = (Table("acceptance"),)

    def cells(self) -> list[Cell]:
        """By set and number of patients; then with patients without masks, where confidence was recorded."""
        profile, sets = self.profile, recorded()
        of_bounds = [
            {"of": "bound", "set": name, "n": n, "draws": profile.draws}
            for name in (*sets, *MADE_UP)
            for n in profile.patients
        ]
        of_others = [
            {"of": "powered", "set": name, "n": n, "others": profile.others, "draws": profile.draws}
            for name, patients in sets.items()
            if patients.rank is not None
            for n in profile.patients
        ]
        return [*of_bounds, *of_others]

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:  # noqa: ARG002
        """One cell; its random numbers follow from the cell alone."""
        rng = np.random.default_rng(zlib.crc32(key(cell).encode()))
        if cell["of"] == "powered":
            return _powered(cell, rng)
        dice = made_up(cell["set"]) if cell["set"] in MADE_UP else recorded()[cell["set"]].dice
        draws = rng.choice(dice, (cell["draws"], cell["n"]))
        found: dict[str, Any] = {"patients": len(dice), "mean": round(float(dice.mean()), 4)}
        for name, bound in BOUNDS.items():
            bounds = bound(draws)
            found[name] = {
                "covers": round(float((bounds <= dice.mean() + 1e-9).mean()), 4),
                "below": round(float(dice.mean() - np.median(bounds)), 4),
            }
        return found

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """Coverage, how far below, and patients without masks."""
        bounds = [row for row in rows if row["cell"]["of"] == "bound"]
        others = [row for row in rows if row["cell"]["of"] == "powered"]
        return [_coverage(bounds), _distance(bounds), *([_others(others)] if others else [])]


def _powered(cell: Cell, rng: np.random.Generator) -> dict[str, Any]:
    patients = recorded()[cell["set"]]
    assert patients.rank is not None
    mean, covers, worth = float(patients.dice.mean()), [], []
    for _ in range(cell["draws"]):
        drawn = rng.integers(0, len(patients.dice), cell["n"])
        rest = rng.integers(0, len(patients.dice), cell["others"])
        found = powered(
            patients.dice[drawn].tolist(), patients.rank[drawn].tolist(), patients.rank[rest].tolist()
        )
        covers.append(found.lower_bound <= mean + 1e-9)
        worth.append(found.as_many_as - cell["n"])
    correlation = float(np.corrcoef(patients.dice, patients.rank)[0, 1])
    return {
        "covers": round(float(np.mean(covers)), 4),
        "saved": round(float(np.median(worth)), 2),
        "correlation": round(correlation, 3),
    }


def _coverage(rows: Sequence[Row]) -> str:
    real = [row for row in rows if row["cell"]["set"] not in MADE_UP]
    least: dict[tuple[object, object], str] = {}
    for name in BOUNDS:
        for n in dict.fromkeys(row["cell"]["n"] for row in real):
            found = [row["result"][name]["covers"] for row in real if row["cell"]["n"] == n]
            below = sum(share < GOAL for share in found)
            least[name, f"n = {n}"] = f"{_marked(min(found))} ({below} of {len(found)})"
    each = _by_n(rows, lambda result: _marked(result[CHOSEN]["covers"]))
    draws = rows[0]["cell"]["draws"]
    text = (
        f"Share of {draws} draws in which the bound, one-sided and 95 % sure, is at most the mean of the "
        "patients that the draw is from, with replacement: the least over the recorded sets and, in "
        "brackets, how many of them are below 93 % (bold).\n\n"
        f"`{CHOSEN}` is what an acceptance gives: Student's t of the sample and one patient more, who is as "
        "far below the worst as the worst is below the median. It is the only one that holds in every "
        "recorded set, and pays with a lower bound where few are far below. `t of logits` does not bound the "
        "mean. Where one patient in fifty or twenty fails altogether and none is in the sample, no bound "
        "from the sample holds: the share without any hit has a bound of its own for that."
    )
    own = f"`{CHOSEN}`, each set:"
    return f"## Coverage\n\n{text}\n\n{crossed('bound', least)}\n\n{own}\n\n{crossed('set', each)}"


def _by_n(rows: Sequence[Row], shown: Callable[[Mapping[str, Any]], str]) -> dict[tuple[object, object], str]:
    """What is shown of each set, by the number of patients."""
    return {(row["cell"]["set"], f"n = {row['cell']['n']}"): shown(row["result"]) for row in rows}


def _marked(share: float) -> str:
    return f"**{share:.1%}**" if share < GOAL else f"{share:.1%}"


def _distance(rows: Sequence[Row]) -> str:
    text = (
        "How far the median bound is below the mean Dice: what the coverage costs. "
        f"`{CHOSEN}`, and `t` in brackets."
    )
    found = _by_n(rows, lambda result: f"{result[CHOSEN]['below']:.3f} ({result['t']['below']:.3f})")
    return f"## How far below\n\n{text}\n\n{crossed('set', found)}"


def _others(rows: Sequence[Row]) -> str:
    text = (
        f"PPI++ with {rows[0]['cell']['others']} patients without masks and the rank of the answer's "
        "confidence, which `review` sorts by: the coverage of the bound, and in brackets how many masks it "
        "saves in the median (those that would give the same variance, less n). The correlation of rank and "
        f"Dice is {min(_correlations(rows)):.2f} to {max(_correlations(rows)):.2f}."
    )
    found = _by_n(rows, lambda result: f"{_marked(result['covers'])} ({result['saved']:+.1f})")
    return f"## Patients without masks\n\n{text}\n\n{crossed('set', found)}"


def _correlations(rows: Sequence[Row]) -> list[float]:
    return [row["result"]["correlation"] for row in rows]
