"""Periodic integrity check: re-hash every artefact and record the result."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from redis import RedisError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from model_store.errors import ArtefactWithdrawn, LocumStoreError
from model_store.store import Store
from service.database import Database, Verification
from service.errors import BrokerError
from service.runtime.metrics import Metrics
from service.runtime.queue import VERIFY_STORE, Queue
from service.settings import Settings

_INTERVAL_SECONDS = 5.0
_log = logging.getLogger("locum.service")


@dataclass(frozen=True)
class StoreVerdict:
    """The result of the latest finished pass; `damaged` maps a reference to its fault."""

    finished_at: datetime
    versions: int
    damaged: dict[str, str]


def verify_store(store: Store, database: Database) -> StoreVerdict:
    """Hash every file of every version that is not withdrawn. Changes nothing in the store.

    The store must be opened for this: one that was used before remembers manifests instead of reading them.
    """
    started = datetime.now(UTC)
    damaged: dict[str, str] = {}
    versions = 0
    for name in store.versions.names():
        for number in store.versions.numbers(name):
            reference = f"{name}@{number}"
            try:
                store.open(reference)
            except ArtefactWithdrawn:
                continue
            except LocumStoreError as error:
                damaged[reference] = str(error)
            versions += 1
    finished = datetime.now(UTC)
    with database.write() as session:
        session.add(
            Verification(started_at=started, finished_at=finished, versions=versions, damaged=damaged)
        )
    return StoreVerdict(finished, versions, damaged)


def latest_verdict(database: Database) -> StoreVerdict | None:
    """Result of the latest pass; None before the first."""
    with database.read() as session:
        row = session.scalars(select(Verification).order_by(Verification.finished_at.desc()).limit(1)).first()
    return None if row is None else StoreVerdict(row.finished_at, row.versions, row.damaged)


class Verifier:
    """The API's side: requests a pass from the worker when one is due, and shows the latest result."""

    def __init__(self, settings: Settings, database: Database, queue: Queue, metrics: Metrics) -> None:
        self._every = timedelta(seconds=settings.verify_every_seconds)
        self._database = database
        self._queue = queue
        self._metrics = metrics

    async def watch(self) -> None:
        """Poll until cancelled. Database and Redis outages are reported by the readiness check."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except (SQLAlchemyError, RedisError, BrokerError) as error:
                _log.debug("the store's verification has to wait: %s", type(error).__name__)
            except Exception:
                # A bug: log it, and keep polling.
                _log.exception("the store's verification: an unexpected error; it is tried again")
            await asyncio.sleep(_INTERVAL_SECONDS)

    def look(self) -> None:
        """Show the latest result, and request a new pass if it is too old."""
        verdict = latest_verdict(self._database)
        if verdict is not None:
            self._metrics.store_verified.set(verdict.finished_at.timestamp())
            self._metrics.store_damaged.set(len(verdict.damaged))
        due = verdict is None or datetime.now(UTC) - verdict.finished_at >= self._every
        if self._every and due:
            self._queue.send_once(VERIFY_STORE, every_seconds=int(self._every.total_seconds()))
