"""The contract of the files of patients, in a folder and in a bucket of an S3 server."""

from __future__ import annotations

import os
import time
from pathlib import Path

import obstore
import pytest

from model_store.bucket import connect
from service.errors import FileDamaged, FilesUnavailable
from service.files import Files, open_files
from service.files.bucket import FilesBucket

A, B = "a" * 32, "b" * 32


@pytest.fixture(params=["folder", "bucket"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "folder":
        return open_files(tmp_path / "files")
    return open_files(request.getfixturevalue("bucket_url"))


def test_written_file_is_read_listed_and_removed(files: Files) -> None:
    files.check()
    assert files.read(f"jobs/{A}/input") is None
    assert (files.names(f"jobs/{A}"), files.folders("jobs")) == ([], [])
    before = time.time() - 2
    for key in ("input", "pictures/1-after.png"):
        files.write(f"jobs/{A}/{key}", key.encode())
    files.write(f"jobs/{A}/input", b"newer")
    files.write(f"jobs/{B}/input", b"other")
    assert files.read(f"jobs/{A}/input") == b"newer"
    assert files.names(f"jobs/{A}") == ["input", "pictures/1-after.png"]
    found = dict(files.folders("jobs"))
    assert found.keys() == {A, B}
    assert all(before < changed < time.time() + 2 for changed in found.values())
    files.remove(f"jobs/{A}/input", f"jobs/{A}/never-written")
    files.remove()
    assert files.names(f"jobs/{A}") == ["pictures/1-after.png"]
    for _ in range(2):
        files.remove_folder(f"jobs/{A}")
    assert [name for name, _ in files.folders("jobs")] == [B]
    assert files.read(f"jobs/{B}/input") == b"other"


def test_staged_file_is_kept_under_its_key_or_deleted(files: Files) -> None:
    with files.stage("cohorts", iter([b"one", b"two"])) as staged:
        assert files.read(f"cohorts/{A}/key") is None
        staged.keep(f"cohorts/{A}/key")
    with files.stage("cohorts", [b"rejected"]):
        pass
    assert files.read(f"cohorts/{A}/key") == b"onetwo"
    assert files.names("cohorts") == [f"{A}/key"]


def test_created_file_is_not_replaced(files: Files) -> None:
    assert files.create("dicom-uid.key", b"first") == b"first"
    assert files.create("dicom-uid.key", b"second") == b"first"
    assert files.read("dicom-uid.key") == b"first"


def test_created_file_is_flushed_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, path, fsync = open_files(tmp_path), tmp_path / "dicom-uid.key", os.fsync
    # What a power cut leaves: each flushed file with its size, and whether the flushed folder has the name.
    flushed: list[tuple[int, int | bool]] = []

    def watched(descriptor: int) -> None:
        found = os.fstat(descriptor)
        is_folder = found.st_ino == tmp_path.stat().st_ino
        flushed.append((found.st_ino, path.exists() if is_folder else found.st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    files.create("dicom-uid.key", b"first")
    assert flushed[0] == (path.stat().st_ino, 5)
    assert flushed[-1] == (tmp_path.stat().st_ino, True)
    assert [one.name for one in tmp_path.iterdir()] == ["dicom-uid.key"]


def test_sweep_deletes_staged_files_of_killed_processes(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("cohorts/.incoming/left", b"half")
    files.write(f"cohorts/{A}/kept", b"whole")
    files.sweep("cohorts")
    assert files.names("cohorts/.incoming") == ["left"]
    for module in ("folder", "bucket"):
        monkeypatch.setattr(f"service.files.{module}.STAGED_LIFETIME_SECONDS", -10.0)
    files.sweep("cohorts")
    assert files.names("cohorts") == [f"{A}/kept"]


def test_folder_keeps_files_from_other_users(tmp_path: Path) -> None:
    files = open_files(tmp_path / "files")
    files.write(f"jobs/{A}/pictures/1.png", b"patient")
    files.create("dicom-uid.key", b"key")
    with files.stage("cohorts", [b"scan"]) as staged:
        staged.keep(f"cohorts/{A}/key")
    found = [tmp_path / "files", *(tmp_path / "files").rglob("*")]
    assert len(found) == 10
    assert all(path.stat().st_mode & 0o077 == 0 for path in found)


def test_changed_object_is_rejected(bucket_url: str) -> None:
    files = open_files(bucket_url)
    files.write("jobs/x/input", b"scan")
    with files.stage("cohorts", [b"scan"]) as staged:
        staged.keep("cohorts/x/key")
    for key in ("jobs/x/input", "cohorts/x/key"):
        about = obstore.get(connect(bucket_url), key).attributes
        obstore.put(connect(bucket_url), key, b"scam", attributes=about)
        with pytest.raises(FileDamaged, match=f"{key}: expected sha256:"):
            files.read(key)
    obstore.put(connect(bucket_url), "jobs/x/input", b"scan")
    with pytest.raises(FileDamaged, match="its sha256 in the metadata"):
        files.read("jobs/x/input")


def test_bucket_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_store.bucket._RETRIES", 0)
    monkeypatch.setattr(
        os, "environ", {**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_REGION": "x"}
    )
    with pytest.raises(FilesUnavailable, match="check AWS_ENDPOINT_URL") as caught:
        FilesBucket("s3://away").check()
    assert caught.value.headers == {"Retry-After": "5"}
