"""Migrate the database to this code's schema at the start of every process, one process at a time."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, column, select, table, text
from sqlalchemy.exc import DatabaseError

from service.database.engine import BUSY_SECONDS, DAMAGED, Database, database_failure, failure_of
from service.database.models import Base
from service.errors import DatabaseDamaged, DatabaseNotMigrated

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS = Path(__file__).parent / "migrations"

# Alembic's.
_VERSIONS = table("alembic_version", column("version_num"))
# An arbitrary number that nothing else in the same PostgreSQL database uses.
_ADVISORY_LOCK = 0x4C6F63756D


def configuration() -> Config:
    """Alembic's configuration, without an ini file: the migrations travel inside the package."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@cache
def head() -> str:
    """Return the revision that this code needs: files of migrations begin with their revision, in order."""
    return max(revisions())


@cache
def revisions() -> frozenset[str]:
    """Return the revisions that this code knows."""
    return frozenset(p.name.partition("_")[0] for p in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def current(database: Database) -> str | None:
    """Return the revision of the database; None for an empty one."""
    # Alembic's own context would keep a few objects for each call, of which readiness makes one every second.
    with database.engine.connect() as connection:
        if not connection.dialect.has_table(connection, _VERSIONS.name):
            return None
        revision: str | None = connection.execute(select(_VERSIONS.c.version_num)).scalar()
        return revision


def is_current(database: Database) -> bool:
    """Whether the database has exactly this code's schema."""
    return current(database) == head()


def check(database: Database) -> None:
    """Read a row of every table. Raises sqlalchemy's DatabaseError, or DatabaseNotMigrated."""
    if not is_current(database):
        raise DatabaseNotMigrated("the database was migrated by another version of Locum: restart this one")
    with database.read() as session:
        for each in Base.metadata.sorted_tables:
            session.execute(select(each).limit(1)).all()


def upgrade(database: Database) -> None:
    """Migrate to the newest revision. A second process waits, and then has nothing to do.

    Raises:
        DatabaseNotMigrated: the database was written by a newer Locum.
        DatabaseDamaged: SQLite's file has other bytes than were written.
    """
    if database.file is not None:
        _make_private(database.file)
    try:
        _upgrade(database)
    except DatabaseError as error:
        raise (database_failure(error) or error) from error
    except sqlite3.DatabaseError as error:
        raise (failure_of(error) or error) from error


def _upgrade(database: Database) -> None:
    with _exclusively(database):
        if database.is_sqlite:
            _check_pages(database)
        found = current(database)
        if found == head():
            return
        # Its import takes a tenth of the start, which most often has nothing to migrate.
        from alembic import command
        from alembic.script import ScriptDirectory

        config = configuration()
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if found is not None and found not in known:
            raise DatabaseNotMigrated(
                f"the database {database.url.render_as_string()} is at revision {found}, which this version "
                f"of Locum does not know (its own is {head()}): run the newer Locum that migrated it, or "
                "restore a backup"
            )
        with database.engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _make_private(file: Path) -> None:
    """Create SQLite's file, and take from other users what an earlier version gave them.

    SQLite gives the files beside it the same mode.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    for each in (file, *(file.with_name(f"{file.name}-{end}") for end in ("wal", "shm"))):
        with suppress(FileNotFoundError):
            each.chmod(each.stat().st_mode & 0o770)


def _check_pages(database: Database) -> None:
    """Read every page of SQLite's file, so that damage shows at the start and not at a request."""
    with database.engine.connect() as connection:
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":
        raise DatabaseDamaged(f"{DAMAGED} ({found})")


@contextmanager
def _exclusively(database: Database) -> Iterator[None]:
    if database.file is not None:
        with database.file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Kept in the file, so once is enough; under the lock, because switching waits for no other
            # connection.
            with closing(sqlite3.connect(database.file, timeout=BUSY_SECONDS)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
            yield
    elif database.engine.dialect.name == "postgresql":
        with database.engine.connect() as connection:
            _advise(connection, "pg_advisory_lock")
            try:
                yield
            finally:
                _advise(connection, "pg_advisory_unlock")
    else:
        yield


def _advise(connection: Connection, function: str) -> None:
    connection.execute(text(f"SELECT {function}(:key)"), {"key": _ADVISORY_LOCK})
    connection.commit()
