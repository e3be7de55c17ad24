"""`make demo`: train a phantom federation, serve it, adapt it to a hospital from outside, and stay.

The phantom is made by code: known anatomy seen by four synthetic scanners. Three hospitals train together;
the fourth, `dune`, was never part of the federation. The scans that are posted belong to patients nobody
trained on, and their true masks are known, so each answer comes with its Dice.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from demo import api
from demo.adapting import Visit
from demo.phantom_scans import PhantomScan, unlabeled
from demo.service_process import running_service
from training.phantom import SCANNERS

OUTSIDE = "dune"
MEMBERS = [name for name in SCANNERS if name != OUTSIDE]
# A cohort that went wrong needs not be large to show it, and halves of fewer are not compared.
BAD_SCANS = 4

# Of the new patient, by who segmented it.
Scores = dict[str, float]

console = Console()


def train(folder: Path, rounds: int | None) -> Path:
    """Run `training.federate` as a person would; gives the store."""
    store = folder / "store"
    command = [
        *(sys.executable, "-m", "training.federate"),
        *("--method", "iop-fl", "--out", str(store), "--leave-out", OUTSIDE),
        *("--consent", "all", "--resume"),
        *(["--rounds", str(rounds)] if rounds else []),
    ]
    if subprocess.run(command, check=False).returncode:
        raise typer.Exit(1)
    return store


def segment_new_patients(client: httpx.Client, folder: Path) -> None:
    """A member is served its own model, the hospital from outside the federation's."""
    for hospital in (MEMBERS[0], OUTSIDE):
        scan = PhantomScan.at(hospital)
        answer = api.mask_of(client, scan.image, {"hospital": hospital})
        mask, overlay = folder / f"{hospital}-mask.nii.gz", folder / f"{hospital}-overlay.png"
        mask.write_bytes(answer.mask)
        picture = api.segment(client, scan.image, {"hospital": hospital, "output": "overlay"})
        overlay.write_bytes(picture.content)
        where = "in" if hospital in MEMBERS else "outside"
        score = scan.dice_of(answer.mask)
        console.print(
            f"{hospital}, {where} the federation, is served [bold]{answer.whose}[/]: Dice {score:.3f}"
        )
        console.print(f"  mask     {mask}\n  overlay  {overlay}", soft_wrap=True, highlight=False)


def adapt(visit: Visit, scans: int, epochs: int | None) -> Scores:
    """From unlabeled scans to a model of the hospital's own that serves it."""
    candidate = visit.adapt("adapted", unlabeled(OUTSIDE, scans), epochs)
    before, after = visit.compare("adapted", candidate)
    reason = f"Dice {before:.3f} before, {after:.3f} after, on a patient with a known truth"
    # The gate has no truth to go by, and lets nothing pass that it cannot vouch for. Here there is one.
    if not visit.decide(candidate, reason) and after > before:
        visit.decide(candidate, reason, override=True)
    visit.measure(f"{OUTSIDE} is served")
    return {"the federation's model": before, f"adapted to {scans} of its scans": after}


def adapt_to_negatives(visit: Visit, epochs: int | None) -> Scores:
    """The same with scans that an export turned into negatives, which the next patient's scan is not."""
    console.print(f"An export swapped black and white in {BAD_SCANS} scans. The new patient's is as ever.")
    candidate = visit.adapt("refused", unlabeled(OUTSIDE, BAD_SCANS, negative=True), epochs)
    _, after = visit.compare("refused", candidate)
    visit.decide(candidate, "it is the newest")
    visit.measure(f"{OUTSIDE} is still served")
    return {f"adapted to {BAD_SCANS} negatives, and not assigned": after}


def adapt_to_one_scan(visit: Visit) -> Scores:
    """Adapt to the new patient's scan alone, for this one answer."""
    score = visit.measure("for this answer only:", "wait=60", model=api.MODEL, personalization="scan")
    return {"adapted to this one scan": score}


def show_scores(scores: Scores) -> None:
    """The new patient at the hospital from outside, by every model there was."""
    table = Table("the new patient, segmented by", "Dice", box=None, header_style="dim")
    for name, score in scores.items():
        table.add_row(name, f"{score:.3f}")
    console.print(table)


def main(
    folder: Annotated[Path, typer.Option(help="Where everything is kept.")] = Path(".locum/demo"),
    port: Annotated[int, typer.Option(help="Where the service listens.")] = 8000,
    rounds: Annotated[int | None, typer.Option(help="Train for fewer rounds than the demo's.")] = None,
    scans: Annotated[int, typer.Option(min=1, help="Scans that dune sends.")] = 8,
    epochs: Annotated[int | None, typer.Option(help="Adapt for fewer epochs than the default.")] = None,
    once: Annotated[bool, typer.Option(help="Stop the service at the end instead of leaving it.")] = False,
) -> None:
    """Train the phantom federation, serve it, and adapt it to a hospital from outside."""
    folder.mkdir(parents=True, exist_ok=True)
    console.rule("1  three phantom hospitals train together")
    store = train(folder, rounds)
    with running_service(store, folder / "state", port) as client:
        console.rule("2  the service segments new patients")
        for hospital in (*MEMBERS, OUTSIDE):
            api.register(client, hospital, hospital if hospital in MEMBERS else None)
        segment_new_patients(client, folder)
        visit = Visit(console, client, folder, PhantomScan.at(OUTSIDE))
        console.rule(f"3  {OUTSIDE}, from outside, gets a model of its own")
        scores = adapt(visit, scans, epochs)
        console.rule(f"4  {OUTSIDE} sends scans that do harm, and the gate refuses")
        scores |= adapt_to_negatives(visit, epochs)
        console.rule("5  one scan alone, and nothing is kept")
        scores |= adapt_to_one_scan(visit)
        console.rule("what came of it")
        show_scores(scores)
        if once:
            return
        console.print(f"\nThe service is at [bold]{client.base_url}[/] (try /docs). Ctrl-C stops it.")
        try:
            signal.pause()
        except KeyboardInterrupt:
            console.print("stopped")


if __name__ == "__main__":
    typer.run(main)
