"""`python -m service backup` and `restore`: what they print, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import typer
from sqlalchemy.exc import DatabaseError

from model_store.errors import LocumStoreError
from service.backup.folder import FILES, STORE, Backup
from service.backup.rehearsal import rehearse as rehearsed
from service.backup.restoring import restore as restored
from service.backup.taking import take
from service.database import database_failure
from service.errors import ServiceError
from service.settings import Settings


def backup(settings: Settings, folder: Path) -> int:
    """Take a backup; the exit code is 1 where something could not be copied."""
    with _in_a_line():
        made = take(settings, folder)
    for part in (FILES, STORE):
        entries = made.below(part).values()
        typer.echo(f"{part[:-1]:9}{len(entries)} files, {sum(e.size for e in entries) / 2**20:.1f} MiB")
    typer.echo(
        f"{'database':9}{made.database}, revision {made.revision}; the trail's last row is {made.trail}"
    )
    if made.gone:
        typer.echo(f"{len(made.gone)} files were deleted meanwhile, and are not in it")
    for path, why in made.unreadable.items():
        typer.echo(f"locum: {path} could not be copied: {why}", err=True)
    typer.echo(f"{folder}: it has scans of patients; `locum restore {folder} --rehearse` verifies it")
    return int(bool(made.unreadable))


def restore(settings: Settings, folder: Path) -> int:
    """Restore a backup to where the settings say."""
    with _in_a_line():
        restored(Backup(folder), settings)
    typer.echo(f"restored: locum serve --state-dir {settings.state_dir} --store {settings.store}")
    return 0


def rehearse(settings: Settings, folder: Path, as_json: bool) -> int:
    """Print a line per finding; the exit code is 1 where anything is wrong."""
    wrong = False
    for found in rehearsed(folder, settings):
        typer.echo(json.dumps(asdict(found)) if as_json else f"{found.state:8}{found.part:17}{found.words}")
        wrong |= found.state == "wrong"
    return int(wrong)


@contextmanager
def _in_a_line() -> Iterator[None]:
    """An error ends the command with a line."""
    try:
        yield
    except DatabaseError as error:
        typer.echo(f"locum: {database_failure(error) or error}", err=True)
    except (ServiceError, LocumStoreError, OSError) as error:
        typer.echo(f"locum: {error}", err=True)
    else:
        return
    raise typer.Exit(1)
