"""Where does a pool that every image picks from help, and do its keys learn anything?

Classification: local-only, FedAvg, FedProx, FedBN, a single SSF, and pools: one mean for a batch (as the
method's code had it when its figures were published), random entries (the control), and per instance. Clients
hold images of 1, 2 or 4 styles mixed, which is the heterogeneity within a client that the method addresses.
Segmentation: the frozen global model, its head fine-tuned, a single SSF, random entries, the pool.

All arms start from the same network and take the same rounds and local epochs. The last round is tested, so
no label chooses one. A cell is (part, set, styles, seed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accuracy.instance_adaptive.arms import compute
from benchmarks.accuracy.instance_adaptive.report import sections
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from training.methods.fedavg import FedAvgConfig
from training.methods.fedins.config import FedInsConfig

CLASSIFIED = ("wbc5_28_shift", "pneumoniamnist")
SEGMENTED = ("brain_lgg_flair", "wbc_cells")


@dataclass(frozen=True)
class Profile:
    """How large, how long, how often. `by_set` has fields of both methods that differ for a set."""

    seeds: int
    rounds: int
    size: int
    vit: Mapping[str, Any]
    pool: Mapping[str, Any]
    tuning: Mapping[str, Any]
    global_model: Mapping[str, Any]
    pretraining_steps: int
    styles: tuple[int, ...] = (1, 2, 4)
    device: str = "cpu"
    clients: int = 5
    alpha: float = 0.3
    prox: float = 0.01
    by_set: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sets: tuple[tuple[str, ...], tuple[str, ...]] = field(default=(CLASSIFIED, SEGMENTED))


_SMALL_VIT = {"patch": 7, "width": 64, "depth": 4, "heads": 4}
_SEGMENTING = {"rounds": 5, "precision": "bfloat16"}
_GLOBAL = {"recipe": "paper", "rounds": 20, "width": 16, "precision": "bfloat16"}
_TUNING = {
    "recipe": "paper",
    "local_epochs": 2,
    "batch_size": 32,
    "learning_rate": 1e-3,
    "selection": "last",
    "augment": False,
}
_POOL = {
    "entries": 10,
    "local_epochs": 2,
    "batch_size": 32,
    "learning_rate": 3e-3,
    "selection": "last",
    "head": "backbone",
}
PROFILES = {
    "smoke": Profile(
        1,
        1,
        32,
        {"patch": 14, "width": 8, "depth": 1, "heads": 1},
        {**_POOL, "entries": 3, "local_epochs": 1},
        {**_TUNING, "local_epochs": 1},
        {"rounds": 1, "width": 2},
        1,
        (2,),
    ),
    "cpu": Profile(
        3,
        30,
        96,
        _SMALL_VIT,
        _POOL,
        _TUNING,
        _GLOBAL,
        600,
        # It has seventeen times the images of the other set, for which 30 rounds are 120 steps at a client.
        by_set={"pneumoniamnist": {"rounds": 5}, **dict.fromkeys(SEGMENTED, _SEGMENTING)},
    ),
    "full": Profile(
        5,
        50,
        256,
        {"patch": 4, "width": 192, "depth": 8, "heads": 3},
        {**_POOL, "entries": 25, "local_epochs": 5},
        {**_TUNING, "local_epochs": 5},
        {"rounds": 100, "width": 32},
        5000,
        device="cuda",
    ),
}


class InstanceAdaptive(Experiment[Profile]):
    """FedIns and full tuning, from one pre-trained network."""

    name = "instance_adaptive"
    title = "Adapting to every instance"
    question = "Where does a pool that every image picks from help, and do its keys learn anything?"
    profiles = PROFILES
    tables = (Table("instance_adaptive.cpu", data="../shared/data"),)
    data_help = f"the folder with {', '.join(SEGMENTED)}, and medmnist_npz with {', '.join(CLASSIFIED)}"

    def cells(self) -> list[Cell]:
        """Every (part, set, styles, seed)."""
        return cells_of(self.options.profile, self.profile)

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Train and test every arm of one cell."""
        return compute(self.data, self.profile.device, cell, work)

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """A part for classification and one for segmentation."""
        return sections(rows, self.cells())


def _methods(settings: Profile, name: str) -> dict[str, Any]:
    """Every field of the methods: a changed default makes other cells."""
    common = {"rounds": settings.rounds, **settings.by_set.get(name, {})}
    tuning, pool = FedAvgConfig(**settings.tuning, **common), FedInsConfig(**settings.pool, **common)
    return {
        "rounds": common["rounds"],
        "tuning": tuning.model_dump(mode="json", exclude={"rounds"}),
        "pool": pool.model_dump(mode="json", exclude={"rounds", "backbone"}),
    }


def cells_of(profile: str, settings: Profile) -> list[Cell]:
    """Every (part, set, styles, seed), seed by seed."""
    common = {"profile": profile}
    classified = {
        "clients": settings.clients,
        "alpha": settings.alpha,
        "prox": settings.prox,
        "vit": dict(settings.vit),
        "pretraining_steps": settings.pretraining_steps,
    }
    segmented = {
        "size": settings.size,
        "global": FedAvgConfig(**settings.global_model).model_dump(mode="json"),
    }
    classification, segmentation = settings.sets
    cells: list[Cell] = []
    for seed in range(settings.seeds):
        cells += [
            {"part": "classification", "set": name, "styles": styles, "seed": seed, **common}
            | _methods(settings, name)
            | classified
            for name in classification
            for styles in settings.styles
        ]
        cells += [
            {"part": "segmentation", "set": name, "seed": seed, **common}
            | _methods(settings, name)
            | segmented
            for name in segmentation
        ]
    return cells
