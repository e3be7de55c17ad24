"""A database on a full disk, with bytes that nothing wrote, and who may read it."""

from __future__ import annotations

import asyncio
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from benchmarks.harness import forked
from service import app
from service.database import Database, upgrade
from tests.helpers.service.asking import problem


def damage(file: Path) -> None:
    """Overwrite everything behind the first page, and drop the log of changes."""
    content = bytearray(file.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    file.write_bytes(content)
    for end in ("-wal", "-shm"):
        file.with_name(file.name + end).unlink(missing_ok=True)


def look_again(api: Any) -> None:
    asyncio.run_coroutine_threadsafe(api.context.readiness.look(), api.loop).result(30)


def test_damaged_database_is_503_without_retry_and_not_ready(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    api = start(tmp_path / "store")
    assert api.client.put("/hospitals/north", json={"name": "North"}).status_code == 201
    database = api.context.database
    with database.engine.connect() as connection:
        connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
    database.dispose()
    damage(database.file)
    answer = api.client.get("/hospitals")
    assert problem(answer) == (503, "database-damaged")
    assert "Retry-After" not in answer.headers
    assert "backup" in answer.json()["detail"]
    look_again(api)
    ready = api.client.get("/health/ready")
    assert (ready.status_code, ready.json()["parts"]["database"]["ok"]) == (503, False)
    assert api.client.get("/health/live").status_code == 200


@pytest.mark.process
def test_service_with_a_damaged_database_refuses_to_start_with_one_line(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "locum.db").write_bytes(b"SQLite format 3\x00" + b"\xa5" * 8192)
    ended = forked.run("service", "--state-dir", state, "--port", 0, "--no-worker")
    assert ended.returncode == 1
    assert "other bytes than were written" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_full_disk_is_507_and_nothing_is_stored(start: Callable[..., Any], tmp_path: Path) -> None:
    api = start(tmp_path / "store")
    with api.context.database.engine.connect() as connection:
        # Of this one connection, which the pool hands out again.
        pages = connection.execute(text("PRAGMA page_count")).scalar_one()
        connection.execute(text(f"PRAGMA max_page_count = {pages}"))
    answers = [api.client.put(f"/hospitals/h{n}", json={"name": "N" * 200}) for n in range(100)]
    refused = next(answer for answer in answers if answer.status_code != 201)
    assert problem(refused) == (507, "disk-full")
    stored = api.client.get("/hospitals").json()["hospitals"]
    assert len(stored) == sum(answer.status_code == 201 for answer in answers)


def test_ready_with_too_little_disk_is_not_ok(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = start(tmp_path / "store")
    monkeypatch.setattr(app, "_LEAST_FREE_BYTES", shutil.disk_usage(tmp_path).total + 1)
    look_again(api)
    part = api.client.get("/health/ready").json()["parts"]["disk"]
    assert part["ok"] is False
    assert "free some space" in part["detail"]


def test_ready_with_a_store_that_lost_its_models_is_not_ok(
    start: Callable[..., Any], tmp_path: Path, publish_bright: Any
) -> None:
    store = tmp_path / "store"
    publish_bright(store)
    api = start(store)
    shutil.rmtree(store)
    store.mkdir()
    look_again(api)
    part = api.client.get("/health/ready").json()["parts"]["store"]
    assert part["ok"] is False
    assert "mount it again" in part["detail"]


@pytest.mark.parametrize("leave", [True, False], ids=["empty folder", "no folder"])
def test_store_that_lost_its_models_is_503_until_it_is_back(
    start: Callable[..., Any], tmp_path: Path, publish_bright: Any, leave: bool
) -> None:
    """A client that gets 404 takes the model for one that was never there."""
    store, away = tmp_path / "store", tmp_path / "away"
    publish_bright(store)
    api = start(store)
    store.rename(away)
    if leave:
        store.mkdir()
    scan = b"not looked at"
    for answer in (
        api.segment(scan, model="bright"),
        api.segment(scan),
        api.client.get("/models"),
        api.client.get("/models/bright"),
    ):
        assert problem(answer) == (503, "store-unavailable")
        assert "mount it again" in answer.json()["detail"]
    shutil.rmtree(store, ignore_errors=True)
    away.rename(store)
    assert api.client.get("/models/bright").status_code == 200
    assert problem(api.segment(scan, model="dark")) == (404, "artefact-not-found")


def test_other_users_can_read_neither_the_state_folder_nor_the_database(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    api = start(tmp_path / "store")
    assert api.client.put("/hospitals/north", json={"name": "North"}).status_code == 201
    file = api.context.database.file
    for path in (api.settings.state_dir, *file.parent.glob(f"{file.name}*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o007, path


def test_database_of_an_earlier_version_is_closed_to_other_users(tmp_path: Path) -> None:
    file = tmp_path / "locum.db"
    file.touch()
    file.chmod(0o664)
    upgrade(Database(f"sqlite:///{file}"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o660


def test_a_deleted_name_is_overwritten(start: Callable[..., Any], tmp_path: Path) -> None:
    api = start(tmp_path / "store")
    database = api.context.database
    with database.write() as session:
        session.execute(text("CREATE TABLE names (name TEXT)"))
        session.execute(text("INSERT INTO names VALUES ('DOE^JOHN-19700101')"))
    with database.write() as session:
        session.execute(text("DELETE FROM names"))
    with database.engine.connect() as connection:
        connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
    left = b"".join(path.read_bytes() for path in database.file.parent.glob("locum.db*"))
    assert b"DOE^JOHN" not in left
