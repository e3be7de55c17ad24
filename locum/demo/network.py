"""`make demo-network`: three hospitals, each a process of its own, train together over a network on loopback.

The operator makes kits and starts `training.federate --engine network`; every hospital starts `training.site`
on its own folder with its own policy. Then the command of `make demo` trains the same federation on one
machine, without the playbook, which the demo makes from the trained models. The weights of both stores are
compared, then the masks of new patients that each store gives, byte by byte.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from locum import Client
from locum.demo.course import MEMBERS, OUTSIDE, federate
from locum.demo.phantom_scans import PhantomScan
from locum.demo.service_process import check_port, end_by_signals, free_port, running_service
from locum.demo.visit import MODEL, answered_by
from model_store.manifest import WEIGHTS
from model_store.store import Store
from training.phantom import phantom_of

console = Console(highlight=False, soft_wrap=True)


def command(module: str, *options: object) -> list[str]:
    """The command line of a Locum module, shown as a person types it."""
    return shown([sys.executable, "-m", module, *map(str, options)])


def shown(line: list[str]) -> list[str]:
    """Show a command line of Python."""
    console.print(f"[dim]$ python {' '.join(line[1:])}[/]")
    return line


def checked(line: Sequence[str]) -> None:
    """Run a command; end the demo if it fails."""
    if subprocess.run(line, check=False).returncode:
        raise typer.Exit(1)


def train_over_a_network(folder: Path, data: Path, port: int, config: Path) -> Path:
    """Train with three hospitals' processes and the operator's; return the operator's store."""
    kits, store = folder / "kits", folder / "operator" / "store"
    address = f"localhost:{port}"
    sites = [option for site in MEMBERS for option in ("--site", site)]
    checked(command("training.network", "provision", "--out", kits, "--address", address, *sites))
    hospitals: list[subprocess.Popen[bytes]] = []
    with ExitStack() as logs:
        for site in MEMBERS:
            policy = folder / f"{site}-policy.yaml"
            policy.write_text("allows: [weights, statistics]\nconsents: true\n")
            log = logs.enter_context((folder / f"{site}.log").open("wb"))
            line = command(
                "training.site",
                *("--data", data / site, "--kit", kits / site),
                *("--policy", policy, "--state", folder / "hospitals" / site),
            )
            hospitals.append(subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT))
        try:
            checked(
                command(
                    "training.federate",
                    *("--engine", "network", "--kit", kits / "server", "--task", data / "task.yaml"),
                    *("--method", "iop-fl", "--name", MODEL, "--config", config, "--out", store),
                )
            )
            for hospital in hospitals:
                hospital.wait()
        finally:
            for hospital in hospitals:
                hospital.kill()
    console.print(f"The hospitals' own views are in {folder}/SITE.log.")
    return store


def weights_of(store: Path) -> dict[str, str]:
    """Return the digest of each model's weights, by the model's name."""
    opened = Store(store)
    files = {name: opened.open(name).manifest.files for name in opened.versions.names()}
    return {name: found[WEIGHTS].sha256 for name, found in files.items() if WEIGHTS in found}


def segment(store: Path, folder: Path, port: int) -> dict[str, bytes]:
    """Serve a store; return the masks of a member's and an outside hospital's new patient."""
    masks: dict[str, bytes] = {}
    # Masks need no worker, which imports torch.
    with running_service(store, folder, port, "--no-worker") as http, Client(str(http.base_url)) as client:
        for hospital in (*MEMBERS, OUTSIDE):
            client.register(hospital, hospital.capitalize(), hospital if hospital in MEMBERS else None)
            scan = PhantomScan.at(hospital)
            answer = client.segment(scan.volume, hospital=hospital, model=MODEL)
            masks[hospital] = answer.content
            served, score = answered_by(answer.receipt), scan.dice_of(answer.content)
            console.print(f"{hospital} is served {served}: Dice {score:.3f}")
    return masks


def main(
    folder: Annotated[Path, typer.Option(help="Folder for all files; emptied first.")] = Path(
        ".locum/demo-network"
    ),
    port: Annotated[int, typer.Option(help="TCP port of the service.")] = 8000,
    rounds: Annotated[int | None, typer.Option(help="Train for fewer rounds than the default.")] = None,
) -> None:
    """Train over a network and on one machine, and compare the masks."""
    end_by_signals()
    check_port(port)  # before training, which takes minutes
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    phantom = phantom_of("segmentation")
    data = folder / "data"
    phantom.write(data)
    training = {**phantom.training, **({"rounds": rounds} if rounds else {})}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"method": training}))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console.rule("1  three hospitals train together over a network")
    over_network = train_over_a_network(folder, data, free_port(), config)
    console.rule("2  the same federation on one machine, by the command of `make demo`")
    local = folder / "local" / "store"
    checked(shown(federate(local, "iop-fl", MODEL, rounds)))
    weights = weights_of(over_network)
    if weights != weights_of(local):
        console.print("[bold red]the weights differ[/]")
        raise typer.Exit(1)
    console.print(f"[bold]The weights of {len(weights)} models are the same, byte by byte.[/]")
    console.rule("3  both stores segment new patients")
    masks = segment(over_network, folder / "operator" / "state", port)
    expected = segment(local, folder / "local" / "state", port)
    if masks != expected:
        console.print("[bold red]the masks differ[/]")
        raise typer.Exit(1)
    console.print(f"[bold]The masks of {len(masks)} new patients are the same, byte by byte.[/]")


if __name__ == "__main__":
    typer.run(main)
