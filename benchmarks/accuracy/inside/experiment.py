"""Is a personal model better than the global one at its own site? IOP-FL's inside half, on real institutions.

Arms: local-only, global (FedAvg), personal (IOP-FL), global + local fine-tuning. Every patient is tested once
per seed, in folds; rounds are chosen on validation patients, who are not among the tested ones. All arms
start from the same weights and take the same steps at every site; fine-tuning takes additional ones.

A cell is (seed, fold, what is trained). Global and personal come from one federation, and fine-tuning starts
from its global model: one cell, three arms. Everything runs on `training`'s own engine and methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.accuracy.inside.arms import Study
from benchmarks.accuracy.inside.report import sections
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from training.data.federation import TASK_FILE, load_federation
from training.methods.iop_fl import IopFlConfig
from training.tasks import template


@dataclass(frozen=True)
class Profile:
    """How large, how long, how often. `method` has fields of IopFlConfig."""

    size: int
    folds: int
    seeds: int
    tuning_rounds: int
    device: str = "cpu"
    method: Mapping[str, Any] = field(default_factory=dict)


PROFILES = {
    "smoke": Profile(32, 2, 1, 1, method={"recipe": "paper", "width": 4, "rounds": 2}),
    "cpu": Profile(96, 2, 2, 5, method={"recipe": "paper", "width": 16, "rounds": 25}),
    "full": Profile(256, 5, 3, 10, "cuda", method={"recipe": "paper", "width": 32, "rounds": 100}),
}


class Inside(Experiment[Profile]):
    """IOP-FL inside the federation."""

    name = "inside"
    title = "Inside personalization"
    question = "Is a personal model better than the global one at its own site?"
    profiles = PROFILES
    tables = (Table("inside.cpu", data="../shared/data/brain_lgg_flair"),)
    data_help = "a federation folder with a task.yaml, or a data set with a task template of its name"
    shows_tries = True

    def cells(self) -> list[Cell]:
        """Every (seed, fold), the federation before the sites alone."""
        return cells_of(self.options.profile, self.profile)

    @cached_property
    def _study(self) -> Study:
        task = None if (self.data / TASK_FILE).is_file() else template(self.data.resolve().name)
        return Study(load_federation(self.data, task), self.profile.device, self.options.workers)

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Train and test one cell."""
        return self._study.compute(cell, work)

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """The profile's table, then one for every other setting."""
        return sections(rows, setting_of(self.options.profile, self.baseline))


def cells_of(profile: str, settings: Profile) -> list[Cell]:
    """Every (seed, fold): the federation first, since it answers the question."""
    common = setting_of(profile, settings)
    return [
        {"trained": trained, "seed": seed, "fold": fold, **common}
        for seed in range(settings.seeds)
        for trained in ("federation", "local-only")
        for fold in range(settings.folds)
    ]


def setting_of(profile: str, settings: Profile) -> dict[str, Any]:
    """What all cells of a table share, with every field of the method: a changed default makes new cells."""
    return {
        "profile": profile,
        "size": settings.size,
        "folds": settings.folds,
        "tuning_rounds": settings.tuning_rounds,
        "method": IopFlConfig(**settings.method).model_dump(mode="json"),
    }
