"""Where does one-shot federation help a hospital, and where not? FedBiCross and what it is made of.

    python -m benchmarks.accuracy.one_shot.experiment --profile cpu --data ../shared/data/medmnist_npz \
        --rows docs/results/one_shot.cpu.jsonl

Arms: local-only, the same trained on for as long as others are fine-tuned, FedAvg-1 (one round), FedAvg-1
with local fine-tuning, output ensemble, distillation from one global ensemble, FedBiCross without clustering,
without bi-level, without Stage 3, and whole; and by the letter of the paper. All of them begin with the same
models, trained once at each client: one upload, whatever is made of it. No arm chooses anything by labels
beyond training on its clients' own, so that nothing is validated.

An .npz is shared out among one client more than takes part; that one is the hospital from outside. The others
are tested on their own part of the test images, and each on all of them.

A cell is (set, alpha, seed). Within it every run keeps checkpoints. Profile `cpu` has the sizes of the
method's notes, in bfloat16: some 15 minutes a cell on one idle core that has it. `full` has the paper's, for
a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.accuracy.one_shot.arms import compute
from benchmarks.accuracy.one_shot.report import page
from benchmarks.harness.cells import STATE_DIR, Cell, Rows, run
from training.methods.fedbicross.config import LITERAL_READING, PAPER_SIZES, FedBiCrossConfig

SETS = ("pneumoniamnist", "wbc5_28_shift")
ALPHAS = (0.3, 0.5)


@dataclass(frozen=True)
class Profile:
    """How large and how often. `method` are fields of FedBiCrossConfig, `by_set` those that a set changes."""

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
        method={"width": 16, "epochs": 5, "steps": 50, "synthesis_batch": 64, "precision": "bfloat16"},
        # Pneumonia has fifteen times the images of the other: a third of the passes are five times the steps.
        by_set={"pneumoniamnist": {"local_epochs": 12, "personal_epochs": 4}},
    ),
    "full": Profile(3, "cuda", method={**PAPER_SIZES, "epochs": 20, "checkpoint_every": 100}),
}


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
    """What a set's cells share; all of the method, and its letter, so that a changed default makes others."""
    config = FedBiCrossConfig(**{**settings.method, **settings.by_set.get(name, {})})
    return {
        "profile": profile,
        "clients": settings.clients,
        "method": config.model_dump(mode="json"),
        "printed": dict(LITERAL_READING),
    }


def main(
    data: Annotated[Path, typer.Option(help=f"The folder that holds {' and '.join(SETS)}, as .npz.")],
    rows: Annotated[Path, typer.Option(help="Where finished cells are kept; the page is written beside it.")],
    profile: Annotated[str, typer.Option(help=f"One of {', '.join(PROFILES)}.")] = "cpu",
    only: Annotated[str | None, typer.Option(help="One set alone, for a try.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Fewer seeds than the profile's, for a try.")] = None,
    state_dir: Annotated[
        Path, typer.Option(help="Where unfinished cells keep their checkpoints.")
    ] = STATE_DIR,
) -> None:
    """Compute the cells that have no row yet; the page of results is written after each."""
    if profile not in PROFILES:
        raise typer.BadParameter(f"unknown profile '{profile}'; there are {', '.join(PROFILES)}")
    if only is not None and only not in SETS:
        raise typer.BadParameter(f"unknown set '{only}'; there are {', '.join(SETS)}")
    torch.set_num_threads(1)
    settings = PROFILES[profile]
    everything = cells_of(profile, settings)
    chosen = [
        cell
        for cell in everything
        if cell["set"] in (only or cell["set"],) and cell["seed"] < (seeds or settings.seeds)
    ]
    command = (
        f"python -m benchmarks.accuracy.one_shot.experiment --profile {profile} --data {data} --rows {rows}"
    )
    write = partial(page, rows, everything, command)
    experiment = partial(compute, data, settings.device)
    run(f"one_shot.{profile}", chosen, Rows(rows), experiment, state_dir, write)
    write()


if __name__ == "__main__":
    typer.run(main)
