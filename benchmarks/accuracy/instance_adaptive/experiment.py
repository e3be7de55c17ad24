"""Where does a pool that every image picks from earn its keep, and do its keys learn anything?

    python -m benchmarks.accuracy.instance_adaptive.experiment --profile cpu --data ../shared/data \
        --rows docs/results/instance_adaptive.cpu.jsonl

Classification: local-only, FedAvg, FedProx, FedBN, a single SSF, and pools: one mean for a batch (as the
method's code had it when its figures were published), random entries (the control), and per instance. Clients
hold images of 1, 2 or 4 styles mixed, which is the heterogeneity within a client that the method is for.
Segmentation: the frozen global model, its head fine-tuned, a single SSF, random entries, the pool.

All arms start from the same network and take the same rounds and local epochs; the last round is tested, so
that no label chooses one. A cell is (part, set, styles, seed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.accuracy.instance_adaptive.arms import compute
from benchmarks.accuracy.instance_adaptive.report import page
from benchmarks.harness.cells import STATE_DIR, Cell, Rows, run
from training.methods.fedavg import FedAvgConfig
from training.methods.fedins.config import FedInsConfig

COMMAND = "python -m benchmarks.accuracy.instance_adaptive.experiment"

CLASSIFIED = ("wbc5_28_shift", "pneumoniamnist")
SEGMENTED = ("brain_lgg_flair", "wbc_cells")


@dataclass(frozen=True)
class Profile:
    """How large, how long, how often. `by_set` are fields of both methods that a set changes."""

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
_GLOBAL = {"rounds": 20, "width": 16, "precision": "bfloat16"}
_TUNING = {"local_epochs": 2, "batch_size": 32, "learning_rate": 1e-3, "selection": "last", "augment": False}
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
        # It has seventeen times the images of the other, whose 30 rounds are 120 steps at a client.
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


def _methods(settings: Profile, name: str) -> dict[str, Any]:
    """All of the methods' fields, so that a changed default makes other cells."""
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


def main(
    data: Annotated[Path, typer.Option(help="The folder with all sets.")],
    rows: Annotated[Path, typer.Option(help="Where finished cells are kept; the page is written beside it.")],
    profile: Annotated[str, typer.Option(help=f"One of {', '.join(PROFILES)}.")] = "cpu",
    only: Annotated[str | None, typer.Option(help="classification or segmentation alone.")] = None,
    state_dir: Annotated[
        Path, typer.Option(help="Where unfinished cells keep their checkpoints.")
    ] = STATE_DIR,
) -> None:
    """Compute the cells that have no row yet; the page of results is written after each."""
    if profile not in PROFILES:
        raise typer.BadParameter(f"unknown profile '{profile}'; there are {', '.join(PROFILES)}")
    if only not in (None, "classification", "segmentation"):
        raise typer.BadParameter(f"unknown part '{only}'; there are classification, segmentation")
    torch.set_num_threads(1)
    settings = PROFILES[profile]
    cells = cells_of(profile, settings)
    command = f"{COMMAND} --profile {profile} --data {data} --rows {rows}"
    write = partial(page, rows, cells, command)
    run(
        f"instance_adaptive.{profile}",
        [cell for cell in cells if cell["part"] == (only or cell["part"])],
        Rows(rows),
        partial(compute, data, settings.device),
        state_dir,
        write,
    )
    write()


if __name__ == "__main__":
    typer.run(main)
