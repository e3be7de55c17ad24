"""Does a federation over organs help, which parts of FedOAP earn their keep, and what can others use of it?

    python -m benchmarks.cross_organ --profile cpu --data ../shared/data \
        --rows docs/results/cross_organ.cpu.jsonl

Sites: bladder MRI, dermoscopy, breast ultrasound, brain FLAIR; split by patient or by block of numbers, anew
for every seed. Arms, all with the steps of FedOAP's two stages at every site: local-only, FedAvg, FedPer,
FedRep, FedBN, FedAvg + fine-tuning, FedOAP without cross-attention / adapter / perturbed loss, and FedOAP.
From outside come breast DCE-MRI and contrast-enhanced brain MRI: zero-shot, and after training on a few
labelled images, that begins with FedOAP, with FedAvg, or from scratch. Test labels, and all labels of a site
from outside but those of its few images, are for reporting alone.

A cell is (seed, what is trained). Profile `cpu` is cut to a seed (ten cells) in some 25 minutes of one idle
core, which is before the plateau: its page says how far validation still rose. `plateau` takes four times as
long; `full` is for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.cross_organ_arms import TRAINED, compute
from benchmarks.cross_organ_data import SITES, assemble
from benchmarks.cross_organ_report import page
from benchmarks.harness import STATE_DIR, Cell, Rows, run
from training.data.federation import load_federation
from training.methods.fedoap_config import FedOapConfig
from training.tasks import template


@dataclass(frozen=True)
class Profile:
    """How large, how long, how often. `method` are fields of FedOapConfig; `most` bounds a site's images for
    training and for validation; `joining_steps` are taken with every one of the `budgets` of labels."""

    size: int
    seeds: int
    joining_steps: int
    most: tuple[int, int]
    method: Mapping[str, Any]
    budgets: tuple[int, ...] = (5, 10, 20)
    device: str = "cpu"


_SHORT = {"width": 16, "batch_size": 4, "precision": "bfloat16", "rounds": 4, "local_steps": 30}
PROFILES = {
    "smoke": Profile(32, 1, 2, (12, 6), {"width": 4, "rounds": 2, "local_steps": 2, "batch_size": 4}),
    "cpu": Profile(96, 3, 30, (200, 24), _SHORT),
    "plateau": Profile(96, 3, 60, (500, 48), {**_SHORT, "rounds": 22}),
    "full": Profile(128, 3, 200, (1000, 200), {"width": 64, "rounds": 50, "local_steps": 40}, device="cuda"),
}


def cells_of(profile: str, settings: Profile) -> list[Cell]:
    """Every (seed, what is trained), FedOAP first, since it answers the question."""
    common = setting_of(profile, settings)
    return [
        {"trained": trained, "seed": seed, **common} for seed in range(settings.seeds) for trained in TRAINED
    ]


def setting_of(profile: str, settings: Profile) -> dict[str, Any]:
    """What all cells share; all of the method, so that a changed default makes other cells."""
    return {
        "profile": profile,
        "size": settings.size,
        "most": list(settings.most),
        "budgets": list(settings.budgets),
        "joining_steps": settings.joining_steps,
        "method": FedOapConfig(**settings.method).model_dump(mode="json"),
    }


def main(
    data: Annotated[Path, typer.Option(help=f"The folder with {', '.join(SITES.values())}.")],
    rows: Annotated[Path, typer.Option(help="Where finished cells are kept; the page is written beside it.")],
    profile: Annotated[str, typer.Option(help=f"One of {', '.join(PROFILES)}.")] = "cpu",
    only: Annotated[str | None, typer.Option(help="What is trained, for a try: one kind of cells.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Fewer seeds than the profile's, for a try.")] = None,
    state_dir: Annotated[
        Path, typer.Option(help="Where unfinished cells keep their checkpoints.")
    ] = STATE_DIR,
) -> None:
    """Compute the cells that have no row yet; the page of results is written after each."""
    if profile not in PROFILES:
        raise typer.BadParameter(f"unknown profile '{profile}'; there are {', '.join(PROFILES)}")
    if only is not None and only not in TRAINED:
        raise typer.BadParameter(f"unknown arm '{only}'; there are {', '.join(TRAINED)}")
    torch.set_num_threads(1)
    settings = PROFILES[profile]
    everything = cells_of(profile, settings)
    chosen = [
        cell
        for cell in everything
        if cell["trained"] == (only or cell["trained"]) and cell["seed"] < (seeds or settings.seeds)
    ]
    side = settings.size
    task = template("tumour_any_organ").model_copy(update={"size": (side, side)})
    federation = load_federation(assemble(data, state_dir / "cross_organ_sites"), task)
    command = f"python -m benchmarks.cross_organ --profile {profile} --data {data} --rows {rows}"
    write = partial(page, rows, everything, command)
    experiment = partial(compute, federation, settings.device)
    run(f"cross_organ.{profile}", chosen, Rows(rows), experiment, state_dir, write)
    write()


if __name__ == "__main__":
    typer.run(main)
