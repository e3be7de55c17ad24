"""The command line of the benchmarks.

    python -m benchmarks list
    python -m benchmarks run NAME --profile cpu --data DIR
    python -m benchmarks report NAME
    python -m benchmarks summary
    python -m benchmarks queue --data DIR --minutes 30

`run` computes the cells that have no row yet and writes the page after each. `report` writes the pages again
from the recorded rows; `summary` writes the pages that draw the tables of accuracy together. `queue` shows or
computes what has no row yet, the most worth first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.cells import STATE_DIR, Rows

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure Locum: accuracy, cost, faults.")

Name = Annotated[str, typer.Argument(help="The experiment's name; `list` shows all.")]
Data = Annotated[Path | None, typer.Option(help="The data; the experiment's README says which.")]
RowsFile = Annotated[
    Path | None,
    typer.Option(help="The file of finished cells, with the page beside it. [default: in docs/results]"),
]
Seeds = Annotated[int | None, typer.Option(min=1, help="Only the first seeds of the profile.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a field of the profile: FIELD=VALUE. May be given several times."),
]


@app.command("list")
def list_experiments() -> None:
    """Show every experiment: name, question, profiles, recorded rows."""
    # Here and below: it imports torch, which help does not need.
    from benchmarks.harness.experiment import RESULTS
    from benchmarks.registry import EXPERIMENTS, find

    for name in EXPERIMENTS:
        experiment = find(name)
        print(name)
        print(f"    {experiment.question}")
        print(f"    profiles: {', '.join(experiment.profiles)}")
        for table in experiment.tables:
            path = RESULTS / f"{table.name}.jsonl"
            print(f"    rows: {path} ({len(Rows(path).read())}, profile {table.profile})")


@app.command("run")
def run_command(
    name: Name,
    profile: Annotated[str, typer.Option(help="How large, how long, how often.")] = "cpu",
    data: Data = None,
    rows: RowsFile = None,
    seeds: Seeds = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only cells with FIELD=PATTERN, as in arms=routing*. May be given several times."),
    ] = None,
    settings: Settings = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Worker processes, where a federation is trained by several.")
    ] = 1,
    state_dir: Annotated[Path, typer.Option(help="Scratch space and checkpoints of unfinished cells.")] = (
        STATE_DIR
    ),
) -> None:
    """Compute the cells that have no row yet; write the page after each."""
    from benchmarks.harness.experiment import Options, run_experiment
    from benchmarks.registry import find

    with _readable_errors():
        options = Options(
            profile, data, rows, seeds, tuple(only or ()), tuple(settings or ()), workers, state_dir
        )
        run_experiment(find(name)(options))


@app.command("report")
def report_command(
    name: Name,
    profile: Annotated[str | None, typer.Option(help="The profile of --rows.")] = None,
    data: Annotated[Path | None, typer.Option(help="As the run had it: the page names it.")] = None,
    rows: RowsFile = None,
    seeds: Seeds = None,
    settings: Settings = None,
) -> None:
    """Write the pages of the recorded rows again; with --profile or --rows, one page."""
    from benchmarks.harness.experiment import Options, report_experiment
    from benchmarks.registry import find

    with _readable_errors():
        experiment = find(name)
        if profile is None and rows is None:
            opened = [experiment.of_table(table) for table in experiment.tables]
        else:
            options = Options(profile or "cpu", data, rows, seeds, settings=tuple(settings or ()))
            opened = [experiment(options)]
        for each in opened:
            report_experiment(each)
            print(each.rows_path.with_suffix(".md"))


@app.command("summary")
def summary_command() -> None:
    """Write docs/results/summary.md, what to choose, and systems.md there, from the rows of accuracy."""
    # Imports every benchmark of accuracy, which no other command needs.
    from benchmarks.accuracy.summary import page, systems

    for each in (page, systems):
        each.write()
        print(each.PATH)


@app.command("queue")
def queue_command(
    data: Data = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Compute for so long; without it, show what is left.")
    ] = None,
    piece: Annotated[float, typer.Option(min=0, help="Minutes of one piece, at most.")] = 8,
) -> None:
    """Show what has no row yet, the most worth first; with --minutes, compute it in pieces that resume."""
    from benchmarks import queue

    if minutes is None:
        queue.show(data)
    else:
        queue.compute(data, minutes, piece)


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Answer an option that does not fit with its message and exit code 2 instead of a traceback."""
    from benchmarks.harness.experiment import OptionError

    try:
        yield
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()
