"""`python -m model_store`: list, show, verify, withdraw, prune, import, export and quantise artefacts."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from model_store.errors import ArtefactWithdrawn, LocumStoreError, StoreError
from model_store.graphs import operators_of
from model_store.signing import Signer, TrustedKeys, make_key

if TYPE_CHECKING:
    from model_store.store import Store

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
console = Console()

StoreOption = Annotated[
    str, typer.Option("--store", envvar="LOCUM_STORE", help="The store: a folder, or s3://BUCKET/PREFIX.")
]


def _checked_operators(text: str) -> str:
    try:
        operators_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return text


OperatorsOption = Annotated[
    str,
    typer.Option(
        envvar="LOCUM_GRAPH_OPERATORS",
        help="Operators that graphs may have beyond the built-in list, by commas.",
        callback=_checked_operators,
    ),
]
Reference = Annotated[str, typer.Argument(help="name, name@3 or name@sha256:…")]
DEFAULT_STORE = ".locum/store"
# Names and reasons are user input: print them without markup and without line breaks.
_AS_IT_IS: dict[str, Any] = {"markup": False, "soft_wrap": True}
_WIDEST = 10_000
# Options belong to the command that is started.
_OF_ANOTHER_ROOM: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
}


def _opened(root: str, **options: Any) -> Store:
    """Open the store, as `Store`. It imports the readers of scans, which help does not need."""
    from model_store.store import Store

    return Store(root, **options)


@app.command("list")
def list_versions(store: StoreOption = DEFAULT_STORE) -> None:
    """List every version of every name."""
    table = Table("artefact", "kind", "task", "published (UTC)", "digest", "state", box=None)
    opened = _opened(store)
    versions = opened.versions
    for name in versions.names():
        unreadable = versions.unreadable(name)
        for number, error in unreadable.items():
            table.add_row(f"{name}@{number}", "", "", "", "", f"[red]{escape(str(error))}[/]")
        for version in versions.of(name) if len(unreadable) < len(versions.numbers(name)) else ():
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
    if not table.row_count:
        console.print(f"{opened.root}: no artefact yet; train one with training.federate", **_AS_IT_IS)
        return
    # One line per version in any terminal: a truncated reference would be useless.
    whole = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    wide = Console(width=max(whole, console.width))
    with wide.capture() as lines:
        wide.print(table)
    for line in lines.get().splitlines():
        typer.echo(line.rstrip())


@app.command()
def show(reference: Reference, store: StoreOption = DEFAULT_STORE) -> None:
    """Show an artefact's digest and manifest."""
    artefact = _opened(store).open(reference, verify=False)
    console.print(f"[bold]{artefact}[/]  {artefact.digest}", soft_wrap=True)
    console.print_json(artefact.manifest.to_bytes().decode())


@app.command()
def keygen(private: Annotated[Path, typer.Argument(help="File of the new private key.")]) -> None:
    """Make a key to sign artefacts with. Its public key, for LOCUM_TRUSTED_KEYS, is written beside it."""
    made = make_key(private)
    console.print(f"key {made}: {private} signs, {private.stem}.pub.pem is to be trusted", **_AS_IT_IS)


@app.command()
def sign(
    reference: Reference,
    key: Annotated[Path, typer.Option(help="The private key.")],
    store: StoreOption = DEFAULT_STORE,
    graph_operators: OperatorsOption = "",
) -> None:
    """Sign a published version and the versions that it is composed of, once their files were verified.

    A part that another key signed keeps that signature: sign it by its own name to replace it.
    """
    opened = _opened(store, signer=Signer.load(key), operators=operators_of(graph_operators))
    # A composite opens only where its parts are trusted, too.
    parts, kept = opened.sign_parts(opened.open(reference))
    for signed in (*parts, opened.sign(reference)):
        console.print(f"signed {signed}  {signed.digest}", **_AS_IT_IS)
    for part in kept:
        console.print(f"{part} keeps the signature of another key; `sign {part}` replaces it", **_AS_IT_IS)


@app.command()
def verify(
    reference: Annotated[str | None, typer.Argument(help="One artefact; all when left out.")] = None,
    store: StoreOption = DEFAULT_STORE,
    trusted_keys: Annotated[
        Path | None,
        typer.Option(envvar="LOCUM_TRUSTED_KEYS", help="Public keys: check signatures, too."),
    ] = None,
    graph_operators: OperatorsOption = "",
) -> None:
    """Hash every file again and check every graph.

    Exit code 1 if a file is not as published or signed or a graph is refused, 2 without a store.
    """
    trusted = None if trusted_keys is None else TrustedKeys.load(trusted_keys)
    opened = _opened(store, trusted=trusted, operators=operators_of(graph_operators))
    if isinstance(opened.root, Path) and not opened.root.is_dir():
        raise StoreError(f"{store}: expected a store's folder, found none; name it with --store")
    versions = opened.versions
    references = (
        [reference]
        if reference
        else [f"{name}@{number}" for name in versions.names() for number in versions.numbers(name)]
    )
    damaged = 0
    for each in references:
        try:
            signer = opened.signatures.signed_by(opened.open(each))
            console.print(f"[green]whole[/]    {each}{f', signed by {signer}' if signer else ''}")
        except LocumStoreError as error:
            if reference is None and isinstance(error, ArtefactWithdrawn):
                continue
            damaged += 1
            console.print(f"[red]refused[/]  {escape(str(error))}", soft_wrap=True)
    if damaged:
        raise typer.Exit(1)


@app.command()
def withdraw(
    reference: Reference,
    actor: Annotated[str, typer.Option(help="Who withdraws it.")],
    reason: Annotated[str, typer.Option(help="Why; shown when someone opens the version.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Put a tombstone on a version: it no longer opens, and its descendants are flagged."""
    opened = _opened(store)
    # A name alone means its newest version. Print which one it was, because withdrawal is final.
    withdrawn = opened.open(reference, verify=False)
    flagged = opened.withdraw(str(withdrawn), actor=actor, reason=reason)
    console.print(
        f"withdrawn {withdrawn}; flagged: {', '.join(map(str, flagged)) or 'nothing descends from it'}",
        **_AS_IT_IS,
    )


@app.command()
def prune(store: StoreOption = DEFAULT_STORE) -> None:
    """Delete abandoned staging folders and the files of withdrawn versions."""
    deleted = _opened(store).prune()
    for path in deleted:
        console.print(f"deleted {path}", **_AS_IT_IS)
    console.print(f"{len(deleted)} deleted")


@app.command("import", **_OF_ANOTHER_ROOM)
def import_model(context: typer.Context) -> None:
    """Import a model made elsewhere as a version: a MONAI bundle, an nnU-Net folder, an onnx graph."""
    _start(context.find_root().command_path, "training", "training.exchange", ["import", *context.args])


@app.command("export", **_OF_ANOTHER_ROOM)
def export_model(context: typer.Context) -> None:
    """Export a version as a MONAI bundle, or as an onnx graph with its lens."""
    _start(context.find_root().command_path, "training", "training.exchange", ["export", *context.args])


@app.command("fingerprint", **_OF_ANOTHER_ROOM)
def fingerprint_model(context: typer.Context) -> None:
    """Make another version of a model that knows what scans of its origin look like, for a lens."""
    _start(context.find_root().command_path, "training", "training.exchange", ["fingerprint", *context.args])


@app.command("quantise", **_OF_ANOTHER_ROOM)
def quantise_model(context: typer.Context) -> None:
    """Make an int8 graph (float16 for a GPU) of a version's weights, judged on scans without masks."""
    _start(context.command_path, "service", "service.quantisation", context.args)


# `python -m MODULE`, called NAME in its help and errors; as in `locum`.
_RUN_AS = (
    "import runpy, sys; del sys.argv[0]; module = sys.argv.pop(1); "
    "runpy.run_module(module, run_name='__main__')"
)


def _start(name: str, room: str, module: str, arguments: list[str]) -> None:
    """Become `python -m MODULE` of a room, called `name`: the store itself knows no torch and no onnxruntime.

    Modules of the working folder are not imported (-P), as by `locum`.
    """
    if find_spec(room) is None:
        raise StoreError(
            f"{room} is not installed, which runs networks: `pip install -c constraints.txt .` in a checkout "
            "of Locum installs it"
        )
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    line = [sys.executable, "-c", _RUN_AS, name, module, *arguments]
    if os.name == "nt":
        # exec would return to the shell at once there.
        raise typer.Exit(subprocess.run(line, env=environment, check=False).returncode)
    os.execve(sys.executable, line, environment)


def main() -> None:
    """Run the command line. Errors of the store are printed without a traceback."""
    try:
        app()
    except LocumStoreError as error:
        Console(stderr=True).print(f"[red]error[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
