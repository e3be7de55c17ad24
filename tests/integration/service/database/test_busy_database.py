"""A process that was stopped in the middle of a transaction keeps SQLite's one lock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.database import engine


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
