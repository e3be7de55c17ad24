"""Which label-free criterion picks a cluster's model for a hospital from outside? On the phantom of shapes.

FedBiCross is trained without one hospital. Every outside hospital (the one left out, and some with cameras
and shares of the classes of their own) then sends unlabeled images, and each criterion picks a cluster. Their
labels say afterwards what the picks are worth: accuracy of the picked model against the best cluster's, in
hindsight, and against a cluster picked by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accuracy.picking.arms import compute
from benchmarks.accuracy.picking.report import sections
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from training.phantom.shapes import HOSPITALS


@dataclass(frozen=True)
class Profile:
    """Federations per hospital left out, images per site and per cohort; `training`: of FedBiCrossConfig."""

    seeds: int
    images: int
    cohort: int
    training: Mapping[str, Any] = field(default_factory=dict)


_SMALL = {"width": 1, "local_epochs": 1, "personal_epochs": 0}
_SYNTHESIS = {"epochs": 1, "steps": 3, "synthesis_batch": 6}
PROFILES = {
    "smoke": Profile(1, 12, 6, _SMALL | _SYNTHESIS),
    "cpu": Profile(3, 60, 40),
}


class Picking(Experiment[Profile]):
    """Choosing a cluster for an outside hospital without labels."""

    name = "picking"
    title = "Picking a cluster without labels, on the phantom"
    question = "Which label-free criterion picks a cluster for an outside hospital?"
    profiles = PROFILES
    tables = (Table("picking"),)

    def cells(self) -> list[Cell]:
        """Every (hospital left out, seed)."""
        settings = self.profile
        return [
            {
                "outside": outside,
                "seed": seed,
                "images": settings.images,
                "cohort": settings.cohort,
                "training": dict(settings.training),
            }
            for seed in range(settings.seeds)
            for outside in HOSPITALS
        ]

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Train and pick."""
        return compute(cell, work)

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """The hospital left out by itself, the others, and the gate."""
        return sections(rows)
