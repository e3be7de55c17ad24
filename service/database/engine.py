"""The database, SQLite or PostgreSQL: `read()` and `write()` open a session."""

from __future__ import annotations

import copy
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event, func, make_url, select
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry

from service.database.caller import SERVICE, Caller, acting_for
from service.database.models import UtcDateTime
from service.errors import DatabaseDamaged, DatabaseFull, DatabaseUnavailable, ServiceError

BUSY_SECONDS = 30.0
RETRY_SECONDS = 5
DAMAGED = (
    "The file of the database has other bytes than were written: stop the service, and restore the database "
    "from a backup."
)
DATABASE_ERRORS = (DatabaseError, PoolTimeout)
"""What `database_failure` explains. PoolTimeout: no connection of the pool was free in time."""

# libpq waits for ever by default. A silent host is given up after 5 s while connecting, after 15 s without an
# acknowledgement (milliseconds), and after 45 s idle.
_LIBPQ_OPTIONS = {
    "connect_timeout": 5,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 30,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
_BEGIN = "locum_begin"
# A scan's name may be a patient's, so errors and logs have no parameters of statements.
_PRIVATE = {"hide_parameters": True}


class Database:
    """An engine and its two kinds of transaction. Safe to share between threads, not across a fork.

    Its sessions act for a `caller`: the service itself, unless `for_caller` says otherwise.
    """

    def __init__(self, url: str) -> None:
        self.caller = SERVICE
        self.url = make_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            self.engine = _sqlite_engine(url)
        else:
            libpq = self.url.get_driver_name().startswith("psycopg")
            # The URL's own options come first.
            options = {k: v for k, v in _LIBPQ_OPTIONS.items() if libpq and k not in self.url.query}
            # A connection that the server closed while it idled is replaced instead of failing a request.
            self.engine = create_engine(url, connect_args=options, pool_pre_ping=True, **_PRIVATE)
        event.listen(self.engine, "handle_error", _first_lines)
        writer = self.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        self._readers = sessionmaker(self.engine, expire_on_commit=False)
        self._writers = sessionmaker(writer, expire_on_commit=False)

    @property
    def file(self) -> Path | None:
        """SQLite's file; None elsewhere."""
        return Path(self.url.database) if self.is_sqlite and self.url.database else None

    def for_caller(self, caller: Caller) -> Database:
        """Return a view of the database for this caller: sessions find only what the caller may see."""
        other = copy.copy(self)
        other.caller = caller
        return other

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a read-only session: changes are rolled back at the end."""
        with self._readers(info=acting_for(self.caller)) as session:
            yield session

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """Open a read-only session in which every query sees the database as the first one saw it."""
        with self.read() as session:
            if not self.is_sqlite:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a session that commits at the end of the block, and rolls back on an error.

        On SQLite the write lock is taken at once: a transaction that reads first and writes later would
        otherwise be refused without waiting when another wrote in between.
        """
        with self._writers(info=acting_for(self.caller)) as session, session.begin():
            yield session

    def dispose(self) -> None:
        """Close every connection; one that a thread still uses is closed when it comes back."""
        # The pool of before takes it back, and nothing closes the connections of that pool.
        event.listen(self.engine, "checkin", lambda _connection, record: record.invalidate())
        self.engine.dispose()


def database_failure(error: DatabaseError | PoolTimeout) -> ServiceError | None:
    """Return what is wrong with the database itself; None where the statement was at fault."""
    retry = {"Retry-After": str(RETRY_SECONDS)}
    if isinstance(error, PoolTimeout):
        return DatabaseUnavailable("Every connection to it is in use: send the request again.", headers=retry)
    found = failure_of(error.orig)
    if found is None and isinstance(error, OperationalError):
        return DatabaseUnavailable(
            "It is away, or another process holds it: ask again when /health/ready says that it works.",
            headers=retry,
        )
    return found


def failure_of(error: BaseException | None) -> ServiceError | None:
    """Return what SQLite's own error says about its file; None where it is not at fault."""
    # The low byte is the kind of error, the others its variety.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return DatabaseFull(
            "No space is left for the database: nothing of this request was stored. Delete cohorts that are "
            "not needed, or free space in the state folder, then send it again."
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DatabaseDamaged(DAMAGED)
    return None


def in_turn(session: Session, what: str) -> None:
    """Take the lock `what`, and hold it until this transaction of `write()` ends.

    So what is counted stays as it was counted until it is added to. SQLite has one writer at a time anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(zlib.crc32(what.encode()))))


def database_now(session: Session) -> datetime:
    """Return the time by the one clock that all processes share.

    It is that of PostgreSQL's machine. The processes of an SQLite file run on one machine; its clock is read
    after the wait for the write lock.
    """
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        return session.scalars(select(func.clock_timestamp(type_=UtcDateTime()))).one()
    return datetime.now(UTC)


def _first_lines(context: ExceptionContext) -> None:
    """Cut an error of PostgreSQL to its first line: the next lines quote the row."""
    for error in (context.original_exception, context.sqlalchemy_exception):
        if error is not None:
            error.args = tuple(a.partition("\n")[0] if isinstance(a, str) else a for a in error.args)


def _sqlite_engine(url: str) -> Engine:
    engine = create_engine(
        url, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False}, **_PRIVATE
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        assert isinstance(connection, sqlite3.Connection)
        # The driver's own transaction handling starts none before a SELECT or a CREATE; SQLAlchemy's begin
        # event does.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")
        # Without it, INSERT OR REPLACE would delete a row of an append-only table behind the back of its
        # trigger.
        connection.execute("PRAGMA recursive_triggers = ON")
        # An entry in the serving log must outlive a power cut: the default of WAL mode would not promise
        # that.
        connection.execute("PRAGMA synchronous = FULL")
        # A deleted name may be a patient's: overwrite it.
        connection.execute("PRAGMA secure_delete = ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))

    return engine
