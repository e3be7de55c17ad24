"""Key usage: what is noted, and the drift, against hand-computed cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.manifest import Lineage, NetworkSpec, SsfPoolManifest
from model_store.store import Store
from model_store.task import Task
from service.database import Database, KeyUsage
from service.inference.pool import PoolPick, shares
from service.serving import key_usage
from service.serving.key_usage import Usage, drift, federation_shares, note, recent, rows_of, together

DIGEST = f"sha256:{'a' * 64}"


def pool(usage: tuple[int, ...] | None = (3, 1, 0)) -> Artefact:
    manifest = SsfPoolManifest(
        name="organ",
        task=Task(name="organ", labels={"organ": (1,)}, size=(32, 32)),
        lineage=Lineage(method="fedins", run="r", sites=(), rounds=1, seed=0),
        backbone=DIGEST,
        network=NetworkSpec(name="unet", arguments={}),
        entries=3,
        top=2,
        usage=usage,
    )
    return Artefact("organ", 1, DIGEST, Path(), manifest)


def picked(*entries: int) -> PoolPick:
    return PoolPick(entries, (0.5,) * len(entries))


def row(day: date, scans: int, total: list[float]) -> KeyUsage:
    return KeyUsage(
        hospital="north", digest=DIGEST, day=day, model="organ", version=1, scans=scans, shares=total
    )


def test_usage_shares_count_each_scan_once() -> None:
    assert shares([picked(0, 2)], 3).tolist() == [0.5, 0, 0.5]
    assert shares([picked(0, 2), picked(0, 1)], 3).tolist() == [0.5, 0.25, 0.25]


def test_drift_matches_hand_computed_values() -> None:
    federation = np.array([0.75, 0.25, 0.0])
    assert drift(Usage(4, np.array([3.0, 1, 0])), federation) == pytest.approx(0)
    assert drift(Usage(4, np.array([0.0, 0, 4])), federation) == pytest.approx(1)
    # p = (1, 0), q = (1/2, 1/2): m = (3/4, 1/4), H(m) = 0.811278, H(p) = 0, H(q) = 1
    assert drift(Usage(2, np.array([2.0, 0])), np.array([0.5, 0.5])) == pytest.approx(
        0.811278 - 0.5, abs=1e-6
    )
    assert drift(None, federation) is None
    assert drift(Usage(1, np.ones(3)), None) is None


def test_pool_without_usage_has_no_federation_shares() -> None:
    manifest = pool(None).manifest
    assert isinstance(manifest, SsfPoolManifest)
    assert federation_shares(manifest) is None


def test_noted_scans_add_up_by_day_hospital_and_version(database: Database) -> None:
    for entries in ((0, 1), (0, 2), (0, 1)):
        note(database, "north", pool(), [picked(*entries)])
    note(database, "south", pool(), [picked(1, 2)])
    before = datetime.now(UTC).date() - timedelta(days=key_usage.WINDOW_DAYS)
    with database.write() as session:
        session.add(row(before, 9, [0, 0, 9.0]))
    with database.read() as session:
        (found,) = rows_of(session, "north", "organ", since=before + timedelta(days=1))
        assert len(rows_of(session)) == 3
        assert rows_of(session, "north", "other") == []
    assert (found.scans, found.day) == (3, datetime.now(UTC).date())
    assert found.shares == [1.5, 1.0, 0.5]
    store = cast("Store", SimpleNamespace(by_digest=lambda *_: pool()))
    now = key_usage.drifts(database, store)
    expected = drift(Usage(3, np.array([1.5, 1.0, 0.5])), np.array([0.75, 0.25, 0]))
    assert now["north", "organ@1"] == pytest.approx(expected)
    assert now.keys() == {("north", "organ@1"), ("south", "organ@1")}


def test_concurrent_first_notes_of_a_day_are_both_counted(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    outrun = []

    @contextmanager
    def write() -> Iterator[Session]:
        """As PostgreSQL: both found no row, and this one's insert comes second."""
        if not outrun:
            outrun.append(True)
            note(database, "north", pool(), [picked(0, 1)])
            raise IntegrityError("insert", None, Exception("duplicate key"))
        with database.write() as session:
            yield session

    note(cast("Database", SimpleNamespace(write=write)), "north", pool(), [picked(0, 2)])
    with database.read() as session:
        (found,) = rows_of(session)
    assert (found.scans, found.shares) == (2, [1.0, 0.5, 0.5])
    assert caplog.text == ""


def test_failing_note_is_logged_and_not_raised(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    note(database, "unregistered", pool(), [picked(0, 1)])  # no such hospital: the foreign key refuses
    assert "key usage of hospital unregistered for organ@1 was not noted" in caplog.text
    with database.read() as session:
        assert rows_of(session) == []

    def fail() -> None:
        raise OperationalError("read", None, Exception("gone"))

    assert key_usage.drifts(cast("Database", SimpleNamespace(read=fail)), cast("Store", None)) == {}


def test_usage_window_covers_thirty_days() -> None:
    today = date(2026, 3, 31)
    rows = [row(today - timedelta(days=age), 1, [1.0, 0, 0]) for age in (0, 29, 30, 400)]
    assert recent(rows, today) is not None
    assert together(rows) is not None
    kept = recent(rows, today)
    assert kept is not None
    assert kept.scans == 2
    assert recent(rows[2:], today) is None
