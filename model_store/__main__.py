"""`python -m model_store`: list, show, verify, withdraw and prune the artefacts of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from model_store.errors import LocumStoreError
from model_store.store import Store

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
console = Console()

StoreOption = Annotated[Path, typer.Option("--store", envvar="LOCUM_STORE", help="The store's folder.")]
Reference = Annotated[str, typer.Argument(help="name, name@3 or name@sha256:…")]
DEFAULT_STORE = Path(".locum/store")


@app.command("list")
def list_versions(store: StoreOption = DEFAULT_STORE) -> None:
    """Every version of every name."""
    table = Table("artefact", "kind", "task", "published (UTC)", "digest", "state", box=None)
    opened = Store(store)
    for name in opened.names():
        unreadable = opened.unreadable(name)
        for number, error in unreadable.items():
            table.add_row(f"{name}@{number}", "", "", "", "", f"[red]{escape(str(error))}[/]")
        for version in opened.versions(name) if len(unreadable) < len(opened.numbers(name)) else ():
            artefact = version.artefact
            state = "[red]withdrawn[/]" if version.withdrawn else ""
            if version.flagged:
                state += f" [yellow]descends from withdrawn {', '.join(version.flagged)}[/]"
            table.add_row(
                str(artefact),
                artefact.manifest.kind,
                artefact.manifest.task.name,
                f"{artefact.published:%Y-%m-%d %H:%M}",
                artefact.digest[7:19],
                state.strip(),
            )
    console.print(table if table.row_count else f"{store}: no artefact yet; train one with training.federate")


@app.command()
def show(reference: Reference, store: StoreOption = DEFAULT_STORE) -> None:
    """An artefact's digest and manifest."""
    artefact = Store(store).open(reference, verify=False)
    console.print(f"[bold]{artefact}[/]  {artefact.digest}")
    console.print_json(artefact.manifest.to_bytes().decode())


@app.command()
def verify(
    reference: Annotated[str | None, typer.Argument(help="One artefact; all when left out.")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Hash every file again; exit code 1 if anything is not what was published."""
    opened = Store(store)
    references = (
        [reference]
        if reference
        else [
            f"{name}@{number}"
            for name in opened.names()
            for number in opened.numbers(name)
            if opened.tombstone(name, number) is None
        ]
    )
    damaged = 0
    for each in references:
        try:
            opened.open(each)
            console.print(f"[green]whole[/]    {each}")
        except LocumStoreError as error:
            damaged += 1
            console.print(f"[red]refused[/]  {error}", soft_wrap=True)
    if damaged:
        raise typer.Exit(1)


@app.command()
def withdraw(
    reference: Reference,
    actor: Annotated[str, typer.Option(help="Who withdraws it.")],
    reason: Annotated[str, typer.Option(help="Why; shown to whoever asks for it.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Put a tombstone on a version: it no longer opens, and its descendants are flagged."""
    flagged = Store(store).withdraw(reference, actor=actor, reason=reason)
    console.print(
        f"withdrawn {reference}; flagged: {', '.join(map(str, flagged)) or 'nothing descends from it'}"
    )


@app.command()
def prune(store: StoreOption = DEFAULT_STORE) -> None:
    """Delete abandoned staging folders and the files of withdrawn versions."""
    deleted = Store(store).prune()
    for path in deleted:
        console.print(f"deleted {path}", soft_wrap=True)
    console.print(f"{len(deleted)} deleted")


def main() -> None:
    """Run the command line; a store's error is a sentence, not a traceback."""
    try:
        app()
    except LocumStoreError as error:
        Console(stderr=True).print(f"[red]error[/] {error}", soft_wrap=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
