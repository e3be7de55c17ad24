"""Restore a backup into an empty state folder and store."""

from __future__ import annotations

import os
from pathlib import Path

from model_store.durable import sync_folder, write_durably
from service.backup.databases import require_empty, restore_postgresql, restore_sqlite
from service.backup.folder import DATABASES, FILES, STORE, Backup
from service.cohorts.files import COHORTS
from service.database import Database
from service.database.schema import head, revisions
from service.errors import BackupError
from service.jobs.files import JOBS
from service.settings import Settings
from service.viewers.scans import VIEWERS


def restore(backup: Backup, settings: Settings) -> None:
    """Write what a backup has to where the settings say, the database last. A start then migrates it.

    Every file is compared with its digest first.

    Raises:
        BackupError: a file is not the one that was written, the backup is of a newer Locum, or where it is
            to be restored there is something.
        FilesUnavailable, OSError.
    """
    check_schema(backup)
    database, store = Database(settings.resolved_database_url), settings.open_store().root
    try:
        _check_places(backup, settings, database, store)
        assert isinstance(store, Path)
        for error in backup.damaged():
            raise error
        settings.make_state_dir()
        files = settings.open_files()
        for key in backup.manifest.below(FILES):
            files.write(key, backup.read(FILES + key))
        restore_store(backup, store)
        with backup.on_disk(DATABASES[backup.manifest.database]) as copy:
            if database.file is not None:
                database.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                restore_sqlite(copy, database.file)
            else:
                restore_postgresql(copy, database.url)
    finally:
        database.dispose()


def check_schema(backup: Backup) -> None:
    """Raise BackupError for a database that was written by a newer Locum."""
    found = backup.manifest.revision
    if found not in revisions():
        raise BackupError(
            f"{backup.root}: its database is at revision {found} (Locum {backup.manifest.locum}), which this "
            f"version of Locum does not know (its own is {head()}): restore it with the newer one"
        )


def restore_store(backup: Backup, root: Path) -> None:
    """Write the versions into a folder, with the times at which they were published."""
    for path, entry in backup.manifest.below(STORE).items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        write_durably(place, backup.read(STORE + path), mode=0o444)
        if entry.modified is not None:
            os.utime(place, ns=(entry.modified, entry.modified))
            sync_folder(place.parent)


def _check_places(backup: Backup, settings: Settings, database: Database, store: Path | str) -> None:
    if not isinstance(store, Path):
        raise BackupError(
            f"{store}: a store is restored into a folder: name one with --store, and publish from it into a "
            "new bucket if you want one"
        )
    for folder in (settings.state_dir, store):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BackupError(f"{folder}: expected a new or empty folder, found files in it: name another")
    files = settings.open_files()
    if settings.files is not None and any(files.folders(each) for each in (COHORTS, JOBS, VIEWERS)):
        raise BackupError(
            f"{settings.files}: expected no files of patients, found some: name a new place with LOCUM_FILES"
        )
    kind = "sqlite" if database.is_sqlite else "postgresql"
    if kind != backup.manifest.database:
        wanted = (
            "name an empty one with LOCUM_DATABASE_URL" if kind == "sqlite" else "unset LOCUM_DATABASE_URL"
        )
        raise BackupError(f"{backup.root}: it has a database of {backup.manifest.database}: {wanted}")
    if database.file is not None and database.file.exists():
        raise BackupError(f"{database.file}: expected no database, found one: name another place")
    if database.file is None:
        require_empty(database)
