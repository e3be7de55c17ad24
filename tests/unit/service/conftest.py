"""A migrated database per test: SQLite always, PostgreSQL too where LOCUM_TEST_POSTGRES_URL names one.

For example `LOCUM_TEST_POSTGRES_URL=postgresql+psycopg://user@/test?host=/run/postgresql`, with the extra
`postgresql`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from service.database import Database, Hospital, upgrade
from tests.helpers.service.cohort_bench import Bench

_SERVER = os.environ.get("LOCUM_TEST_POSTGRES_URL")


@pytest.fixture(params=["sqlite", "postgresql"] if _SERVER else ["sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'locum.db'}"
        return
    assert _SERVER is not None
    # A schema of its own in the given database stands for a database of its own.
    schema = f"test_{uuid.uuid4().hex}"
    engine = create_engine(_SERVER)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    url = make_url(_SERVER).update_query_dict({"options": f"-csearch_path={schema}"})
    yield url.render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    engine.dispose()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Migrated, with the hospitals `north` (of no federation) and `south` (site CS)."""
    opened = Database(database_url)
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
