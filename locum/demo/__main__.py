"""`locum demo`: serve a trained model and fit it to a scan from outside; or train it first.

Without `--train` the model is the one that the distribution carries (`locum/demo/store`), and nothing needs
torch. With it three phantom hospitals train together first, and a fourth, `heath`, which was never part of
the federation, adapts and joins. All scans are synthetic, and their true masks are known: each answer comes
with its Dice.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

_FOLDER = Path(".locum/demo-abdomen")
_PORT = 8000


def main(
    train: Annotated[
        bool, typer.Option("--train", help="Train the hospitals first; three minutes on two cores.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the store, the state and all files.",
            show_default=".locum/demo-abdomen, .locum/demo",
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="TCP port of the service.", show_default="8000")] = None,
    rounds: Annotated[int | None, typer.Option(help="With --train: fewer rounds than the default.")] = None,
    scans: Annotated[
        int, typer.Option(min=1, help="With --train: scans that heath sends without masks.")
    ] = 8,
    once: Annotated[bool, typer.Option(help="Stop the service at the end.")] = False,
    browser: Annotated[bool, typer.Option(help="Open the page, where this machine has a browser.")] = True,
    year: Annotated[
        bool,
        typer.Option("--year", help="Show how the watch calls: a year of scans, with a scanner update."),
    ] = False,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Serve alone, by the settings LOCUM_… here, as a container does."),
    ] = False,
) -> None:
    """Serve a trained model, and fit it to a scan of a hospital from outside."""
    if serve:
        _serve(folder, port)
    port = _PORT if port is None else port
    if year:
        from locum.demo.year import run as follow

        follow(folder or _FOLDER, port, once=once)
        return
    if not train:
        from locum.demo.first_mask import run as show

        show(folder or _FOLDER, port, once=once, browser=browser and not once)
        return
    if find_spec("torch") is None or find_spec("training") is None:
        raise SystemExit(
            "--train needs torch, which locum-serve leaves out: `pip install -c constraints.txt .` in a "
            "checkout of Locum, in an environment of its own, installs all of it"
        )
    # It imports torch, which help does not need.
    from locum.demo.course import run

    run(folder or Path(".locum/demo"), port, rounds, scans, once=once)


def _serve(folder: Path | None, port: int | None) -> NoReturn:
    """Become the service on the carried store.

    Without a folder, that of the store is in LOCUM_STATE_DIR: all that a container can write.
    """
    from locum.demo.carried import unpack

    state = os.environ.get("LOCUM_STATE_DIR")
    folder = folder or (Path(state) / "demo" if state else _FOLDER)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    store, _, settings = unpack(folder)
    environment = {"LOCUM_STATE_DIR": str(folder / "state"), **os.environ, **settings}
    command = [sys.executable, "-m", "service", "--store", str(store)]
    command += [] if port is None else ["--port", str(port)]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    typer.run(main)
