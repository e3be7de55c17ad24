"""A backup of a service that has store and files in buckets: rehearsed, restored, and started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from model_store.artefact import Artefact
from service.settings import Settings
from tests.helpers.service.api import running
from tests.integration.service.backup.test_backup import run, set_up, settings_of
from tests.integration.service.worker.test_files_in_a_bucket import Server


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket on an S3 server."""
    server = Server()
    given = {"REGION": "us-east-1", "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**given, "ENDPOINT_URL": server.url}.items():
            patch.setenv(f"AWS_{name}", value)
        with urlopen(Request(f"{server.url}/backed-up", method="PUT"), timeout=10):
            pass
        yield "s3://backed-up"
    server.stop()


def in_bucket(state: Path, bucket: str, files: str) -> Settings:
    return settings_of(state, f"{bucket}/store", files=f"{bucket}/{files}")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["backup", "backup.tar"])
def test_store_and_files_in_a_bucket_are_backed_up_and_restored(
    tmp_path: Path,
    publish_bright: Callable[..., Artefact],
    make_png: Callable[..., bytes],
    picture: object,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    scan, bucket = make_png(picture), f"{bucket}/{name}"
    publish_bright(f"{bucket}/store")
    with running(in_bucket(tmp_path / "state", bucket, "files")) as api:
        cohort = set_up(api, scan)
        answer = api.segment(scan, hospital="north", model="bright").content
        monkeypatch.setenv("LOCUM_STORE", f"{bucket}/store")
        monkeypatch.setenv("LOCUM_FILES", f"{bucket}/files")
        taken = run("backup", tmp_path / name, "--state-dir", tmp_path / "state")
        assert taken.exit_code == 0, taken.output
    rehearsal = run("restore", tmp_path / name, "--rehearse")
    assert rehearsal.exit_code == 0, rehearsal.output
    assert "with the mask that was served" in rehearsal.output
    new, store = tmp_path / "new", tmp_path / "new-store"
    # Where there are files of patients, nothing is restored over them.
    over = run("restore", tmp_path / name, "--to", new, "--store", store)
    assert (over.exit_code, "expected no files of patients" in over.stderr) == (1, True)
    monkeypatch.setenv("LOCUM_FILES", f"{bucket}/restored")
    restored = run("restore", tmp_path / name, "--to", new, "--store", store)
    assert restored.exit_code == 0, restored.output
    with running(settings_of(new, store, files=f"{bucket}/restored")) as api:
        assert api.segment(scan, hospital="north", model="bright").content == answer
        place = f"/hospitals/north/cohorts/{cohort}/scans/a.png"
        assert api.client.get(place).raise_for_status().content == scan
