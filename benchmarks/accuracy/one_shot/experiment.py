"""Where does one-shot federation help a hospital, and where not? FedBiCross and its parts.

Arms: local-only, the same trained on for as long as others are fine-tuned, FedAvg-1 (one round), FedAvg-1
with local fine-tuning, output ensemble, distillation from one global ensemble, FedBiCross without clustering,
without bi-level, without Stage 3, and whole; and as the paper prints it. All arms begin with the same models,
trained once at each client: one upload, used by every arm. No arm chooses anything by labels beyond training
on its clients' own images, so nothing is validated.

An .npz is divided among one client more than takes part; the additional client is the hospital from outside.
The others are tested on their own part of the test images, and each on all of them.

A cell is (set, alpha, seed). Every run within it keeps checkpoints. Profile `cpu` has the sizes of the
method's notes, in bfloat16. `full` has the paper's, for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accuracy.one_shot.arms import compute
from benchmarks.accuracy.one_shot.report import sections
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from training.methods.fedbicross.config import LITERAL_READING, PAPER_SIZES, FedBiCrossConfig

SETS = ("pneumoniamnist", "wbc5_28_shift")
ALPHAS = (0.3, 0.5)


@dataclass(frozen=True)
class Profile:
    """How large and how often. `method` has fields of FedBiCrossConfig, `by_set` what differs for a set."""

    seeds: int
    device: str = "cpu"
    clients: int = 5
    method: Mapping[str, Any] = field(default_factory=dict)
    by_set: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_SMALL = {"width": 4, "local_epochs": 1, "personal_epochs": 1, "probes": 32}
_SYNTHESIS = {"epochs": 1, "steps": 4, "synthesis_batch": 8, "outer_steps": 2}
PROFILES = {
    "smoke": Profile(1, method=_SMALL | _SYNTHESIS),
    "cpu": Profile(
        3,
        method={
            **{"width": 16, "local_epochs": 40, "personal_epochs": 10},
            **{"epochs": 5, "steps": 50, "synthesis_batch": 64, "precision": "bfloat16"},
        },
        # Pneumonia has fifteen times the images of the other: a third of the passes are five times the steps.
        by_set={"pneumoniamnist": {"local_epochs": 12, "personal_epochs": 4}},
    ),
    "full": Profile(3, "cuda", method={**PAPER_SIZES, "epochs": 20, "checkpoint_every": 100}),
}


class OneShot(Experiment[Profile]):
    """FedBiCross and its parts, from one upload."""

    name = "one_shot"
    title = "One-shot federation"
    question = "Where does one-shot federation help, and where not?"
    profiles = PROFILES
    tables = (Table("one_shot.cpu", data="../shared/data/medmnist_npz"),)
    data_help = f"the folder with {' and '.join(f'{name}.npz' for name in SETS)}"

    def cells(self) -> list[Cell]:
        """Every (set, alpha, seed)."""
        return cells_of(self.options.profile, self.profile)

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Every arm of one cell."""
        return compute(self.data, self.profile.device, cell, work)

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """Accuracy at home and on all images, the learned weights, and the client from outside."""
        return sections(rows, self.cells())


def cells_of(
    profile: str, settings: Profile, sets: Sequence[str] = SETS, alphas: Sequence[float] = ALPHAS
) -> list[Cell]:
    """Every (set, alpha, seed), seed by seed."""
    return [
        {"set": name, "alpha": alpha, "seed": seed, **setting_of(profile, settings, name)}
        for seed in range(settings.seeds)
        for name in sets
        for alpha in alphas
    ]


def setting_of(profile: str, settings: Profile, name: str) -> dict[str, Any]:
    """What a set's cells share, with every field of the method: a changed default makes other cells."""
    config = FedBiCrossConfig(**{**settings.method, **settings.by_set.get(name, {})})
    return {
        "profile": profile,
        "clients": settings.clients,
        "method": config.model_dump(mode="json"),
        "printed": dict(LITERAL_READING),
    }
