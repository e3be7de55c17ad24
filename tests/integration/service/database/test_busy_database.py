"""A database of which another process holds the lock, or that has no free connection."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import TimeoutError as PoolTimeout

from service.database import engine
from service.http import audit
from service.identity import keys
from tests.helpers.service.asking import problem


def test_locked_database_is_503_with_retry_after(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "BUSY_SECONDS", 0.2)
    api = start(tmp_path / "store")
    with api.context.database.write() as session:
        # The transaction begins with its first use.
        session.connection()
        answer = api.client.put("/hospitals/north", json={"name": "North"})
        assert api.client.get("/hospitals").status_code == 200
    assert answer.status_code == 503
    assert answer.json()["type"] == "urn:locum:problem:database-unavailable"
    assert answer.headers["Retry-After"] == "5"
    assert "hospital (" not in answer.text
    assert api.client.put("/hospitals/north", json={"name": "North"}).status_code == 201


@pytest.mark.parametrize("auth", ["none", "keys"])
def test_exhausted_pool_is_503_with_retry_after(start: Callable[..., Any], tmp_path: Path, auth: str) -> None:
    api = start(tmp_path / "store", auth=auth)
    database = api.context.database
    with database.write() as session:
        _, key = keys.create(session, "reader", "reader", None)
    headers = {"Authorization": f"Bearer {key}"} if auth == "keys" else {}
    database.engine.pool._timeout = 0.2
    with ExitStack() as taken:
        # The service's own threads give theirs back within a moment.
        for _ in range(5):
            with suppress(PoolTimeout):
                while True:
                    taken.enter_context(database.engine.connect())
        answer = api.client.get("/hospitals", headers=headers)
    assert problem(answer) == (503, "database-unavailable")
    assert answer.headers["Retry-After"] == "5"
    assert api.client.get("/hospitals", headers=headers).status_code == 200


def test_audit_row_of_a_request_without_a_connection_has_status_503() -> None:
    assert audit._status(PoolTimeout()) == 503
