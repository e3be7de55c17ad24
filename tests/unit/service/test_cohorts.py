"""Scans that are kept: counted, bounded, under no name of a client's, and really gone when they go."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from service.database import Cohort, Database, Job
from service.errors import (
    CohortFull,
    CohortGone,
    CohortInUse,
    CohortUnknown,
    HospitalUnknown,
    MaskTaken,
    ScanNameTaken,
)
from service.jobs import cohorts, masks, records
from service.jobs.expiry import expire
from service.jobs.folder import JobFolder, StoredResult
from service.settings import Settings
from service.spool import IN_MEMORY_BYTES, Upload, prepare_spool

OLD = datetime.now(UTC) - timedelta(days=365)


class Bench:
    def __init__(self, database: Database, state_dir: Path, **settings: object) -> None:
        self.database = database
        self.settings = Settings(state_dir=state_dir, **settings)  # type: ignore[arg-type]
        prepare_spool(self.settings.spool)
        with database.write() as session:
            self.cohort = cohorts.create(session, self.settings, "north", "first").id

    def add(self, name: str, content: bytes, cohort: str | None = None) -> bool:
        with Upload(self.settings.spool) as upload:
            upload.write(content)
            where = (self.database, self.settings, "north", cohort or self.cohort)
            return cohorts.add_scan(*where, name, upload, "png")[1]

    def files(self) -> dict[str, bytes]:
        """Whatever lies under the folder of cohorts, by its path there."""
        root = self.settings.cohorts
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    def names(self) -> list[str]:
        with self.database.read() as session:
            return [scan.name for scan in cohorts.scans(session, self.cohort)]

    def job(self, state: str = "queued") -> str:
        """A job over the cohort, in that state."""
        with self.database.write() as session:
            asked = {"kind": "adaptation", "hospital": "north", "model": "brain", "parent": "sha256:0"}
            job = records.create(session, self.settings, **asked, cohort=self.cohort, options={})
            job.state = state
            return job.id


@pytest.fixture
def bench(database: Database, tmp_path: Path) -> Bench:
    return Bench(database, tmp_path / "state")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_scan_lies_under_its_digest_and_for_its_owner_alone(bench: Bench) -> None:
    content = random.Random(0).randbytes(3 * IN_MEMORY_BYTES + 7)
    assert bench.add("mueller.nii", content)
    assert bench.files() == {f"{bench.cohort}/{digest(content)}": content}
    with bench.database.read() as session:
        (row,) = cohorts.scans(session, bench.cohort)
    assert (row.name, row.sha256, row.size) == ("mueller.nii", digest(content), len(content))
    path = cohorts.file_of(bench.settings, row, row.name).path
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "name", ["../../../../etc/passwd", "/etc/passwd", "..", "a/b", "C:\\x", "x" * 200, "ä🧠"]
)
def test_a_name_is_never_a_path(bench: Bench, name: str, tmp_path: Path) -> None:
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    bench.add(name, b"scan")
    added = {path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".db-wal"} - before
    assert added - {tmp_path / "locum.db-shm"} == {bench.settings.cohorts / bench.cohort / digest(b"scan")}
    assert bench.names() == [name]


def test_the_same_bytes_again_change_nothing_and_other_bytes_are_refused(bench: Bench) -> None:
    assert bench.add("a", b"one")
    assert not bench.add("a", b"one")
    with pytest.raises(ScanNameTaken, match=digest(b"one")[:12]):
        bench.add("a", b"two")
    assert list(bench.files().values()) == [b"one"]


def test_the_same_bytes_under_two_names_are_kept_until_both_are_gone(bench: Bench) -> None:
    bench.add("a", b"one")
    bench.add("b", b"one")
    where = (bench.database, bench.settings, "north", bench.cohort)
    cohorts.remove_scan(*where, "a")
    assert (bench.names(), list(bench.files().values())) == (["b"], [b"one"])
    cohorts.remove_scan(*where, "b")
    assert (bench.names(), bench.files()) == ([], {})
    with pytest.raises(CohortUnknown):
        cohorts.remove_scan(*where, "b")


def test_the_quota_is_over_all_cohorts_and_a_refused_scan_leaves_nothing(
    database: Database, tmp_path: Path
) -> None:
    bench = Bench(database, tmp_path / "state", cohort_quota_bytes=10)
    with database.write() as session:
        other = cohorts.create(session, bench.settings, "north").id
    bench.add("a", b"123456")
    bench.add("a", b"7890", other)
    for cohort in (bench.cohort, other):
        with pytest.raises(CohortFull, match="LOCUM_COHORT_QUOTA_BYTES"):
            bench.add("b", b"!", cohort)
    assert sorted(bench.files().values()) == [b"123456", b"7890"]
    cohorts.remove(database, bench.settings, "north", other)
    assert bench.add("b", b"!")


def test_a_cohort_has_so_many_scans_and_no_more(database: Database, tmp_path: Path) -> None:
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


def test_a_full_disk_is_said_and_leaves_nothing(bench: Bench) -> None:
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


def test_deleting_a_cohort_removes_its_files_and_keeps_when(bench: Bench) -> None:
    bench.add("a", b"one")
    bench.add("b", b"two")
    cohorts.remove(bench.database, bench.settings, "north", bench.cohort)
    assert bench.files() == {}
    assert not (bench.settings.cohorts / bench.cohort).exists()
    with bench.database.read() as session:
        deleted = cohorts.get(session, "north", bench.cohort).deleted_at
        assert deleted is not None
        assert cohorts.listed(session, "north") == []
        assert cohorts.scans(session, bench.cohort) == []
    cohorts.remove(bench.database, bench.settings, "north", bench.cohort)
    with bench.database.read() as session:
        assert cohorts.get(session, "north", bench.cohort).deleted_at == deleted
    with pytest.raises(CohortGone, match="upload them again"):
        bench.add("c", b"three")
    assert bench.files() == {}


def test_a_cohort_is_one_hospitals(bench: Bench) -> None:
    with bench.database.read() as session:
        with pytest.raises(CohortUnknown, match="'south' has no cohort"):
            cohorts.get(session, "south", bench.cohort)
        with pytest.raises(HospitalUnknown):
            cohorts.listed(session, "nowhere")


@pytest.mark.parametrize("state", ["queued", "running", "cancelling"])
def test_scans_stay_as_they_are_while_a_job_needs_them(bench: Bench, state: str) -> None:
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


def test_what_is_added_while_the_cohort_is_deleted_does_not_stay(bench: Bench) -> None:
    barrier = threading.Barrier(4)
    surprises: list[BaseException] = []

    def add(number: int) -> None:
        barrier.wait(60)
        try:
            for step in range(5):
                bench.add(f"{number}-{step}", f"{number}-{step}".encode())
        except CohortGone:
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


def test_expired_scans_are_deleted_unless_a_job_needs_them(bench: Bench) -> None:
    bench.add("a", b"one")
    with bench.database.write() as session:
        kept = cohorts.create(session, bench.settings, "north").id
    bench.add("a", b"kept", kept)
    job_id = bench.job()
    with bench.database.write() as session:
        session.execute(update(Cohort).where(Cohort.id == bench.cohort).values(expires_at=OLD))
    expire(bench.database, bench.settings)
    assert sorted(bench.files().values()) == [b"kept", b"one"]
    with bench.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(state="succeeded"))
    expire(bench.database, bench.settings)
    assert list(bench.files().values()) == [b"kept"]
    with bench.database.read() as session:
        assert cohorts.get(session, "north", bench.cohort).deleted_at is not None


def test_files_that_nobody_knows_of_are_swept(bench: Bench) -> None:
    """As a process leaves them that is killed between the file and its row, or while it writes."""
    bench.add("a", b"one")
    folder = bench.settings.cohorts / bench.cohort
    (folder / digest(b"lost")).write_bytes(b"lost")
    cut_off, under_way = (bench.settings.cohorts / ".incoming" / name for name in "12")
    for path in (cut_off, under_way):
        path.write_bytes(b"half")
    os.utime(cut_off, (time.time() - 7200, time.time() - 7200))
    strange = bench.settings.cohorts / ("0" * 32)
    strange.mkdir()
    (strange / "scan").write_bytes(b"of no cohort")
    expire(bench.database, bench.settings)
    assert sorted(bench.files()) == sorted([f"{bench.cohort}/{digest(b'one')}", ".incoming/2"])


def test_the_files_of_a_job_expire_after_its_end(bench: Bench) -> None:
    over, running = bench.job("succeeded"), bench.job("running")
    for job_id in (over, running, "f" * 32):
        folder = JobFolder(bench.settings.state_dir, job_id)
        folder.write(folder.pictures / "1.png", b"picture")
    expire(bench.database, bench.settings)
    assert len(list(bench.settings.jobs.iterdir())) == 3
    with bench.database.write() as session:
        session.execute(update(Job).values(expires_at=OLD))
    os.utime(bench.settings.jobs / ("f" * 32), (0, 0))
    expire(bench.database, bench.settings)
    assert [path.name for path in bench.settings.jobs.iterdir()] == [running]


def test_what_only_an_unfinished_job_needs_does_not_outlive_it(bench: Bench) -> None:
    over, running = bench.job("cancelled"), bench.job("running")
    for job_id in (over, running):
        folder = JobFolder(bench.settings.state_dir, job_id)
        for path in (folder.checkpoint, folder.input, folder.path / "result"):
            folder.write(path, b"of a patient")
    expire(bench.database, bench.settings)
    left = {job: {path.name for path in (bench.settings.jobs / job).iterdir()} for job in (over, running)}
    assert left == {over: {"result"}, running: {"checkpoint", "input", "result"}}


def test_a_jobs_folder_is_private_and_its_result_whole_or_not_there(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "a" * 32)
    assert not folder.exists
    assert folder.read_result() is None
    folder.write(folder.path / "result", b"half a result")
    assert folder.read_result() is None
    result = StoredResult(b"mask", "image/png", {"Locum-Model": "brain@1"})
    folder.write_result(result)
    assert folder.read_result() == result
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.path.iterdir()} == {0o600}
    folder.delete()
    folder.delete()
    assert not folder.exists


@pytest.mark.parametrize("job_id", ["../../etc", "", "A" * 32, "a" * 33])
def test_what_is_no_id_makes_no_folder(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(ValueError, match="no id of a job"):
        JobFolder(tmp_path, job_id)


def draw(bench: Bench, name: str, content: bytes) -> bool:
    where = (bench.database, bench.settings, "north", bench.cohort)
    with Upload(bench.settings.spool) as upload, bench.database.read() as session:
        upload.write(content)
        scan = masks.check_room(session, bench.settings, "north", bench.cohort, name, len(content))
    with Upload(bench.settings.spool) as upload:
        upload.write(content)
        return masks.add_mask(*where, scan, upload, masks.DecodedMask("png", [0, 1]))[1]


def test_a_mask_goes_with_its_scan_and_shared_bytes_when_nobody_names_them(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.add(name, name.encode())
        assert draw(bench, name, b"empty")
    assert not draw(bench, "a", b"empty")
    where = (bench.database, bench.settings, "north", bench.cohort)
    with pytest.raises(MaskTaken, match=digest(b"empty")[:12]):
        draw(bench, "a", b"another")
    with bench.database.read() as session:
        assert cohorts.totals(session, [bench.cohort]) == {bench.cohort: (2, 2 + 2 * len(b"empty"))}
        assert list(masks.of_cohort(session, bench.cohort)) == ["a", "b"]
    masks.remove_mask(*where, "a")
    with pytest.raises(CohortUnknown, match="no mask"):
        masks.remove_mask(*where, "a")
    assert sorted(bench.files().values()) == [b"a", b"b", b"empty"]
    expire(bench.database, bench.settings)
    assert sorted(bench.files().values()) == [b"a", b"b", b"empty"]
    cohorts.remove_scan(*where, "b")
    assert list(bench.files().values()) == [b"a"]
    draw(bench, "a", b"target")
    with bench.database.read() as session:
        file = cohorts.file_of(bench.settings, masks.of_cohort(session, bench.cohort)["a"], "a")
    assert file.read() == b"target"
    file.path.unlink()
    with pytest.raises(CohortGone, match="the mask of scan 'a' is not on the disk"):
        file.read()
    cohorts.remove(*where)
    assert bench.files() == {}


def test_masks_are_bounded_and_wait_for_jobs(database: Database, tmp_path: Path) -> None:
    bench = Bench(database, tmp_path / "state", cohort_quota_bytes=10)
    bench.add("a", b"1234567")
    with pytest.raises(CohortFull, match="LOCUM_COHORT_QUOTA_BYTES"):
        draw(bench, "a", b"mask")
    draw(bench, "a", b"123")
    with pytest.raises(CohortFull):
        bench.add("b", b"1")
    with pytest.raises(CohortUnknown):
        draw(bench, "b", b"")
    bench.job("running")
    with pytest.raises(CohortInUse):
        masks.remove_mask(bench.database, bench.settings, "north", bench.cohort, "a")
    assert not draw(bench, "a", b"123")
