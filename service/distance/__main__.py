"""`locum distance`: how far the scans of a folder are from those that a model was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from locum.commands.exit_codes import DONE, FAILED, USAGE
from locum.commands.terminal import Terminal, plain
from locum.errors import LocumError
from model_store.errors import LocumStoreError
from service.errors import ServiceError

if TYPE_CHECKING:
    from rich.table import Table

    from model_store.lens import Distance
    from service.distance.report import Report

app = typer.Typer(add_completion=False)
# Names come from anybody: they are no markup.
console = Terminal(markup=False, highlight=False, soft_wrap=True)
_WIDEST = 10_000
_LEGEND = (
    "Squared distances: 1 is usual between hospitals, 4 twice as far, and above that is unusual. "
    "Spacing and size: 1 as in training, else how many times as large."
)


@app.command()
def distance(
    reference: Annotated[
        str, typer.Argument(metavar="MODEL", help="name, name@3, name@sha256:…, or the folder of a version.")
    ],
    folder: Annotated[str, typer.Argument(help="Folder with scans, itself or in images/; or one scan.")],
    store: Annotated[
        str, typer.Option("--store", envvar="LOCUM_STORE", help="The store: a folder, or s3://BUCKET/PREFIX.")
    ] = ".locum/store",
    picture: Annotated[
        Path | None, typer.Option(help="Draw the members' curves and those of the scans here, as .svg.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every scan, not 50 images or 10 volumes that are evenly spaced.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the table.")] = False,
) -> None:
    """Say how far the scans of a folder are from those that a model was trained on, and what differs most.

    No server, no GPU and no network runs, and nothing is sent. Exit code 1 if a scan could not be measured.

    \b
      locum distance organ scans/ --store store --picture distance.svg
    """
    if picture is not None and picture.suffix.lower() != ".svg":
        raise typer.BadParameter(
            f"expected a name that ends in .svg, which every browser shows, found '{picture.name}'"
        )
    # They import the readers of scans, which help does not need.
    from rich.progress import track

    from service.distance.picture import drawn
    from service.distance.report import measure, model_of
    from service.settings import read_settings, scan_limits

    root, name = _located(reference, store)
    opened = (settings := read_settings(store=root)).open_store()
    model = model_of(opened, name)
    said = Terminal(stderr=True, markup=False, highlight=False, soft_wrap=True)
    report = measure(
        opened,
        model,
        folder,
        scan_limits(settings, model.manifest.task),
        every,
        lambda scans: track(scans, "measuring", console=said, transient=True, disable=not said.is_terminal),
    )
    if picture is not None:
        picture.write_text(drawn(report), encoding="utf-8")
    for scan, why in report.skipped.items():
        said.print(f"skipped {scan}: {why}")
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=1))
    else:
        _print(report)
    raise typer.Exit(FAILED if report.skipped else DONE)


def _located(reference: str, store: str) -> tuple[str, str]:
    """The store and the version that a reference names; of a version's folder, those that it is in."""
    from model_store.artefact import MANIFEST

    path = Path(reference)
    if not (path / MANIFEST).is_file():
        return store, reference
    version = path.resolve()
    return str(version.parents[1]), f"{version.parent.name}@{version.name}"


def _print(report: Report) -> None:
    measured, skipped = len(report.scans), len(report.skipped)
    left_out = report.found - measured - skipped
    evenly = f", evenly spaced among {report.found}: --all measures all" if left_out else ""
    console.print(f"{report.model}: {measured} scan{'' if measured == 1 else 's'}{evenly}")
    table = _table(report)
    # One line per scan in any terminal: a row that is folded cannot be compared with the next.
    whole = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    wide = Terminal(width=max(whole, console.width))
    with wide.capture() as lines:
        wide.print(table)
    for line in lines.get().splitlines():
        typer.echo(line.rstrip())
    console.print(_LEGEND)
    for sentence in report.sentences():
        console.print(sentence)


def _table(report: Report) -> Table:
    from rich.table import Table

    table = Table("scan", box=None)
    names = "field\n(brightness)", "spectrum\n(sharpness)", "quantiles\n(contrast)", "spacing", "size"
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("inverted")
    table.add_column("differs most")
    for name, found in report.scans.items():
        table.add_row(*_row(name, found))
    table.add_section()
    table.add_row(*_row("all together", report.whole))
    return table


def _row(name: str, found: Distance) -> list[str]:
    from service.distance.report import WORDS

    ratios = [found.apart[each].ratio if each in found.apart else None for each in ("spacing", "size")]
    return [
        escape(plain(name)),
        *(f"{found.shifts[kind]:.3g}" for kind in ("field", "spectrum", "quantiles")),
        *("–" if ratio is None else f"{ratio:.2g}" for ratio in ratios),
        "yes" if found.polarity.inverted else "",
        "nothing unusual" if found.most is None else WORDS[found.most],
    ]


def main() -> None:
    """Run the command. Errors are printed without a traceback."""
    try:
        app()
    except (LocumStoreError, ServiceError, LocumError, OSError) as error:
        said = Terminal(stderr=True, highlight=False, soft_wrap=True)
        said.print(f"[red]error[/] {escape(str(error))}")
        raise SystemExit(USAGE) from error


if __name__ == "__main__":
    main()
