"""A consistent copy of the database: by SQLite's backup API, or by pg_dump from a snapshot.

In both cases the session that is given sees what the copy has, and writers do not wait for it.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import URL, create_engine, inspect, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.backup.folder import DATABASES
from service.database import Database
from service.errors import BackupError


@contextmanager
def copied(database: Database, folder: Path) -> Iterator[tuple[str, Session]]:
    """Copy the database into `folder`: (the file's name there, a session that sees what it has)."""
    if database.file is not None:
        name = DATABASES["sqlite"]
        _copy_sqlite(database.file, folder / name)
        copy = Database(f"sqlite:///{folder / name}")
        try:
            with copy.read() as session:
                yield name, session
        finally:
            copy.dispose()
        return
    name = DATABASES["postgresql"]
    with database.snapshot() as session:
        snapshot = session.scalar(text("SELECT pg_export_snapshot()"))
        _postgresql(
            "pg_dump",
            database.url,
            "--format=custom",
            "--no-owner",
            "--no-privileges",
            f"--snapshot={snapshot}",
            f"--file={folder / name}",
        )
        yield name, session


def require_empty(database: Database) -> None:
    """Raise BackupError if the database of PostgreSQL has tables, or does not answer."""
    try:
        with database.engine.connect() as connection:
            there = inspect(connection).get_table_names()
    except SQLAlchemyError as error:
        raise BackupError(f"the database of LOCUM_DATABASE_URL does not answer: {error}") from error
    if there:
        raise BackupError(
            f"the database {database.url.render_as_string()}: expected an empty one, found {len(there)} "
            "tables: make a new database (createdb), and name it with LOCUM_DATABASE_URL"
        )


def restore_sqlite(copy: Path, place: Path) -> None:
    """Write SQLite's file."""
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(copy.read_bytes())
        file.flush()
        os.fsync(file.fileno())


def restore_postgresql(dump: Path, url: URL) -> None:
    """Fill an empty database, all at once."""
    _postgresql(
        "pg_restore",
        url,
        "--no-owner",
        "--no-privileges",
        "--exit-on-error",
        "--single-transaction",
        f"--dbname={_address(url)}",
        str(dump),
        named=True,
    )


@contextmanager
def temporary_postgresql(url: URL) -> Iterator[URL]:
    """A new database on the server of `url`, which is dropped at the end."""
    name = f"locum_rehearsal_{uuid.uuid4().hex[:12]}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT", hide_parameters=True)
    try:
        try:
            with engine.connect() as connection:
                connection.execute(text(f"CREATE DATABASE {name}"))
        except SQLAlchemyError as error:
            raise BackupError(
                "the rehearsal needs a temporary database beside that of LOCUM_DATABASE_URL, which could not "
                f"be made ({str(error).splitlines()[0]}): name a user that has CREATEDB"
            ) from error
        try:
            yield url.set(database=name)
        finally:
            with engine.connect() as connection:
                connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    finally:
        engine.dispose()


def _copy_sqlite(source: Path, target: Path) -> None:
    if not source.is_file():
        raise BackupError(f"{source}: expected the database, found none: name the folder with --state-dir")
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(sqlite3.connect(source, timeout=30)) as own, closing(sqlite3.connect(target)) as copy:
        # All pages in one step: it sees one state, and in WAL mode no writer waits.
        own.backup(copy)
        # One file, with nothing beside it.
        copy.execute("PRAGMA journal_mode = DELETE")


def _address(url: URL) -> str:
    """The database for libpq, without the password."""
    from psycopg.conninfo import make_conninfo

    parts = url.translate_connect_args(username="user", database="dbname")
    parts.pop("password", None)
    return make_conninfo(**parts, **_strings(url.query))


def _strings(query: Mapping[str, str | tuple[str, ...]]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else ",".join(value) for name, value in query.items()}


def _postgresql(program: str, url: URL, *arguments: str, named: bool = False) -> None:
    """Run a program of PostgreSQL. The password is in its environment: others can read arguments."""
    environment = dict(os.environ)
    if url.password is not None:
        environment["PGPASSWORD"] = str(url.password)
    command = [program, *arguments, *([] if named else [f"--dbname={_address(url)}"])]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BackupError(
            f"expected {program} on the PATH, found none: install PostgreSQL's client programs of the "
            "server's version (postgresql-client)"
        ) from error
    if done.returncode:
        # Its first two lines: later ones may quote a row.
        said = "; ".join(done.stderr.splitlines()[:2])
        raise BackupError(said or f"{program} ended with {done.returncode}")
