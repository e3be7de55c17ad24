"""Append the rows of concurrent requests together: one transaction, one wait for the disk.

Each caller waits until its own row is committed. While one transaction is on its way to the disk, the rows of
other requests gather for the next one. A request that comes alone is never held up for others.
"""

from __future__ import annotations

import asyncio

from anyio import to_thread

from service import observation
from service.audit import trail
from service.audit.trail import Row
from service.database import Database
from service.observation import Answer

_Told = tuple[Row, Answer | None]
# Bounds a transaction, and what a row that cannot be stored makes to be written again.
_MOST = 64


class GroupedRows:
    """Appends rows to the audit trail. For one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[_Told, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def append(self, row: Row, answer: Answer | None = None) -> None:
        """Append a row, with the observation of the answer that it is about; both are committed when this
        returns. Raises SQLAlchemyError."""
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((row, answer), committed))
        if self._writing is None:
            # A task of its own: that a client leaves must not end the rows of others.
            self._writing = asyncio.create_task(self._write())
        await committed

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                await self._commit(batch)
        finally:
            self._writing = None

    async def _commit(self, batch: list[tuple[_Told, asyncio.Future[None]]]) -> None:
        error: Exception | None = None
        try:
            await to_thread.run_sync(self._append, [told for told, _ in batch])
        except Exception as found:
            if len(batch) > 1:
                # One of them may be at fault, and the others must have theirs.
                for each in batch:
                    await self._commit([each])
                return
            error = found
        for _, committed in batch:
            if committed.done():
                # Its request was cancelled meanwhile.
                continue
            if error is None:
                committed.set_result(None)
            else:
                committed.set_exception(error)

    def _append(self, told: list[_Told]) -> None:
        with self._database.write() as session:
            trail.append_all(session, [row for row, _ in told])
            observation.append(session, [answer for _, answer in told if answer is not None])
