"""`python -m service audit verify | export | remove`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from service.audit.trail import Head

app = typer.Typer(no_args_is_help=True)

_NOT_COMPARABLE = 3


@app.command()
def verify(
    context: typer.Context,
    expect: Annotated[
        str | None, typer.Option(help="NUMBER:DIGEST, as an earlier verification printed it.")
    ] = None,
) -> None:
    """Verify every row, checkpoint and assignment; print the number and digest of the last row.

    Ends with status 1 where the trail is not in order, and with 3 where it is, but the expected row was
    removed.
    """
    # What works on the database, help does not need.
    from service.audit import trail
    from service.errors import AuditNotComparable

    with _reading(context) as session:
        try:
            found = trail.verify(session, None if expect is None else _head(expect))
        except AuditNotComparable as error:
            typer.echo(f"locum: {error}", err=True)
            raise typer.Exit(_NOT_COMPARABLE) from None
    removed = f", {found.removed} removed before them" if found.removed else ""
    typer.echo(f"{found.rows} rows in order{removed}; the last is", err=True)
    typer.echo(str(found.head))


@app.command()
def export(
    context: typer.Context,
    form: Annotated[
        Literal["json", "dicom"],
        typer.Option("--format", help="JSON lines, or a DICOM audit message (PS3.15) per line."),
    ] = "json",
    since: Annotated[int, typer.Option(min=0, help="Number of the first row.")] = 0,
) -> None:
    """Print the rows, oldest first. An export does not verify."""
    from service.audit import trail
    from service.audit.dicom import audit_message
    from service.audit.lines import line

    write = line if form == "json" else audit_message
    with _reading(context) as session:
        for row in trail.rows(session, since):
            sys.stdout.write(write(row) + "\n")


@app.command()
def remove(
    context: typer.Context,
    before: Annotated[
        datetime, typer.Option(formats=["%Y-%m-%d"], help="A day in UTC: rows from before it are removed.")
    ],
) -> None:
    """Verify the trail, then replace its oldest rows by a checkpoint. Export them first.

    Prints the number and digest of the last row that was removed, and of the last row: keep both.
    """
    from service.audit import trail
    from service.commands.database import opened

    with opened(context.obj()) as database:
        found = trail.remove_before(database, before.replace(tzinfo=UTC))
    if found is None:
        typer.echo("no row is that old", err=True)
        return
    typer.echo(f"{found.removed} rows are removed so far, {found.rows} left; the last of each are", err=True)
    typer.echo(f"{found.start}\n{found.head}")


@contextmanager
def _reading(context: typer.Context) -> Iterator[Session]:
    from service.commands.database import opened

    with opened(context.obj()) as database, database.snapshot() as session:
        yield session


def _head(text: str) -> Head:
    from service.audit.trail import Head

    found = re.fullmatch(r"([0-9]{1,18}):([0-9a-f]{64})", text)
    if found is None:
        raise typer.BadParameter("expected NUMBER:DIGEST with a digest of 64 hexadecimal digits")
    return Head(int(found[1]), found[2])
