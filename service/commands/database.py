"""The database that a command works on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from service.database import Database, upgrade
from service.errors import DatabaseDamaged, DatabaseFull, DatabaseUnavailable, ServiceError
from service.settings import Settings

# SQLite has several errors for a full disk, one of which another process that holds the file has, too.
_FULL_BYTES = 2**20


@contextmanager
def opened(settings: Settings) -> Iterator[Database]:
    """Open the migrated database; an error of the service ends the command with a line."""
    database = Database(settings.resolved_database_url)
    try:
        upgrade(database)
        yield database
    except ServiceError as error:
        typer.echo(f"locum: {_in_words(error, settings)}", err=True)
        raise typer.Exit(1) from None
    finally:
        database.dispose()


def _in_words(error: ServiceError, settings: Settings) -> str:
    """The error's sentence, with the place of the database where that is what failed."""
    if not isinstance(error, DatabaseDamaged | DatabaseFull | DatabaseUnavailable):
        return str(error)
    if settings.database_url is not None:
        return f"the database of LOCUM_DATABASE_URL: {error}"
    folder = settings.state_dir
    if isinstance(error, DatabaseFull) or shutil.disk_usage(folder).free < _FULL_BYTES:
        return (
            f"{folder}: expected room for the database, found a full disk: free some, or name a folder on "
            "another disk with --state-dir (LOCUM_STATE_DIR)"
        )
    return f"{folder / 'locum.db'}: {error}"
