"""Scans that are kept: counted, bounded, under no name of a client's, and really gone when they go."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import update

from service.cohorts import cohorts
from service.database import CohortScan, Database, Hospital, Job
from service.errors import (
    CohortDeleted,
    CohortFull,
    CohortInUse,
    CohortUnknown,
    HospitalUnknown,
    ScanNameTaken,
)
from service.runtime.spool import IN_MEMORY_BYTES, Upload
from tests.helpers.service.cohort_bench import Bench, digest


def test_scan_is_stored_under_its_digest_with_owner_only_access(bench: Bench) -> None:
    content = random.Random(0).randbytes(3 * IN_MEMORY_BYTES + 7)
    assert bench.add("mueller.nii", content)
    assert bench.files() == {f"{bench.cohort}/{digest(content)}": content}
    with bench.database.read() as session:
        (row,) = cohorts.scans(session, bench.cohort)
    assert (row.name, row.sha256, row.size) == ("mueller.nii", digest(content), len(content))
    path = bench.settings.state_dir / cohorts.file_of(bench.settings, row, row.name).key
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "name", ["../../../../etc/passwd", "/etc/passwd", "..", "a/b", "C:\\x", "x" * 200, "ä🧠"]
)
def test_scan_name_is_never_used_as_a_path(bench: Bench, name: str, tmp_path: Path) -> None:
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    bench.add(name, b"scan")
    added = {path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".db-wal"} - before
    folder = bench.settings.state_dir / "cohorts" / bench.cohort
    assert added - {tmp_path / "locum.db-shm"} == {folder / digest(b"scan")}
    assert bench.names() == [name]


def test_same_scan_again_is_ignored_and_other_bytes_are_rejected(bench: Bench) -> None:
    assert bench.add("a", b"one")
    assert not bench.add("a", b"one")
    with pytest.raises(ScanNameTaken, match=digest(b"one")[:12]):
        bench.add("a", b"two")
    assert list(bench.files().values()) == [b"one"]


def test_bytes_under_two_names_are_kept_until_both_are_removed(bench: Bench) -> None:
    bench.add("a", b"one")
    bench.add("b", b"one")
    where = (bench.database, bench.settings, "north", bench.cohort)
    cohorts.remove_scan(*where, "a")
    assert (bench.names(), list(bench.files().values())) == (["b"], [b"one"])
    cohorts.remove_scan(*where, "b")
    assert (bench.names(), bench.files()) == ([], {})
    with pytest.raises(CohortUnknown):
        cohorts.remove_scan(*where, "b")


def test_quota_covers_all_cohorts_and_a_rejected_scan_leaves_no_file(
    database: Database, tmp_path: Path
) -> None:
    # One of several hospitals has half of it.
    bench = Bench(database, tmp_path / "state", cohort_quota_bytes=20)
    with database.write() as session:
        other = cohorts.create(session, bench.settings, "north").id
    bench.add("a", b"123456")
    bench.add("a", b"7890", other)
    for cohort in (bench.cohort, other):
        with pytest.raises(CohortFull, match="'north' have 10 bytes, and 1 more are beyond the 10 that"):
            bench.add("b", b"!", cohort)
    assert sorted(bench.files().values()) == [b"123456", b"7890"]
    cohorts.remove(database, bench.settings, "north", other)
    assert bench.add("b", b"!")


def test_quota_is_shared_by_hospitals_of_which_each_has_at_most_half(
    database: Database, tmp_path: Path
) -> None:
    bench = Bench(database, tmp_path / "state", cohort_quota_bytes=20)
    now = datetime.now(UTC)
    with database.write() as session:
        session.add(Hospital(id="west", name="West", site=None, created_at=now, updated_at=now))
    bench.add("a", b"1234567")
    bench.draw("a", b"890")
    with database.write() as session:
        cohorts.check_quota(session, bench.settings, "south", 10)
        with pytest.raises(CohortFull, match="'south' have 0 bytes, and 11 more are beyond the 10"):
            cohorts.check_quota(session, bench.settings, "south", 11)
        south = cohorts.create(session, bench.settings, "south").id
        session.add(CohortScan(cohort=south, name="a", sha256="0" * 64, size=8, format="png", created_at=now))
        session.flush()
        cohorts.check_quota(session, bench.settings, "west", 2)
        # Without what others have.
        with pytest.raises(
            CohortFull, match=r"^expected room for 3 bytes in all cohorts, found less of the 20"
        ):
            cohorts.check_quota(session, bench.settings, "west", 3)


def test_scan_above_max_cohort_scans_is_rejected(database: Database, tmp_path: Path) -> None:
    bench = Bench(database, tmp_path / "state", max_cohort_scans=2)
    bench.add("a", b"1")
    bench.add("b", b"2")
    with pytest.raises(CohortFull, match="LOCUM_MAX_COHORT_SCANS"):
        bench.add("c", b"3")
    with database.read() as session:
        # Asked before the bytes come, a name that is there passes: they may be the same again.
        cohorts.check_room(session, bench.settings, "north", bench.cohort, "b", 1)
        with pytest.raises(CohortFull):
            cohorts.check_room(session, bench.settings, "north", bench.cohort, "c", 1)


def test_scan_on_a_full_disk_is_rejected_and_leaves_no_file(bench: Bench) -> None:
    class OnFullDisk(Upload):
        def chunks(self) -> Iterator[bytes]:
            yield b"the first bytes fit"
            # What a write says on a full disk, from one.
            with Path("/dev/full").open("wb", buffering=0) as full:
                full.write(b"and no more")

    with OnFullDisk(bench.settings.spool) as upload:
        upload.write(b"content")
        with pytest.raises(CohortFull, match="disk is full"):
            cohorts.add_scan(bench.database, bench.settings, "north", bench.cohort, "a", upload, "png")
    assert bench.files() == {}


def test_removed_cohort_loses_its_files_and_keeps_the_deletion_time(bench: Bench) -> None:
    bench.add("a", b"one")
    bench.add("b", b"two")
    cohorts.remove(bench.database, bench.settings, "north", bench.cohort)
    assert bench.files() == {}
    assert not (bench.settings.state_dir / "cohorts" / bench.cohort).exists()
    with bench.database.read() as session:
        deleted = cohorts.get(session, "north", bench.cohort).deleted_at
        assert deleted is not None
        assert cohorts.listed(session, "north", 10) == []
        assert cohorts.scans(session, bench.cohort) == []
    cohorts.remove(bench.database, bench.settings, "north", bench.cohort)
    with bench.database.read() as session:
        assert cohorts.get(session, "north", bench.cohort).deleted_at == deleted
    with pytest.raises(CohortDeleted, match="upload them again"):
        bench.add("c", b"three")
    assert bench.files() == {}


def test_cohort_of_another_hospital_is_not_found(bench: Bench) -> None:
    with bench.database.read() as session:
        with pytest.raises(CohortUnknown, match="'south' has no cohort"):
            cohorts.get(session, "south", bench.cohort)
        with pytest.raises(HospitalUnknown):
            cohorts.listed(session, "nowhere", 10)


@pytest.mark.parametrize("state", ["queued", "running", "cancelling"])
def test_cohort_needed_by_a_job_cannot_be_changed(bench: Bench, state: str) -> None:
    bench.add("a", b"one")
    job_id = bench.job(state)
    where = (bench.database, bench.settings, "north", bench.cohort)
    with pytest.raises(CohortInUse, match=job_id):
        cohorts.remove(*where)
    with pytest.raises(CohortInUse):
        cohorts.remove_scan(*where, "a")
    with pytest.raises(CohortInUse):
        bench.add("b", b"two")
    assert not bench.add("a", b"one")
    assert list(bench.files().values()) == [b"one"]
    with bench.database.write() as session:
        session.execute(update(Job).values(state="failed"))
    assert bench.add("b", b"two")
    cohorts.remove(*where)


def test_scans_added_during_deletion_do_not_remain(bench: Bench) -> None:
    barrier = threading.Barrier(4)
    surprises: list[BaseException] = []

    def add(number: int) -> None:
        barrier.wait(60)
        try:
            for step in range(5):
                bench.add(f"{number}-{step}", f"{number}-{step}".encode())
        except CohortDeleted:
            pass
        except BaseException as error:
            surprises.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    barrier.wait(60)
    cohorts.remove(bench.database, bench.settings, "north", bench.cohort)
    for thread in threads:
        thread.join()
    assert surprises == []
    assert bench.names() == []
    assert bench.files() == {}
