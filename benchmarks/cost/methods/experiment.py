"""What the methods cost over what they replace or come on top of: one line for every case.

The two sides alternate in one process, on one thread, and medians are compared. Peaks of memory are those of
processes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.methods.adaptation import ADAPTATION
from benchmarks.cost.methods.attention import ATTENTION
from benchmarks.cost.methods.bilevel import BILEVEL
from benchmarks.cost.methods.cost import METHOD, PLAIN, Cost
from benchmarks.cost.methods.pools import POOLS
from benchmarks.cost.methods.recipes import RECIPES
from benchmarks.cost.methods.softmax import SOFTMAX
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.measuring import milliseconds
from benchmarks.harness.tables import table

COSTS: Mapping[str, Cost] = {
    "adaptation": ADAPTATION,
    "recipes": RECIPES,
    "attention": ATTENTION,
    "bilevel": BILEVEL,
    "pools": POOLS,
    "softmax": SOFTMAX,
}


@dataclass(frozen=True)
class Profile:
    """The size of the networks and images, and by how much to multiply each cell's repetitions."""

    size: str = "cpu"
    repeats: float = 1.0
    device: str = "cpu"


PROFILES = {"smoke": Profile("smoke"), "cpu": Profile(), "gpu": Profile("gpu", device="cuda")}


class MethodCost(CostExperiment[Profile]):
    """The cost of each method beside its plain side."""

    name = "method_cost"
    title = "What the methods cost"
    question = "What does each method cost over plain training, a plain pass or what it replaces?"
    profiles = PROFILES
    by = "cost"

    def kinds(self) -> Mapping[str, Kind]:
        """A kind for every cost."""
        return {name: Kind(cost.measure, partial(shown, cost)) for name, cost in COSTS.items()}

    def measured(self) -> Sequence[Cell]:
        """Cost by cost."""
        return [
            {"cost": name, **self._repeated(cell)}
            for name, cost in COSTS.items()
            for cell in cost.cells(self.profile.size)
        ]

    def _repeated(self, cell: Cell) -> Cell:
        if "repeats" not in cell:
            return cell
        return {**cell, "repeats": max(2, round(cell["repeats"] * self.profile.repeats))}

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """What the columns are, then a table for every cost."""
        return [
            "Milliseconds: median [quartiles]. The sides alternate in one process, on one thread. Ratio: the "
            "method over the plain side; floor: the same in multiply-adds, in which norms, softmax and the "
            "optimiser count nothing. Memory: peaks in MiB, plain and method. Rows "
            "but those of the softmax are older than the record of commits.",
            *super().sections(rows),
        ]


def shown(cost: Cost, rows: Sequence[Row]) -> list[str]:
    """A heading and a line for every row."""
    body = [
        [
            cost.case(row["cell"]),
            *_times(row["result"]),
            _ratio(row["result"]),
            f"{row['result']['floor']:.2f}" if "floor" in row["result"] else "",
            _memory(row["result"]),
            cost.also(row["result"]),
        ]
        for row in rows
    ]
    header = ["case", "plain, ms", "method, ms", "ratio", "floor", "memory", "also"]
    used = [place for place in range(len(header)) if place == 0 or any(line[place] for line in body)]
    return [
        f"## {cost.compared}",
        table([header[place] for place in used], [[line[place] for place in used] for line in body]),
    ]


def _times(result: Mapping[str, Any]) -> list[str]:
    seconds = result.get("seconds")
    return [milliseconds(seconds[side]) for side in (PLAIN, METHOD)] if seconds else ["", ""]


def _ratio(result: Mapping[str, Any]) -> str:
    """The ratio; of pairs, its median."""
    found = result.get("ratio", result.get("multiple", ""))
    return f"{found['median'] if isinstance(found, Mapping) else found:.2f}" if found else ""


def _memory(result: Mapping[str, Any]) -> str:
    peaks = result.get("peak_bytes")
    return ", ".join(f"{peaks[side] / 2**20:.0f}" for side in (PLAIN, METHOD)) if peaks else ""
