"""`make demo`: train a phantom federation, serve it, segment new scans, and leave the service running.

The phantom is made by code: known anatomy seen by four synthetic scanners. Three hospitals train together;
the fourth, `dune`, was never part of the federation. The scans that are posted belong to patients nobody
trained on, and their true masks are known, so each answer comes with its Dice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import torch
import typer
from rich.console import Console

from demo.service_process import running_service
from model_store.preprocessing import class_map
from model_store.scan import decode
from personalization.metrics import dice
from training.phantom import SCANNERS, TASK, make_volume, patient_seed
from training.phantom.federation import nifti_bytes

OUTSIDE = "dune"
SIZE = 48
# Beyond the patients the federation is written with: nobody has trained on this one.
NEW_PATIENT = 1000

console = Console()


@dataclass(frozen=True)
class PhantomScan:
    """A scan of a new patient at a hospital, and the truth about it, both as .nii.gz."""

    hospital: str
    image: bytes
    truth: bytes

    @classmethod
    def at(cls, hospital: str) -> PhantomScan:
        """The new patient of a hospital."""
        scanner = SCANNERS[hospital]
        affine, shape = scanner.grid(SIZE)
        voxels, mask = make_volume(scanner, patient_seed(0, hospital, NEW_PATIENT), affine, shape)
        return cls(hospital, nifti_bytes(voxels, affine), nifti_bytes(mask, affine))

    def dice_of(self, mask: bytes) -> float:
        """Foreground Dice of a mask as the service returned it."""
        predicted, true = (torch.from_numpy(class_map(decode(m), TASK)) for m in (mask, self.truth))
        return float(dice(predicted[None], true[None], classes=2)[0, 1])


def train(folder: Path, rounds: int | None) -> Path:
    """Run `training.federate` as a person would; gives the store."""
    store = folder / "store"
    command = [
        *(sys.executable, "-m", "training.federate"),
        *("--method", "iop-fl", "--out", str(store), "--leave-out", OUTSIDE),
        *("--consent", "all", "--resume"),
        *(["--rounds", str(rounds)] if rounds else []),
    ]
    environment = {**os.environ, "LOCUM_STATE_DIR": str(folder)}
    if subprocess.run(command, check=False, env=environment).returncode:
        raise typer.Exit(1)
    return store


def register_hospitals(client: httpx.Client, members: list[str]) -> None:
    """Tell the service who its hospitals are; a member names its site in the federation."""
    for hospital in (*members, OUTSIDE):
        body = {"name": hospital.capitalize()} | ({"site": hospital} if hospital in members else {})
        client.put(f"/hospitals/{hospital}", json=body).raise_for_status()


def segment(client: httpx.Client, scan: PhantomScan, folder: Path) -> tuple[str, float, Path, Path]:
    """Post a scan; write and measure what comes back: (whose model, Dice, mask, overlay)."""
    answers = {}
    for output in ("nifti", "overlay"):
        answer = client.post(
            "/segment",
            files={"scan": ("scan.nii.gz", scan.image)},
            data={"hospital": scan.hospital, "output": output},
        )
        answer.raise_for_status()
        answers[output] = answer
    mask, overlay = folder / f"{scan.hospital}-mask.nii.gz", folder / f"{scan.hospital}-overlay.png"
    mask.write_bytes(answers["nifti"].content)
    overlay.write_bytes(answers["overlay"].content)
    whose = answers["nifti"].headers["Locum-Personalization"]
    return whose, scan.dice_of(answers["nifti"].content), mask, overlay


def main(
    folder: Annotated[Path, typer.Option(help="Where everything is kept.")] = Path(".locum/demo"),
    port: Annotated[int, typer.Option(help="Where the service listens.")] = 8000,
    rounds: Annotated[int | None, typer.Option(help="Train for fewer rounds than the demo's.")] = None,
    once: Annotated[bool, typer.Option(help="Stop the service at the end instead of leaving it.")] = False,
) -> None:
    """Train the phantom federation, serve it, and segment scans of new patients."""
    folder.mkdir(parents=True, exist_ok=True)
    members = [name for name in SCANNERS if name != OUTSIDE]
    console.rule("1  three phantom hospitals train together")
    store = train(folder, rounds)
    console.rule("2  the service segments new patients")
    with running_service(store, folder / "state", port) as client:
        register_hospitals(client, members)
        for hospital in (members[0], OUTSIDE):
            whose, score, mask, overlay = segment(client, PhantomScan.at(hospital), folder)
            where = "in" if hospital in members else "outside"
            console.print(f"{hospital}, {where} the federation, is served [bold]{whose}[/]: Dice {score:.3f}")
            console.print(f"  mask     {mask}\n  overlay  {overlay}", soft_wrap=True, highlight=False)
        if once:
            return
        console.print(f"\nThe service is at [bold]{client.base_url}[/] (try /docs). Ctrl-C stops it.")
        try:
            signal.pause()
        except KeyboardInterrupt:
            console.print("stopped")


if __name__ == "__main__":
    typer.run(main)
