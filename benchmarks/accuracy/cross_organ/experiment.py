"""Does a federation over organs help, which parts of FedOAP earn their keep, and what can others use of it?

    python -m benchmarks.accuracy.cross_organ.experiment --profile cpu --data ../shared/data \
        --rows docs/results/cross_organ.cpu.jsonl

Sites: bladder MRI, dermoscopy, breast ultrasound, brain FLAIR; every seed tests other patients. Arms, all
with the steps of FedOAP's two stages at every site: local-only, FedAvg, FedPer, FedRep, FedBN, FedAvg +
fine-tuning, FedOAP without its query stage (and so attention and bank), bank, adapter or perturbed loss, and
FedOAP. From outside come breast DCE-MRI, zero-shot alone, and contrast-enhanced brain MRI: zero-shot, and
after training on a few labelled images, that begins with FedOAP, with FedAvg, or from scratch. Test labels,
and all labels of a site from outside but those of its few images, are for reporting alone.

A cell is (seed, what is trained). A seed of profile `cpu` (eleven cells) takes 29,040 steps inside, some 95
minutes of one idle core. Two more cells, of one seed, train for twice the rounds in some 30 minutes: they say
whether that was a plateau, and it was none. Hence `longer`, in about 2.2 times as long: twice the rounds, and
a second stage of two passes over a large site, as the paper's, since validation fell over the short one (test
Dice was known by then as well). Its first seed's controls showed none either, and something else in test, so
that it has controls of every seed. `short` is a quarter of `cpu`; `full` is for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.accuracy.cross_organ.arms import CONTROLS, TRAINED, compute
from benchmarks.accuracy.cross_organ.data import SITES, Hospitals, assemble
from benchmarks.accuracy.cross_organ.patients import digest, read, regrouped
from benchmarks.accuracy.cross_organ.report import page
from benchmarks.harness.cells import STATE_DIR, Cell, Rows, run
from training.data.federation import load_federation
from training.methods.fedoap.config import FedOapConfig
from training.tasks import template

COMMAND = "python -m benchmarks.accuracy.cross_organ.experiment"


@dataclass(frozen=True)
class Profile:
    """How large, how long, how often. `method` are fields of FedOapConfig; `most` bounds a site's images for
    training and for validation; `joining_steps`, in batches of `joining_batch`, are taken with every one of
    the `budgets` of labels. The first `control_seeds` seeds have cells of twice the rounds."""

    size: int
    seeds: int
    joining_steps: int
    most: tuple[int, int]
    method: Mapping[str, Any]
    budgets: tuple[int, ...] = (5, 10, 20)
    joining_batch: int = 4
    device: str = "cpu"
    control_seeds: int = 1


# Rivals have no best round to choose: all keep their last.
_LAST = {"selection": "last"}
_CPU = {"width": 16, "batch_size": 4, "precision": "bfloat16", "rounds": 22, "local_steps": 30, **_LAST}
_SMOKE = {"width": 4, "batch_size": 4, "rounds": 2, "local_steps": 2, **_LAST}
PROFILES = {
    "smoke": Profile(32, 1, 60, (12, 6), _SMOKE),
    "short": Profile(96, 3, 60, (200, 24), {**_CPU, "rounds": 4}),
    "cpu": Profile(96, 3, 60, (500, 48), _CPU),
    "longer": Profile(96, 3, 60, (500, 48), {**_CPU, "rounds": 44, "fine_tune_steps": 120}, control_seeds=3),
    "full": Profile(
        128, 3, 240, (1000, 200), {"width": 64, "rounds": 50, "local_steps": 40, **_LAST}, device="cuda"
    ),
}


def cells_of(profile: str, settings: Profile, patients: str) -> list[Cell]:
    """Every (seed, what is trained), FedOAP first, since it answers the question, and the controls last.

    `patients` is the digest of whose every image is.
    """
    common = setting_of(profile, settings, patients)
    wanted = [(trained, seed) for seed in range(settings.seeds) for trained in TRAINED]
    wanted += [(control, seed) for seed in range(settings.control_seeds) for control in CONTROLS]
    return [{"trained": trained, "seed": seed, **common} for trained, seed in wanted]


def setting_of(profile: str, settings: Profile, patients: str) -> dict[str, Any]:
    """What all cells share; all of the method, so that a changed default makes other cells."""
    return {
        "profile": profile,
        "size": settings.size,
        "most": list(settings.most),
        "budgets": list(settings.budgets),
        "joining": {"steps": settings.joining_steps, "batch": settings.joining_batch},
        "patients": patients,
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
    if only is not None and only not in (*TRAINED, *CONTROLS):
        raise typer.BadParameter(f"unknown arm '{only}'; there are {', '.join((*TRAINED, *CONTROLS))}")
    torch.set_num_threads(1)
    settings = PROFILES[profile]
    side = settings.size
    task = template("tumour_any_organ").model_copy(update={"size": (side, side)})
    federation = load_federation(assemble(data, state_dir / "cross_organ_sites"), task)
    federation = regrouped(federation, read())
    everything = cells_of(profile, settings, digest(federation))
    chosen = [
        cell
        for cell in everything
        if cell["trained"] == (only or cell["trained"]) and cell["seed"] < (seeds or settings.seeds)
    ]
    command = f"{COMMAND} --profile {profile} --data {data} --rows {rows}"
    write = partial(page, rows, everything, command)
    experiment = partial(compute, Hospitals(federation), settings.device)
    run(f"cross_organ.{profile}", chosen, Rows(rows), experiment, state_dir, write)
    write()


if __name__ == "__main__":
    typer.run(main)
