"""Key usage: how often a hospital's scans pick each entry of a pool, and the drift from the federation's
picks.

Every scan picks its own entries of a pool (FedIns). A hospital with scans that pick others than the
federation's training images differs from them. Its *drift*, over all scans of some days, is the
Jensen-Shannon divergence of the two distributions of picks, in bits,

    D = H((p + q) / 2) - (H(p) + H(q)) / 2        0: alike, 1: no entry in common

Of few scans it is too large: even scans of the federation's own pick unevenly. The count is reported with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import StoreError
from model_store.manifest import SsfPoolManifest
from model_store.store import Store
from service.database import Database, KeyUsage
from service.inference.pool import PoolPick, shares

# The newest days that a current drift is taken over: some scans of a small hospital, and not its past.
WINDOW_DAYS = 30

_log = logging.getLogger("locum.drift")


@dataclass(frozen=True)
class Usage:
    """The sum of scans' shares [M], and of how many scans."""

    scans: int
    total: NDArray[np.float64]

    @property
    def shares(self) -> list[float]:
        """Shares of the entries; the sum is 1."""
        return [float(value) for value in self.total / self.scans]


def note(
    database: Database, hospital: str, pool: Artefact[SsfPoolManifest], picked: Sequence[PoolPick]
) -> None:
    """Add one scan to the day. Errors are logged only: they must not block the answer."""
    found = shares(picked, pool.manifest.entries).tolist()
    try:
        try:
            _add(database, hospital, pool, found)
        except IntegrityError:
            # Another process was the first to note a scan of this day, so that now there is a row to add to.
            _add(database, hospital, pool, found)
    except SQLAlchemyError:
        _log.warning("key usage of hospital %s for %s was not noted", hospital, pool, exc_info=True)


def _add(database: Database, hospital: str, pool: Artefact, found: list[float]) -> None:
    today = datetime.now(UTC).date()
    with database.write() as session:
        row = session.get(KeyUsage, (hospital, pool.digest, today), with_for_update=True)
        if row is None:
            row = KeyUsage(
                hospital=hospital,
                digest=pool.digest,
                day=today,
                model=pool.name,
                version=pool.version,
                scans=0,
                shares=[0.0] * len(found),
            )
            session.add(row)
        row.scans += 1
        row.shares = [before + now for before, now in zip(row.shares, found, strict=True)]


def federation_shares(manifest: SsfPoolManifest) -> NDArray[np.float64] | None:
    """Shares in the picks of the federation's training images; None if no site sent its counts."""
    usage = np.array(manifest.usage or (), np.float64)
    return usage / usage.sum() if usage.sum() else None


def rows_of(
    session: Session, hospital: str | None = None, model: str | None = None, since: date | None = None
) -> Sequence[KeyUsage]:
    """List the recorded days, oldest first, from `since` on."""
    query = select(KeyUsage).order_by(KeyUsage.day, KeyUsage.version)
    if since is not None:
        query = query.where(KeyUsage.day >= since)
    if hospital is not None:
        query = query.where(KeyUsage.hospital == hospital)
    if model is not None:
        query = query.where(KeyUsage.model == model)
    return session.scalars(query).all()


def together(rows: Iterable[KeyUsage]) -> Usage | None:
    """Add up several days of one version; None without a day."""
    found = list(rows)
    if not found:
        return None
    return Usage(sum(row.scans for row in found), np.sum([row.shares for row in found], axis=0))


def recent(rows: Iterable[KeyUsage], today: date) -> Usage | None:
    """The days of the window."""
    return together(row for row in rows if row.day >= _first_of_window(today))


def drift(usage: Usage | None, federation: NDArray[np.float64] | None) -> float | None:
    """Jensen-Shannon divergence in bits; None where either is unknown."""
    if usage is None or federation is None:
        return None
    here = np.array(usage.shares)
    apart = _entropy((here + federation) / 2) - (_entropy(here) + _entropy(federation)) / 2
    return float(min(max(apart, 0.0), 1.0))


def drifts(database: Database, store: Store) -> dict[tuple[str, str], float]:
    """(hospital, name@version) -> its drift now, for every pair that had a scan within the window.

    Empty if the database cannot be read: the other metrics are reported.
    """
    found: dict[tuple[str, str], float] = {}
    by_pair: dict[tuple[str, str], list[KeyUsage]] = {}
    try:
        with database.read() as session:
            for row in rows_of(session, since=_first_of_window(datetime.now(UTC).date())):
                by_pair.setdefault((row.hospital, row.digest), []).append(row)
    except SQLAlchemyError:
        return found
    for (hospital, digest), own in sorted(by_pair.items()):
        try:
            manifest = store.by_digest(digest, SsfPoolManifest).manifest
        except StoreError:
            continue
        value = drift(together(own), federation_shares(manifest))
        if value is not None:
            found[hospital, f"{own[0].model}@{own[0].version}"] = value
    return found


def _first_of_window(today: date) -> date:
    return today - timedelta(days=WINDOW_DAYS - 1)


def _entropy(shares_M: NDArray[np.float64]) -> float:
    there = shares_M[shares_M > 0]
    return float(-(there * np.log2(there)).sum())
