"""Compare federated methods on one's own hospitals, as a table that resumes.

    python -m training.compare --methods fedavg,fedbn --data FOLDER --seeds 3 --budget 30m --out OUT

Without --data, a phantom federation is written into OUT and used. The same command goes on.
"""

from __future__ import annotations

import shlex
import sys

import typer

from training.compare.options import ComparedOptions, TableOptions, names_of, seconds_of, seeds_of
from training.exit_codes import FAILED, INTERRUPTED
from training.options import DataOptions, grouped


@grouped
def compare(compared: ComparedOptions, data: DataOptions, table: TableOptions) -> None:
    """Compare federated methods on the hospitals of a folder: a table with paired intervals that resumes."""
    # They import torch, which help does not need.
    from rich.console import Console

    from model_store.errors import LocumStoreError
    from training.compare.run import Request
    from training.compare.run import compare as run
    from training.errors import TrainingError, in_words

    console = Console(highlight=False, markup=False, soft_wrap=True)
    failures = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    try:
        request = Request(
            methods=names_of(compared.methods),
            data=data,
            seeds=seeds_of(compared.seeds),
            rounds=compared.rounds,
            config=compared.config,
            store=table.store,
            out=table.out,
            workers=table.workers,
            budget=None if table.budget is None else seconds_of(table.budget),
            again=names_of(table.again),
        )
        with console.status("") as status:
            # In a terminal alone: where the cell under way is.
            found = run(request, console.print, _command(), status.update)
    except (TrainingError, LocumStoreError, OSError) as error:
        said = in_words(error) if isinstance(error, OSError) else str(error)
        failures.print(f"error {said}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        failures.print("stopped; the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    console.print(f"\n{found.markdown()}")
    console.print(f"page  {table.out / 'compare.html'}")
    if not found.lines and not found.missing:
        raise typer.Exit(FAILED)


def _command() -> str:
    """The command as it was given, without what is done once."""
    name = sys.argv[0] if sys.argv[0].startswith("locum ") else "python -m training.compare"
    given, kept = iter(sys.argv[1:]), []
    for argument in given:
        if argument == "--again":
            next(given, None)
        elif not argument.startswith("--again="):
            kept.append(argument)
    return f"{name} {shlex.join(kept)}"


if __name__ == "__main__":
    typer.run(compare)
