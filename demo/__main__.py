"""`make demo`: train a phantom federation, serve it, and fit it to a hospital from outside.

The phantom is synthetic: known anatomy seen by simulated scanners. Three hospitals train together; a fourth,
`heath`, was never part of the federation. The scans that are posted belong to patients outside every
training set, and their true masks are known, so each answer comes with its Dice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    folder: Annotated[Path, typer.Option(help="Folder for the store, the state and all files.")] = Path(
        ".locum/demo"
    ),
    port: Annotated[int, typer.Option(help="TCP port of the service.")] = 8000,
    rounds: Annotated[int | None, typer.Option(help="Train for fewer rounds than the default.")] = None,
    scans: Annotated[int, typer.Option(min=1, help="Scans that heath sends without masks.")] = 8,
    once: Annotated[bool, typer.Option(help="Stop the service at the end.")] = False,
) -> None:
    """Train the phantom federation, serve it, and fit it to a hospital from outside."""
    # It imports torch, which help does not need.
    from demo.course import run

    run(folder, port, rounds, scans, once=once)


if __name__ == "__main__":
    typer.run(main)
