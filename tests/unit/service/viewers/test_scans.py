"""Scans of viewers: bounded, expiring, and each caller's own."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import delete, select

from service.database import Caller, Database, Hospital, ViewerScanRow
from service.errors import FilesUnavailable, ViewerQuotaExceeded, ViewerScanUnknown
from service.files.folder import FilesFolder
from service.runtime.spool import Upload, prepare_spool
from service.settings import Settings
from service.viewers.scans import ViewerScan, ViewerScans, sweep

ADA = Caller("key:ada", frozenset({"reader"}), frozenset({"north"}))
BOB = Caller("key:bob", frozenset({"reader"}), frozenset({"north"}))
# A later key with the name of an earlier one, for another hospital.
OTHER_ADA = Caller("key:ada", frozenset({"reader"}), frozenset({"south"}))


class Place:
    """A database and a state folder that viewers send scans to."""

    def __init__(self, database: Database, state_dir: Path, **values: object) -> None:
        self.database = database
        self.settings = Settings(store=state_dir / "store", state_dir=state_dir, **values)  # type: ignore[arg-type]
        prepare_spool(self.settings.spool)

    def of(self, caller: Caller) -> ViewerScans:
        return ViewerScans(self.database.for_caller(caller), self.settings)

    def add(
        self,
        caller: Caller,
        content: bytes = b"scan",
        image: str | None = None,
        series: str | None = None,
        lifetime: float | None = None,
    ) -> ViewerScan:
        with Upload(self.settings.spool) as upload:
            upload.write(content)
            return self.of(caller).add(upload, image, ("nifti", series), lifetime)

    def age(self, scan: ViewerScan, seconds: float) -> None:
        with self.database.write() as session:
            row = session.get_one(ViewerScanRow, scan.id)
            row.used_at = datetime.now(UTC) - timedelta(seconds=seconds)
            row.expires_at = row.used_at + timedelta(seconds=scan.lifetime)

    def sweep(self) -> None:
        sweep(self.database, self.settings)

    def files(self) -> list[str]:
        return self.settings.open_files().names("viewers")

    def rows(self) -> set[str]:
        with self.database.read() as session:
            return set(session.scalars(select(ViewerScanRow.id)))


def keys(*scans: ViewerScan) -> list[str]:
    return sorted(f"{scan.id}/scan" for scan in scans)


def test_scan_is_found_by_its_caller_alone(database: Database, tmp_path: Path) -> None:
    place = Place(database, tmp_path)
    made = place.add(ADA, b"of ada", image="a scan")
    assert place.of(ADA).get(made.id).read() == b"of ada"
    assert place.of(ADA).find("a scan").id == made.id
    for caller in (BOB, OTHER_ADA):
        scans = place.of(caller)
        assert scans.all() == []
        for asked in (made.id, "a scan", "../" + made.id, "", "\0"):
            with pytest.raises(ViewerScanUnknown):
                scans.get(asked)
            with pytest.raises(ViewerScanUnknown):
                scans.get(asked, use=True)
            with pytest.raises(ViewerScanUnknown):
                scans.find(asked)


def test_names_of_viewers_and_headers_are_kept_whatever_they_hold(database: Database, tmp_path: Path) -> None:
    place = Place(database, tmp_path)
    for odd in ("\0", "x" * 300, "'\u202e%"):
        made = place.add(ADA, image=odd, series=f"{odd}1")
        assert (place.of(ADA).find(odd).id, place.of(ADA).find(f"{odd}1").id) == (made.id, made.id)


def test_files_are_readable_by_their_owner_alone(database: Database, tmp_path: Path) -> None:
    place = Place(database, tmp_path)
    place.add(ADA)
    for path in (tmp_path / "viewers", *(tmp_path / "viewers").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0


def test_scan_expires_after_its_last_use(database: Database, tmp_path: Path) -> None:
    place = Place(database, tmp_path, viewer_scan_minutes=1)
    made, shorter = place.add(ADA, image="a"), place.add(ADA, lifetime=40)
    for scan in (made, shorter):
        place.age(scan, 30)
        before = datetime.now(UTC) - timedelta(seconds=30)
        assert place.of(ADA).get(scan.id).used_at < before
        assert place.of(ADA).get(scan.id, use=True).used_at > before
        found = place.of(ADA).get(scan.id)
        assert (found.used_at > before, found.lifetime) == (True, scan.lifetime)
        place.age(scan, scan.lifetime + 1)
        with pytest.raises(ViewerScanUnknown):
            place.of(ADA).get(scan.id, use=True)
    assert place.of(ADA).all() == []
    place.sweep()
    assert (place.files(), place.rows()) == ([], set())
    with pytest.raises(ViewerScanUnknown):
        made.read()


def test_viewer_may_shorten_the_lifetime_and_not_extend_it(database: Database, tmp_path: Path) -> None:
    place = Place(database, tmp_path, viewer_scan_minutes=1)
    for asked, lifetime in ((5.0, 5.0), (1e19, 60.0), (None, 60.0)):
        assert place.add(ADA, lifetime=asked).lifetime == lifetime


def test_least_recently_used_scan_of_the_caller_makes_room(database: Database, tmp_path: Path) -> None:
    place = Place(database, tmp_path, max_viewer_scans=3)
    other = place.add(BOB)
    made = [place.add(ADA) for _ in range(3)]
    for seconds, scan in zip((10, 30, 20), made, strict=True):
        place.age(scan, seconds)
    place.age(other, 60)
    newest = place.add(ADA)
    assert {scan.id for scan in place.of(ADA).all()} == {made[0].id, made[2].id, newest.id}
    assert [scan.id for scan in place.of(BOB).all()] == [other.id]
    assert place.files() == keys(made[0], made[2], newest, other)


def test_bytes_of_all_callers_are_bounded(database: Database, tmp_path: Path) -> None:
    with database.write() as session:
        session.execute(delete(Hospital).where(Hospital.id == "south"))
    place = Place(database, tmp_path, cohort_quota_bytes=100)
    other = place.add(BOB, bytes(40))
    place.age(place.add(ADA, bytes(50)), 5)
    second = place.add(ADA, bytes(60))
    assert [scan.id for scan in place.of(ADA).all()] == [second.id]
    with pytest.raises(ViewerQuotaExceeded) as refused:
        place.add(ADA, bytes(61))
    # Numbers would say how much others hold.
    assert not any(character.isdigit() for character in str(refused.value))
    # A rejected scan leaves no file, and takes no other's place.
    assert [scan.id for scan in place.of(ADA).all()] == [second.id]
    assert place.files() == keys(second, other)
    place.age(other, other.lifetime + 1)
    largest = place.add(ADA, bytes(100))
    assert place.files() == keys(largest)


def test_hospital_has_half_of_the_quota_where_several_are_registered(
    database: Database, tmp_path: Path
) -> None:
    place = Place(database, tmp_path, cohort_quota_bytes=100)
    place.add(BOB, bytes(20))
    own = place.add(ADA, bytes(30))
    with pytest.raises(ViewerQuotaExceeded):
        place.add(ADA, bytes(31))
    assert [scan.id for scan in place.of(ADA).all()] == [own.id]
    place.add(OTHER_ADA, bytes(50))


def test_scan_with_the_same_image_is_replaced(database: Database, tmp_path: Path) -> None:
    place = Place(database, tmp_path)
    place.add(ADA, b"old", image="a")
    unnamed, new = place.add(ADA, b"unnamed"), place.add(ADA, b"new", image="a")
    assert place.of(ADA).find("a").read() == b"new"
    assert place.files() == keys(unnamed, new)


def test_removed_scan_leaves_neither_file_nor_row(database: Database, tmp_path: Path) -> None:
    place = Place(database, tmp_path)
    kept, removed = place.add(ADA), place.add(ADA)
    place.of(ADA).remove(removed)
    assert (place.files(), place.rows()) == (keys(kept), {kept.id})


def test_sweep_deletes_what_killed_processes_and_earlier_versions_left(
    database: Database, tmp_path: Path
) -> None:
    place = Place(database, tmp_path)
    kept = place.add(ADA)
    # The second belongs to a request that has not committed its row yet.
    orphan, under_way = "e" * 32, "f" * 32
    for scan_id in (orphan, under_way):
        place.settings.open_files().write(f"viewers/{scan_id}/scan", b"of a patient")
    cut_off = tmp_path / "viewers" / ".incoming" / "1"
    cut_off.write_bytes(b"half")
    for path in (tmp_path / "viewers" / orphan, cut_off, tmp_path / "viewers" / kept.id):
        os.utime(path, (0, time.time() - 7200))
    earlier = tmp_path / "viewer-scans" / ("a" * 32) / ("b" * 32)
    earlier.mkdir(parents=True)
    (earlier / "scan").write_bytes(b"of a patient")
    place.sweep()
    assert place.files() == [*keys(kept), f"{under_way}/scan"]
    assert not (tmp_path / "viewer-scans").exists()


def test_scan_whose_file_cannot_be_deleted_keeps_its_row_and_blocks_no_other(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(database, tmp_path)
    stuck, other = place.add(ADA), place.add(ADA)
    for scan in (stuck, other):
        place.age(scan, scan.lifetime + 1)
    remove = FilesFolder.remove_folder

    def on_a_broken_disk(self: FilesFolder, folder: str) -> None:
        if stuck.id in folder:
            raise FilesUnavailable("broken")
        remove(self, folder)

    monkeypatch.setattr(FilesFolder, "remove_folder", on_a_broken_disk)
    newest = place.add(BOB)
    assert place.rows() == {stuck.id, newest.id}
    assert f"the viewer's scan {stuck.id} cannot be deleted: FilesUnavailable" in caplog.text
    monkeypatch.undo()
    place.sweep()
    assert place.files() == keys(newest)
