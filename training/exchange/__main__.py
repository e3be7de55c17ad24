"""Import models that were made elsewhere as versions, and export versions as MONAI bundles or onnx graphs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from model_store.errors import LocumStoreError
from model_store.graphs import operators_of
from personalization.options.movable import FALLBACKS, OPAQUE, in_words, movable, suited
from personalization.options.presets import OF_ONE_MODEL
from training.errors import ImportRefused, TrainingError
from training.exit_codes import FAILED

if TYPE_CHECKING:
    from model_store.artefact import Artefact
    from model_store.store import Store
    from training.exchange.imported import Imported

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
importer = typer.Typer(help="Import a model as a version of NAME.", no_args_is_help=True)
exporter = typer.Typer(help="Export a version.", no_args_is_help=True)
app.add_typer(importer, name="import")
app.add_typer(exporter, name="export")
console = Console()
_AS_IT_IS: dict[str, Any] = {"markup": False, "soft_wrap": True}

StoreOption = Annotated[
    str, typer.Option("--store", envvar="LOCUM_STORE", help="The store: a folder, or s3://BUCKET/PREFIX.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the model; the task's when left out.")
]
LicenceOption = Annotated[
    str | None, typer.Option("--licence", help="The licence of the weights, in place of the stated one.")
]
LargestOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-largest", help="A label of which answers keep the largest component alone; may be repeated."
    ),
]
AxesOption = Annotated[
    str | None,
    typer.Option(
        "--axes",
        help="How the training files were stored, as LPS: where their axes i, j and k point. Every scan "
        "is turned to it, in place of being taken as it is stored.",
    ),
]
InsideOption = Annotated[
    str,
    typer.Option(
        "--inside", help="The model's folder inside of PATH, or the end of it, where there are several."
    ),
]
OperatorsOption = Annotated[
    str,
    typer.Option(envvar="LOCUM_GRAPH_OPERATORS", help="Operators beyond the built-in list, by commas."),
]
DEFAULT_STORE = ".locum/store"


def _opened(root: str, **options: Any) -> Store:
    """Open the store, as `Store`. It imports the readers of scans, which help does not need."""
    from model_store.store import Store

    return Store(root, **options)


@importer.command("bundle")
def import_bundle(
    path: Annotated[Path, typer.Argument(help="The bundle: a folder or a zip file.")],
    name: NameOption = None,
    store: StoreOption = DEFAULT_STORE,
    licence: LicenceOption = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", help="PLACE=VALUE in place of what the configuration has there."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", help="NAME=VALUE[,VALUE…] of each output channel, in order, background left out."
        ),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="A transform to leave out, knowingly.")
    ] = None,
    largest: LargestOption = None,
    axes: AxesOption = None,
    inside: InsideOption = "",
) -> None:
    """Import a MONAI bundle. Nothing in it is imported, evaluated or unpickled."""
    from training.exchange import bundle, imported
    from training.exchange.config import read_declared
    from training.exchange.source import Source

    declared, labels = read_declared(values or []), _labels(label or [])
    with Source(path) as source:
        found = bundle.read(source, declared=declared, labels=labels, without=without or (), inside=inside)
    found = imported.keeping_largest(found, largest) if largest else found
    found = imported.turned(found, axes) if axes else found
    _report(imported.publish(_opened(store), name or found.task.name, found, licence), found)


@importer.command("nnunet")
def import_nnunet(
    path: Annotated[
        Path,
        typer.Argument(
            help="Folder with plans.json, dataset.json and fold_0; one above it; or nnU-Net's export (zip)."
        ),
    ],
    name: NameOption = None,
    store: StoreOption = DEFAULT_STORE,
    licence: LicenceOption = None,
    folds: Annotated[
        list[str] | None,
        typer.Option(
            "--folds",
            "--fold",
            help="Folds, as 0,1 or all; may be repeated. By default nnU-Net's own choice: every one but "
            "`all` that has the checkpoint.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoints, as checkpoint_best; checkpoint_final by default.")
    ] = None,
    mirror: Annotated[
        bool, typer.Option(help="Answer as nnU-Net does, mirrored over each axis: eight passes for one.")
    ] = True,
    largest: LargestOption = None,
    axes: AxesOption = None,
    inside: InsideOption = "",
    configuration: Annotated[
        str | None, typer.Option("--configuration", "-c", help="The one of several, as 2d or 3d_fullres.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option("--trainer", "-tr", help="The one of several, as nnUNetTrainer.")
    ] = None,
) -> None:
    """Import a folder of nnU-Net v2: ResEnc or plain, 2d, 3d_fullres or 3d_lowres."""
    from training.exchange import imported, nnunet
    from training.exchange.source import Source

    with Source(path) as source:
        wanted = [fold for text in folds or () for fold in text.replace(" ", "").split(",") if fold]
        found = nnunet.read(
            source,
            wanted,
            mirror=mirror,
            checkpoint=checkpoint,
            inside=inside,
            configuration=configuration,
            trainer=trainer,
        )
    found = imported.keeping_largest(found, largest) if largest else found
    found = imported.turned(found, axes) if axes else found
    _report(imported.publish(_opened(store), name or found.task.name, found, licence), found)


@importer.command("onnx")
def import_onnx(
    path: Annotated[Path, typer.Argument(help="The graph.")],
    task: Annotated[Path, typer.Option(help="Its task.yaml: labels, channels, normalisation, geometry.")],
    name: NameOption = None,
    store: StoreOption = DEFAULT_STORE,
    licence: LicenceOption = None,
    graph_operators: OperatorsOption = "",
) -> None:
    """Import an onnx graph, to be served as it is."""
    from training.exchange import graph, imported

    operators = _operators(graph_operators)
    found = graph.read(path, task, operators)
    opened = _opened(store, operators=operators)
    _report(imported.publish(opened, name or found.task.name, found, licence), found)


@exporter.command("bundle")
def export_bundle(
    reference: Annotated[str, typer.Argument(help="name, name@3 or name@sha256:…")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")],
    store: StoreOption = DEFAULT_STORE,
    closest: Annotated[
        bool,
        typer.Option(
            "--closest",
            help="Have MONAI's nearest in place of what it has no transform for, as of nnU-Net's.",
        ),
    ] = False,
) -> None:
    """Write a version of one MONAI network as a MONAI bundle."""
    from training.exchange import to_bundle

    artefact = _opened(store).open(reference)
    notes = to_bundle.write(artefact, out, closest=closest)
    console.print(f"exported {artefact} to {out}", **_AS_IT_IS)
    for note in notes:
        console.print(f"  note: {note}", **_AS_IT_IS)


@exporter.command("nnunet")
def export_nnunet(
    reference: Annotated[str, typer.Argument(help="name, name@3 or name@sha256:…")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The results folder: nnUNet_results.")],
    store: StoreOption = DEFAULT_STORE,
    dataset: Annotated[
        int | None,
        typer.Option(min=1, max=999, help="Number of the dataset; that of the import, or 900."),
    ] = None,
) -> None:
    """Write a version as a results folder of nnU-Net v2, which nnUNetv2_predict runs."""
    from training.exchange import to_nnunet

    artefact = _opened(store).open(reference)
    folder, notes = to_nnunet.write(artefact, out, dataset)
    console.print(f"exported {artefact} to {folder}", **_AS_IT_IS)
    for note in notes:
        console.print(f"  note: {note}", **_AS_IT_IS)


@exporter.command("onnx")
def export_onnx(
    reference: Annotated[str, typer.Argument(help="name, name@3 or name@sha256:…")],
    out: Annotated[Path, typer.Argument(help="The file to make.")],
    store: StoreOption = DEFAULT_STORE,
    graph_operators: OperatorsOption = "",
) -> None:
    """Write the graph of a version, behind its lens where it has one: for another runtime."""
    from training.exchange import to_onnx

    artefact = _opened(store, operators=_operators(graph_operators)).open(reference)
    lines = to_onnx.write(artefact, out)
    console.print(f"exported {artefact} to {out}", **_AS_IT_IS)
    for line in lines:
        console.print(f"  {line}", **_AS_IT_IS)


@app.command("fingerprint")
def fingerprint_of(
    reference: Annotated[str, typer.Argument(help="name, name@3 or name@sha256:…")],
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders with scans, one for each hospital or scanner: two or more, best."),
    ],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Make another version of a model that knows what scans of its origin look like.

    Hospitals can then be fitted to it without masks, whatever its network.
    """
    from training.exchange import fingerprint

    opened = _opened(store)
    artefact = fingerprint.made(opened, opened.open(reference), folders)
    console.print(f"published {artefact}  {artefact.digest}", **_AS_IT_IS)
    for line in fingerprint.said_of(artefact, folders):
        console.print(f"  {line}", **_AS_IT_IS)


def _operators(text: str) -> tuple[str, ...]:
    try:
        return operators_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _labels(texts: list[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, sign, values = text.rpartition("=")
        try:
            found[name.strip()] = tuple(int(value) for value in values.split(","))
        except ValueError:
            sign = ""
        if not sign or not name.strip():
            raise ImportRefused(
                f"--label {text[:64]!r}: expected NAME=VALUE[,VALUE…], as liver=1 or whole=1,2,4"
            )
    return found


def _report(artefact: Artefact, found: Imported) -> None:
    console.print(f"imported {artefact}  {artefact.digest}", **_AS_IT_IS)
    lineage = artefact.manifest.lineage
    console.print(f"  {lineage.details['form']}: {lineage.weights}", **_AS_IT_IS)
    for note in found.notes:
        console.print(f"  note: {note}", **_AS_IT_IS)
    console.print(f"  it {_adapts(found)}", **_AS_IT_IS)


def _adapts(found: Imported) -> str:
    """What the version can be adapted by, in the words of `GET /models`."""
    if found.task.regions or not found.task.labels or found.network.name == OPAQUE:
        return "answers as it is"
    moved = movable(found.network.name, found.network.arguments)
    return in_words(moved, suited(moved, OF_ONE_MODEL, FALLBACKS))


def main() -> None:
    """Run the command line. Refusals are printed without a traceback."""
    try:
        app()
    except (LocumStoreError, TrainingError) as error:
        Console(stderr=True).print(f"[red]error[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(FAILED) from error


if __name__ == "__main__":
    main()
