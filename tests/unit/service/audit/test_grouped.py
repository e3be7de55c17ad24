"""Rows of concurrent requests in one transaction: durable before they are answered, each for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import SQLAlchemyError

from service.audit import trail
from service.audit.grouped import GroupedRows
from service.audit.trail import Row
from service.database import Database, upgrade


@pytest.fixture
def database(tmp_path: Path) -> Database:
    found = Database(f"sqlite:///{tmp_path / 'locum.db'}")
    upgrade(found)
    return found


def committed(database: Database) -> list[str]:
    """The actors of all rows, as another connection sees them, in a chain that was verified."""
    with database.snapshot() as session:
        trail.verify(session)
        return [row["actor"] for row in trail.rows(session) if row["action"] != "trail.begun"]


def while_locked(database: Database, work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Start `work` while another process holds the write lock, and count the transactions that it takes."""
    count = 0

    def counted(_: object) -> None:
        nonlocal count
        count += 1

    async def scenario() -> None:
        with database.engine.connect() as other:
            other.execute(text("ROLLBACK"))
            other.exec_driver_sql("BEGIN IMMEDIATE")
            begun = asyncio.create_task(work())
            for _ in range(20):
                await asyncio.sleep(0)
            other.exec_driver_sql("ROLLBACK")
            event.listen(database.engine, "commit", counted)
        await begun

    asyncio.run(scenario())
    return count


def test_rows_that_arrive_during_a_commit_share_the_next_one(database: Database) -> None:
    rows = GroupedRows(database)

    async def many() -> None:
        async def one(number: int) -> None:
            actor = f"caller {number}"
            await rows.append(Row("scan.segmented", actor))
            assert actor in committed(database)

        await asyncio.gather(*(one(number) for number in range(12)))

    assert while_locked(database, many) <= 2
    assert sorted(committed(database)) == sorted(f"caller {number}" for number in range(12))


def test_row_that_cannot_be_stored_fails_alone(database: Database) -> None:
    rows = GroupedRows(database)
    outcomes: list[BaseException | None] = []

    async def three() -> None:
        # A column that must not be null stands for whatever a database refuses.
        actors: list[Any] = ["first", "second", None, "third"]
        outcomes.extend(
            await asyncio.gather(
                *(rows.append(Row("scan.segmented", actor)) for actor in actors), return_exceptions=True
            )
        )

    while_locked(database, three)
    assert [isinstance(each, SQLAlchemyError) for each in outcomes] == [False, False, True, False]
    assert committed(database) == ["first", "second", "third"]


def test_request_that_is_cancelled_takes_no_other_row_with_it(database: Database) -> None:
    rows = GroupedRows(database)

    async def two() -> None:
        left, stays = (asyncio.create_task(rows.append(Row("scan.segmented", a))) for a in ("left", "stays"))
        await asyncio.sleep(0)
        left.cancel()
        await stays
        assert left.cancelled()

    while_locked(database, two)
    assert committed(database) == ["left", "stays"]
