"""Expired files are deleted, files that a job or another database needs are kept, orphans are swept."""

from __future__ import annotations

import errno
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from service.cohorts import cohorts
from service.database import Cohort, Database, Job, upgrade
from service.expiry import expire
from service.files.folder import FilesFolder
from service.jobs.files import JobFolder, StoredResult
from tests.helpers.service.cohort_bench import Bench, digest

OLD = datetime.now(UTC) - timedelta(days=365)


def test_expired_cohort_is_deleted_unless_a_job_needs_it(bench: Bench) -> None:
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


def test_orphaned_cohort_files_are_deleted(bench: Bench) -> None:
    """As a process leaves them that is killed between the file and its row, or while it writes."""
    bench.add("a", b"one")
    folder = bench.settings.state_dir / "cohorts" / bench.cohort
    (folder / digest(b"lost")).write_bytes(b"lost")
    cut_off, under_way = (bench.settings.state_dir / "cohorts" / ".incoming" / name for name in "12")
    for path in (cut_off, under_way):
        path.write_bytes(b"half")
    os.utime(cut_off, (time.time() - 7200, time.time() - 7200))
    expire(bench.database, bench.settings)
    assert sorted(bench.files()) == sorted([f"{bench.cohort}/{digest(b'one')}", ".incoming/2"])


def test_expire_beside_another_database_keeps_the_files_of_the_first(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a forgotten LOCUM_DATABASE_URL, or with LOCUM_FILES of another service."""
    bench.add("a", b"one")
    job_id = bench.job()
    folder = JobFolder(bench.settings.open_files(), job_id)
    folder.write(folder.INPUT, b"of a patient")
    os.utime(bench.settings.state_dir / "jobs" / job_id, (time.time() - 7200, time.time() - 7200))
    second = Database(f"sqlite:///{tmp_path / 'second.db'}")
    upgrade(second)
    for _ in range(2):
        expire(second, bench.settings)
    assert bench.files() == {f"{bench.cohort}/{digest(b'one')}": b"one"}
    assert folder.names == [folder.INPUT]
    assert caplog.text.count(bench.cohort) == 1
    assert "compare LOCUM_DATABASE_URL and LOCUM_FILES" in caplog.text
    second.dispose()


def test_orphaned_job_folder_is_deleted_after_the_lifetime_of_job_files(bench: Bench) -> None:
    """As a request leaves it that is cut off before its row."""
    lifetime = bench.settings.job_files_lifetime_days * 86400
    for job_id, age in (("e" * 32, lifetime - 3600), ("f" * 32, lifetime + 3600)):
        JobFolder(bench.settings.open_files(), job_id).write("input", b"of a patient")
        os.utime(bench.settings.state_dir / "jobs" / job_id, (0, time.time() - age))
    expire(bench.database, bench.settings)
    assert [path.name for path in (bench.settings.state_dir / "jobs").iterdir()] == ["e" * 32]


def test_job_files_are_deleted_when_the_ended_job_expires(bench: Bench) -> None:
    over, running = bench.job("succeeded"), bench.job("running")
    for job_id in (over, running, "f" * 32):
        folder = JobFolder(bench.settings.open_files(), job_id)
        folder.write("pictures/1.png", b"picture")
    expire(bench.database, bench.settings)
    assert len(list((bench.settings.state_dir / "jobs").iterdir())) == 3
    with bench.database.write() as session:
        session.execute(update(Job).values(expires_at=OLD))
    os.utime(bench.settings.state_dir / "jobs" / ("f" * 32), (0, 0))
    expire(bench.database, bench.settings)
    assert [path.name for path in (bench.settings.state_dir / "jobs").iterdir()] == [running]


def test_checkpoint_and_input_of_an_ended_job_are_deleted(bench: Bench) -> None:
    over, running = bench.job("cancelled"), bench.job("running")
    for job_id in (over, running):
        folder = JobFolder(bench.settings.open_files(), job_id)
        for name in (folder.CHECKPOINT, folder.INPUT, "result"):
            folder.write(name, b"of a patient")
    expire(bench.database, bench.settings)
    left = {job: JobFolder(bench.settings.open_files(), job).names for job in (over, running)}
    assert left == {over: ["result"], running: ["checkpoint", "input", "result"]}


def test_job_folder_is_private_and_reads_only_whole_results(tmp_path: Path) -> None:
    folder = JobFolder(FilesFolder(tmp_path), "a" * 32)
    assert not folder.names
    assert folder.read_result() is None
    folder.write("result", b"half a result")
    assert folder.read_result() is None
    result = StoredResult(b"mask", "image/png", {"Locum-Model": "brain@1"})
    folder.write_result(result)
    assert folder.read_result() == result
    path = tmp_path / "jobs" / ("a" * 32)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    folder.delete()
    folder.delete()
    assert not folder.names


def test_delete_unfinished_tolerates_a_vanished_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JobFolder(FilesFolder(tmp_path), "a" * 32)
    folder.write(folder.INPUT, b"of a patient")

    def gone(*_: object) -> list[Path]:
        folder.delete()
        raise FileNotFoundError

    monkeypatch.setattr(Path, "rglob", gone)
    folder.delete_unfinished()
    assert not folder.names


@pytest.mark.parametrize("job_id", ["../../etc", "", "A" * 32, "a" * 33])
def test_job_folder_of_an_invalid_id_is_rejected(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(ValueError, match="no id of a job"):
        JobFolder(FilesFolder(tmp_path), job_id)


def test_undeletable_cohort_does_not_block_other_cohorts(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.add("a", b"one")
    with bench.database.write() as session:
        stuck = cohorts.create(session, bench.settings, "north").id
        session.execute(update(Cohort).values(expires_at=OLD))
        session.execute(update(Cohort).where(Cohort.id == stuck).values(expires_at=OLD - timedelta(days=1)))
    # No folder, so that removing it as one is an OSError, for root too.
    (bench.settings.state_dir / "cohorts" / stuck).write_bytes(b"")
    odd = bench.settings.state_dir / "cohorts" / ".incoming" / "odd"
    odd.mkdir(parents=True, exist_ok=True)
    os.utime(odd, (0, 0))
    expire(bench.database, bench.settings)
    assert list(bench.files()) == [stuck]
    assert "what was left half written cannot be deleted" in caplog.text
    assert f"the scans of cohort {stuck} cannot be deleted: NotADirectoryError" in caplog.text
    with bench.database.read() as session:
        assert cohorts.get(session, "north", bench.cohort).deleted_at is not None
        assert cohorts.get(session, "north", stuck).deleted_at is None
    (bench.settings.state_dir / "cohorts" / stuck).unlink()
    expire(bench.database, bench.settings)
    with bench.database.read() as session:
        assert cohorts.get(session, "north", stuck).deleted_at is not None


def test_undeletable_job_and_orphaned_file_do_not_block_others(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, due = bench.job("failed"), bench.job("failed")
    JobFolder(bench.settings.open_files(), stuck).write("checkpoint", b"of a patient")
    folder = JobFolder(bench.settings.open_files(), due)
    folder.write("result", b"of a patient")
    with bench.database.write() as session:
        session.execute(update(Job).where(Job.id == due).values(expires_at=OLD))
    with bench.database.write() as session:
        odd = cohorts.create(session, bench.settings, "north").id
    orphan, kept = (bench.settings.state_dir / "cohorts" / of / "scan" for of in (bench.cohort, odd))
    for path in (orphan, kept):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"of no scan")
    remove = FilesFolder.remove

    def on_a_broken_disk(self: FilesFolder, *keys: str) -> None:
        if any(stuck in key or odd in key for key in keys):
            raise OSError(errno.EIO, "Input/output error")
        remove(self, *keys)

    monkeypatch.setattr(FilesFolder, "remove", on_a_broken_disk)
    expire(bench.database, bench.settings)
    assert not folder.names
    assert not orphan.exists()
    assert f"the files of job {stuck} cannot be deleted" in caplog.text
    assert f"the files of cohort {odd} cannot be deleted" in caplog.text


def test_partial_files_of_a_killed_worker_are_deleted(bench: Bench) -> None:
    folder = JobFolder(bench.settings.open_files(), bench.job("succeeded"))
    for name in (".checkpoint.1f", ".input.2f", "pictures/.1.png.3f"):
        folder.write(name, b"half")
    folder.write("pictures/1.png", b"whole")
    expire(bench.database, bench.settings)
    assert folder.names == ["pictures/1.png"]


def test_job_folder_is_deleted_despite_a_concurrent_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JobFolder(FilesFolder(tmp_path), "a" * 32)
    for name in ("input", "result", "result.json"):
        folder.write(name, b"of a patient")
    unlink = os.unlink
    faster = True

    def second(path: str, *, dir_fd: int | None = None) -> None:
        nonlocal faster
        if faster:
            faster = False
            unlink(path, dir_fd=dir_fd)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", second)
    folder.delete()
    assert not faster
    assert not any((tmp_path / "jobs").iterdir())
