"""Scans of viewers: bounded, expiring, and each caller's own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from service.database import Caller
from service.errors import ViewerQuotaExceeded, ViewerScanUnknown
from service.runtime.spool import Upload, prepare_spool
from service.settings import Settings
from service.viewers.scans import ViewerScan, ViewerScans, sweep

ADA = Caller("key:ada", frozenset({"reader"}), frozenset({"north"}))
BOB = Caller("key:bob", frozenset({"reader"}), frozenset({"north"}))
# A later key with the name of an earlier one, for another hospital.
OTHER_ADA = Caller("key:ada", frozenset({"reader"}), frozenset({"south"}))


def settings_of(folder: Path, **values: object) -> Settings:
    settings = Settings(store=folder / "store", state_dir=folder, **values)  # type: ignore[arg-type]
    prepare_spool(settings.spool)
    return settings


def add(scans: ViewerScans, spool: Path, content: bytes = b"scan", image: str | None = None) -> ViewerScan:
    with Upload(spool) as upload:
        upload.write(content)
        return scans.add(upload, image, ("nifti", None))


def age(scan: ViewerScan, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(scan.folder / "about.json", (then, then))


def test_scan_is_found_by_its_caller_alone(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    made = add(ViewerScans(settings, ADA), settings.spool, b"of ada", image="a scan")
    assert ViewerScans(settings, ADA).get(made.id).read() == b"of ada"
    assert ViewerScans(settings, ADA).find("a scan") == made
    for caller in (BOB, OTHER_ADA):
        scans = ViewerScans(settings, caller)
        assert scans.all() == []
        for asked in (made.id, "a scan", "../" + made.id, ""):
            with pytest.raises(ViewerScanUnknown):
                scans.get(asked)
            with pytest.raises(ViewerScanUnknown):
                scans.find(asked)


def test_files_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    made = add(ViewerScans(settings, ADA), settings.spool)
    for folder in (settings.viewer_scans, made.folder.parent, made.folder):
        assert folder.stat().st_mode & 0o077 == 0


def test_scan_expires_after_its_last_use(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, viewer_scan_minutes=1)
    scans = ViewerScans(settings, ADA)
    made = add(scans, settings.spool, image="a")
    age(made, 59)
    assert scans.get(made.id).used < time.time() - 50
    scans.get(made.id, use=True)
    assert scans.get(made.id).used > time.time() - 50
    age(made, 61)
    assert scans.all() == []
    with pytest.raises(ViewerScanUnknown):
        scans.get(made.id)
    sweep(settings.viewer_scans)
    assert not made.folder.exists()
    with pytest.raises(ViewerScanUnknown):
        made.read()


def test_viewer_may_shorten_the_lifetime_and_not_extend_it(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, viewer_scan_minutes=1)
    for asked, lifetime in ((5.0, 5.0), (1e9, 60.0), (None, 60.0)):
        with Upload(settings.spool) as upload:
            upload.write(b"x")
            found = ViewerScans(settings, ADA).add(upload, None, ("nifti", None), asked)
        assert found.lifetime == lifetime


def test_least_recently_used_scan_of_the_caller_makes_room(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, max_viewer_scans=3)
    scans, others = ViewerScans(settings, ADA), ViewerScans(settings, BOB)
    other = add(others, settings.spool)
    made = [add(scans, settings.spool) for _ in range(3)]
    for seconds, scan in zip((10, 30, 20), made, strict=True):
        age(scan, seconds)
    age(other, 60)
    newest = add(scans, settings.spool)
    assert {scan.id for scan in scans.all()} == {made[0].id, made[2].id, newest.id}
    assert len(others.all()) == 1


def test_bytes_of_all_callers_are_bounded(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, viewer_quota_bytes=100)
    scans, others = ViewerScans(settings, ADA), ViewerScans(settings, BOB)
    add(others, settings.spool, bytes(40))
    first = add(scans, settings.spool, bytes(50))
    age(first, 5)
    second = add(scans, settings.spool, bytes(60))
    assert [scan.id for scan in scans.all()] == [second.id]
    with pytest.raises(ViewerQuotaExceeded) as refused:
        add(scans, settings.spool, bytes(61))
    # Numbers would say how much others hold.
    assert not any(character.isdigit() for character in str(refused.value))
    # A rejected scan leaves no file, and takes no other's place.
    assert [scan.id for scan in scans.all()] == [second.id]
    assert len(list(settings.viewer_scans.glob("*/*/scan"))) == 2
    assert list(settings.viewer_scans.glob("new-*")) == []


def test_scan_with_the_same_image_is_replaced(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    scans = ViewerScans(settings, ADA)
    add(scans, settings.spool, b"old", image="a")
    add(scans, settings.spool, b"unnamed")
    add(scans, settings.spool, b"new", image="a")
    assert scans.find("a").read() == b"new"
    assert len(scans.all()) == 2


def test_sweep_deletes_what_a_power_cut_left(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    scans = ViewerScans(settings, ADA)
    kept, cut = add(scans, settings.spool), add(scans, settings.spool)
    (cut.folder / "about.json").write_bytes(b"")
    aside = settings.viewer_scans / "new-0"
    aside.mkdir()
    sweep(settings.viewer_scans)
    assert cut.folder.exists()
    assert aside.exists()
    for folder in (cut.folder, aside):
        os.utime(folder, (0, 0))
    sweep(settings.viewer_scans)
    assert [scan.id for scan in scans.all()] == [kept.id]
    assert not cut.folder.exists()
    assert not aside.exists()
