"""`python -m model_store quantise`: make a graph of a version's weights in int8 or float16, and judge it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from model_store.errors import LocumStoreError, ReferenceNotFound
from service.errors import ServiceError

if TYPE_CHECKING:
    from model_store.artefact import Artefact
    from model_store.store import Store
    from service.inference.sessions import GraphSession
    from service.quantisation.verdict import Report
    from service.settings import Settings

app = typer.Typer(add_completion=False)
console = Console()


class _File:
    """A scan in a folder."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, path.name

    def read(self) -> bytes:
        """The file."""
        return self._path.read_bytes()


@app.command()
def quantise(
    reference: Annotated[str, typer.Argument(help="name, name@3 or name@sha256:…")],
    scans: Annotated[Path, typer.Option(help="Folder of scans, without masks: a file each.")],
    store: Annotated[
        str, typer.Option("--store", envvar="LOCUM_STORE", help="The store: a folder, or s3://BUCKET/PREFIX.")
    ] = ".locum/store",
    precision: Annotated[str, typer.Option(help="int8, or float16 for a GPU.")] = "int8",
    report: Annotated[Path | None, typer.Option(help="Write what was found here, as JSON.")] = None,
) -> None:
    """Make another graph of a version's weights, and publish it if its masks agree with the float32 masks.

    Exit code 1 if its gate refuses it. A composite stands for its global model; name a part for another.
    """
    # They import the readers of scans and onnxruntime, which help does not need.
    from model_store.manifest import GRAPH
    from service.inference.sessions import probe_provider
    from service.quantisation import work
    from service.quantisation.precision import PRECISIONS, check_provider
    from service.settings import read_settings, scan_limits

    if precision not in PRECISIONS:
        raise typer.BadParameter(f"expected {' or '.join(PRECISIONS)}, found '{precision[:32]}'")
    settings = read_settings(store=store)
    check_provider(precision, probe_provider(settings.device))
    opened = settings.open_store()
    network = work.require_reducible(_network(opened, opened.open(reference)))
    console.print(f"{network}  {network.manifest.files[GRAPH].sha256}", markup=False, soft_wrap=True)
    limits = scan_limits(settings, network.manifest.task)
    graph, found = work.make(network, precision, _scans(scans), partial(_load, settings), limits, _tell)
    if report is not None:
        report.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    _print(found)
    if not found.passed:
        console.print("[red]refused[/]  nothing is published; the float32 graph stays")
        raise typer.Exit(1)
    made = work.publish(opened, network, graph, found)
    console.print(f"published {made}  {made.digest}", markup=False, soft_wrap=True)
    console.print(f"graph     {made.manifest.files[GRAPH].sha256}", markup=False, soft_wrap=True)


def _network(store: Store, offered: Artefact) -> Artefact:
    """The network that a reference names: a composite's global model, else the artefact itself."""
    from service.kinds import kind_of

    digest = kind_of(offered).parts(offered).global_model
    return offered if digest in (None, offered.digest) else store.by_digest(str(digest))


def _scans(folder: Path) -> list[_File]:
    """The files of a folder, by name. Raises ReferenceNotFound without one."""
    found = (
        [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
        if folder.is_dir()
        else []
    )
    if not found:
        raise ReferenceNotFound(f"{folder}: expected a folder with scans, a file each, found none")
    return [_File(path) for path in found]


def _load(settings: Settings, graph: bytes) -> GraphSession:
    from model_store.digest import sha256
    from service.inference.sessions import GraphSession
    from service.settings import graph_limits

    return GraphSession(
        sha256(graph), graph, threads=settings.threads, device=settings.device, limits=graph_limits(settings)
    )


def _tell(done: int, total: int) -> None:
    if done % 20 == 0:
        console.print(f"scan {done + 1} of {total}")


def _print(found: Report) -> None:
    table = Table("patient", "agreement", "size", "emptied", box=None)
    for number, each in enumerate(found.patients, start=1):
        agreement, ratio = (
            "-" if value is None else f"{value:.4f}" for value in (each.agreement, each.size_ratio)
        )
        table.add_row(str(number), agreement, ratio, str(len(each.emptied) or ""))
    console.print(table)
    for check in found.checks():
        value = "not measured" if check["value"] is None else f"{check['value']:.4f}"
        outcome = "passed" if check["passed"] else "failed"
        console.print(f"{outcome}  {check['meaning']}: {value} ({check['bound']} {check['limit']})")
    for sentence in found.sentences():
        console.print(sentence, markup=False, soft_wrap=True)


def main() -> None:
    """Run the command. Errors are printed without a traceback."""
    try:
        app()
    except (LocumStoreError, ServiceError) as error:
        Console(stderr=True).print(f"[red]error[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
