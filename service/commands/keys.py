"""`python -m service keys create | list | rotate | revoke`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from service.roles import Role

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from service.settings import Settings

app = typer.Typer(no_args_is_help=True)


def _name(found: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from service.validation import KeyName, reason

    try:
        return TypeAdapter(KeyName).validate_python(found)
    except ValidationError as error:
        raise typer.BadParameter(reason(error.errors(include_url=False)[0])) from None


@app.command()
def create(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Name of the program or person that will use it.", callback=_name)
    ],
    role: Annotated[Role, typer.Option(help="What it may do; see docs/reference/roles.md.")],
    hospital: Annotated[str | None, typer.Option(help="The one hospital that it sees; all without.")] = None,
    days: Annotated[int | None, typer.Option(min=1, max=3650, help="Days until it expires.")] = None,
) -> None:
    """Create a key and print it, once. The first key of an installation is made this way."""
    # What works on the database, help does not need.
    from service.identity import keys

    settings = context.obj()
    expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
    with _writing(settings) as session:
        _, key = keys.create(session, name, role, hospital, expires_at)
    _show(settings, key)


@app.command("list")
def show(context: typer.Context) -> None:
    """List the keys, without their secrets."""
    from rich.console import Console
    from rich.table import Table

    from service.identity import keys

    table = Table("id", "name", "role", "hospital", "created", "expires", "last used", "state", box=None)
    now = datetime.now(UTC)
    with _writing(context.obj()) as session:
        for row in keys.listed(session):
            times = (_day(time) for time in (row.created_at, row.expires_at, row.last_used_at))
            over = "revoked" if row.revoked_at else "expired" if keys.refusal(row, now) else "valid"
            table.add_row(row.id, row.name, row.role, row.hospital or "all", *times, over)
    Console(width=None if typer.get_text_stream("stdout").isatty() else 200).print(table)


@app.command()
def rotate(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="Its id, or the key itself.")],
    overlap_hours: Annotated[float, typer.Option(min=0, help="Hours the old key stays valid.")] = 24,
) -> None:
    """Create the successor of a key and print it, once."""
    from service.identity import keys

    settings = context.obj()
    with _writing(settings) as session:
        _, secret = keys.rotate(session, _id(key), timedelta(hours=overlap_hours))
    _show(settings, secret)


@app.command()
def revoke(
    context: typer.Context, key: Annotated[str, typer.Argument(help="Its id, or the key itself.")]
) -> None:
    """Reject a key from now on. A running service rejects its next request."""
    from service.identity import keys

    with _writing(context.obj()) as session:
        row = keys.revoke(session, _id(key))
    typer.echo(f"revoked {keys.PREFIX}{row.id} ({row.name})", err=True)


@contextmanager
def _writing(settings: Settings) -> Iterator[Session]:
    from service.commands.database import opened

    with opened(settings) as database, database.write() as session:
        yield session


def _show(settings: Settings, key: str) -> None:
    # The key alone on standard output, so that a script can keep it.
    typer.echo(key)
    if settings.auth not in ("keys", "both"):
        typer.echo("shown this once. The service asks for keys once LOCUM_AUTH is keys or both", err=True)
    else:
        typer.echo("shown this once", err=True)


def _id(key: str) -> str:
    from service.identity import keys

    return key.removeprefix(keys.PREFIX)[:12]


def _day(time: datetime | None) -> str:
    return "-" if time is None else time.strftime("%Y-%m-%d %H:%M")
