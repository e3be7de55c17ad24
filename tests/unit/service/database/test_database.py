from __future__ import annotations

import gc
import multiprocessing
import socket
import threading
import time
import traceback
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event, inspect, text
from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError

from benchmarks.harness.forked import fork
from service.database import (
    Assignment,
    Base,
    CohortScan,
    Database,
    Hospital,
    check,
    engine,
    in_turn,
    is_current,
    upgrade,
)
from service.database.schema import configuration, head
from service.errors import DatabaseNotMigrated, DatabaseUnavailable
from tests.helpers.service.cohort_bench import Bench


def test_migrations_create_the_tables_of_the_models(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_upgrade_of_a_current_database_changes_nothing(database: Database) -> None:
    upgrade(database)
    assert is_current(database)
    with database.read() as session:
        assert session.get(Hospital, "south") is not None


def test_database_is_not_current_before_migration(database_url: str) -> None:
    database = Database(database_url)
    assert not is_current(database)
    upgrade(database)
    assert is_current(database)
    database.dispose()


def test_check_of_the_database_keeps_no_tables(database: Database) -> None:
    def kept() -> int:
        gc.collect()
        return sum(type(each).__name__ in ("Table", "DDLEventsDispatch") for each in gc.get_objects())

    check(database)
    before = kept()
    for _ in range(10):
        check(database)
    assert kept() == before


def test_head_is_the_newest_revision_that_alembic_knows() -> None:
    assert head() == ScriptDirectory.from_config(configuration()).get_current_head()


def test_downgrade_to_base_drops_every_table(database: Database) -> None:
    config = configuration()
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert inspect(database.engine).get_table_names() == ["alembic_version"]
    upgrade(database)
    assert is_current(database)


def test_upgrade_names_the_hospital_in_actors_of_its_keys(database: Database) -> None:
    config = configuration()
    key = (
        "INSERT INTO api_key (id, name, role, hospital, digest, created_at, created_by) "
        "VALUES (:id, :name, 'admin', :hospital, 'd', '2026-01-01 00:00:00+00:00', :by)"
    )
    rows = [
        {"id": "1", "name": "ada", "hospital": "north", "by": "service"},
        {"id": "2", "name": "ops", "hospital": None, "by": "key:ada"},
        {"id": "3", "name": "ben", "hospital": "south", "by": "key:ops"},
    ]

    def makers() -> list[str]:
        with database.read() as session:
            return list(session.scalars(text("SELECT created_by FROM api_key ORDER BY id")))

    def migrate(to: str) -> None:
        with database.engine.begin() as connection:
            config.attributes["connection"] = connection
            (command.upgrade if to == "head" else command.downgrade)(config, to)

    migrate("0011")
    with database.engine.begin() as connection:
        connection.execute(text(key), rows)
    migrate("head")
    assert makers() == ["service", "key:ada@north", "key:ops"]
    migrate("0011")
    assert makers() == ["service", "key:ada", "key:ops"]
    migrate("head")


def migrate_once(database_url: str, begin: Connection) -> None:
    database = Database(database_url)
    with suppress(EOFError):
        begin.recv()
    upgrade(database)
    assert is_current(database)


@pytest.mark.process
def test_concurrent_upgrades_migrate_once(database_url: str) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    children = [fork(migrate_once, database_url, here) for _ in range(3)]
    # They begin together, at the end of the pipe.
    here.close()
    there.close()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]


def test_database_of_an_unknown_revision_is_rejected(database: Database) -> None:
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'from-the-future'"))
    with pytest.raises(DatabaseNotMigrated, match="from-the-future"):
        upgrade(database)


def entry(sequence: int = 1) -> Assignment:
    return Assignment(
        hospital="north",
        model="brain",
        sequence=sequence,
        version=1,
        digest="sha256:" + "0" * 64,
        actor="ada",
        reason="because",
        previous=None,
        restores=None,
        at=datetime.now(UTC),
    )


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE assignment SET version = 2",
        "DELETE FROM assignment",
        "TRUNCATE assignment",
        "INSERT OR REPLACE INTO assignment SELECT * FROM assignment",
        "INSERT OR REPLACE INTO assignment SELECT id + 1, hospital, model, sequence, 2, digest, actor, "
        "reason, previous, restores, at, artefact, override, by_default, precision, reduced FROM assignment",
        "INSERT INTO assignment SELECT * FROM assignment WHERE true "
        "ON CONFLICT (hospital, model, sequence) DO UPDATE SET version = 2",
    ],
)
def test_serving_log_rejects_updates_and_deletes(database: Database, statement: str) -> None:
    foreign = "TRUNCATE" if database.is_sqlite else "OR REPLACE"
    if foreign in statement:
        pytest.skip("no such statement in this database")
    with database.write() as session:
        session.add(entry())
    with pytest.raises(DBAPIError, match="append-only"), database.engine.begin() as connection:
        connection.execute(text(statement))
    with database.write() as session:
        assert session.scalar(text("SELECT version FROM assignment")) == 1
        session.add(entry(sequence=2))


def test_serving_log_rejects_replace_on_a_plain_sqlite_connection(database: Database, tmp_path: Path) -> None:
    if not database.is_sqlite:
        pytest.skip("SQLite only: its triggers depend on what the connection asked for")
    import sqlite3
    from contextlib import closing

    with database.write() as session:
        session.add(entry())
    assert database.file is not None
    with (
        closing(sqlite3.connect(database.file)) as plain,
        pytest.raises(sqlite3.IntegrityError, match="append-only: REPLACE refused"),
    ):
        plain.execute("INSERT OR REPLACE INTO assignment SELECT * FROM assignment")


def test_duplicate_sequence_number_is_rejected(database: Database) -> None:
    with database.write() as session:
        session.add(entry())
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(entry())


def test_entry_of_an_unknown_hospital_is_rejected(database: Database) -> None:
    lost = entry()
    lost.hospital = "nowhere"
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(lost)


def test_times_are_read_in_utc(database: Database) -> None:
    written = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=-7)))
    with database.write() as session:
        session.add(Hospital(id="west", name="W", site=None, created_at=written, updated_at=written))
    with database.read() as session:
        row = session.get(Hospital, "west")
    assert row is not None
    assert row.created_at == written
    assert row.created_at.utcoffset() == timedelta(0)


def test_time_without_a_zone_is_rejected(database: Database) -> None:
    naive = datetime(2026, 1, 2)
    with pytest.raises(StatementError, match="no time zone"), database.write() as session:
        session.add(Hospital(id="west", name="W", site=None, created_at=naive, updated_at=naive))


def test_failing_write_is_rolled_back(database: Database) -> None:

    def fail() -> None:
        with database.write() as session:
            session.add(entry())
            session.flush()
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    with database.read() as session:
        assert session.scalar(text("SELECT count(*) FROM assignment")) == 0


def test_reader_does_not_wait_for_a_writer(database: Database) -> None:
    with database.write() as writer:
        writer.add(entry())
        writer.flush()
        seen: list[object] = []

        def look() -> None:
            with database.read() as session:
                seen.append(session.scalar(text("SELECT count(*) FROM assignment")))

        reader = threading.Thread(target=look)
        reader.start()
        reader.join(10)
        assert seen == [0]


def test_silent_database_host_is_unavailable_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    # The least that libpq takes.
    monkeypatch.setitem(engine._LIBPQ_OPTIONS, "connect_timeout", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        database = Database(f"postgresql+psycopg://u:p@127.0.0.1:{silent.getsockname()[1]}/x")
        # Ends the wait of a client without a timeout.
        release = threading.Timer(30, silent.shutdown, [socket.SHUT_RDWR])
        release.start()
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable):
            upgrade(database)
        assert time.monotonic() - began < 20
        release.cancel()
    database.dispose()


def test_connection_in_use_when_the_database_is_disposed_of_is_closed_on_return(database: Database) -> None:
    closed: list[object] = []
    event.listen(database.engine, "close", lambda connection, _record: closed.append(connection))
    with database.read() as session:
        used = session.connection().connection.dbapi_connection
        database.dispose()
        assert used not in closed
    assert used in closed


def test_connection_options_of_the_database_url_are_kept() -> None:
    given: dict[str, object] = {}
    database = Database("postgresql+psycopg://u:p@db/x?connect_timeout=60&keepalives_idle=7")

    @event.listens_for(database.engine, "do_connect")
    def _keep(_dialect: object, _record: object, _args: object, options: dict[str, object]) -> None:
        given.update(options)
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError), database.read() as session:
        session.connection()
    assert (given["connect_timeout"], given["keepalives_idle"]) == ("60", "7")
    assert given["tcp_user_timeout"] == 15_000


def test_writers_that_read_first_are_serialized(database: Database) -> None:
    """The upgrade of a read lock, which SQLite refuses without waiting, must not occur."""
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def add(name: str) -> None:
        barrier.wait()
        try:
            for number in range(5):
                with database.write() as session:
                    assert session.get(Hospital, "north") is not None
                    now = datetime.now(UTC)
                    session.add(
                        Hospital(id=f"{name}-{number}", name="n", site=None, created_at=now, updated_at=now)
                    )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(f"w{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with database.read() as session:
        assert session.scalar(text("SELECT count(*) FROM hospital")) == 2 + 20


def test_database_error_hides_statement_parameters(database: Database) -> None:
    """A scan's name may be a patient's, and errors reach logs."""
    now = datetime.now(UTC)
    with pytest.raises(IntegrityError) as refused, database.write() as session:
        session.add(Hospital(id="north", name="mueller_anna", site=None, created_at=now, updated_at=now))
    assert "mueller" not in str(refused.value)


def test_database_error_hides_quoted_row_values(bench: Bench) -> None:
    """PostgreSQL does so in lines of their own."""
    scan = {
        "cohort": bench.cohort,
        "sha256": "0",
        "size": 1,
        "format": "png",
        "created_at": datetime.now(UTC),
    }
    with pytest.raises(IntegrityError) as refused, bench.database.write() as session:
        session.add_all([CohortScan(name="mueller_anna", **scan), CohortScan(name="mueller_anna", **scan)])
    assert "mueller" not in str(refused.value)
    assert "mueller" not in str(refused.value.orig)
    assert "unique" in str(refused.value).lower()


def test_database_error_keeps_only_the_first_line(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/locum.db")
    # SQLite's messages have one line, but for those of a trigger.
    said = "first line\nDETAIL:  Key (name)=(mueller_anna)"
    with database.write() as session:
        session.execute(text("CREATE TABLE t (name TEXT)"))
        trigger = f"CREATE TRIGGER no BEFORE INSERT ON t BEGIN SELECT RAISE(ABORT, '{said}'); END"
        session.connection().exec_driver_sql(trigger)
    with pytest.raises(IntegrityError) as refused, database.write() as session:
        session.execute(text("INSERT INTO t VALUES ('a')"))
    assert "first line" in str(refused.value)
    assert "mueller" not in "".join(traceback.format_exception(refused.value))
    database.dispose()


def test_in_turn_serializes_count_and_add(database: Database) -> None:
    def count_and_add(name: str) -> None:
        with database.write() as session:
            in_turn(session, "hospitals")
            count = session.scalar(text("SELECT count(*) FROM hospital"))
            # Long enough for the others to count the same, if they could.
            time.sleep(0.02)
            now = datetime.now(UTC)
            fields = {"name": f"{count}", "site": None, "created_at": now, "updated_at": now}
            session.add(Hospital(id=name, **fields))

    threads = [threading.Thread(target=count_and_add, args=(f"h{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as session:
        found = [row[0] for row in session.execute(text("SELECT name FROM hospital WHERE id LIKE 'h%'"))]
    assert sorted(found, key=int) == [str(n) for n in range(2, 8)]
