"""The database that a command works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from service.database import Database, upgrade
from service.errors import ServiceError
from service.settings import Settings


@contextmanager
def opened(settings: Settings) -> Iterator[Database]:
    """Open the migrated database; an error of the service ends the command with a line."""
    database = Database(settings.resolved_database_url)
    try:
        upgrade(database)
        yield database
    except ServiceError as error:
        typer.echo(f"locum: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        database.dispose()
