"""Unreadable files and broken tombstones: reported as damage, without hiding other versions."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from model_store.__main__ import app
from model_store.artefact import Artefact
from model_store.durable import remove_folder, write_durably
from model_store.errors import ArtefactDamaged
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.store import Store
from model_store.task import Task
from tests.helpers.model_store.broken_files import unreadable
from tests.helpers.model_store.graphs import graph_of


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with brain@1, which has an empty graph, and brain@2."""
    made = Store(tmp_path / "store")
    publish(made, "")
    publish(made, "2")
    return made


def publish(store: Store, graph: str) -> Artefact:
    manifest = ModelManifest(
        name="brain",
        task=Task(name="t", labels={"a": (1,)}, size=(32, 32)),
        network=NetworkSpec(name="unet", arguments={}),
        lineage=Lineage(method="fedavg", run="r", sites=(), rounds=1, seed=0),
    )
    return store.publish(manifest, {WEIGHTS: b"w", GRAPH: graph_of(graph)})


def test_file_with_io_error_is_reported_as_damaged(store: Store) -> None:
    artefact = store.open("brain@1")
    unreadable(artefact.path / GRAPH)
    for use in (artefact.verify, lambda: artefact.read(GRAPH)):
        with pytest.raises(
            ArtefactDamaged, match=r"brain@1: graph\.onnx: cannot be read \(Input/output error\)"
        ):
            use()
    assert artefact.read(WEIGHTS) == b"w"


@pytest.mark.parametrize("content", ["", "{", '{"actor": "ada"}'])
def test_broken_tombstone_damages_only_its_version(store: Store, content: str) -> None:
    (store.root / "brain" / "2.withdrawn.json").write_text(content)
    with pytest.raises(ArtefactDamaged, match=r"brain@2: its tombstone 2\.withdrawn\.json cannot be read"):
        store.open("brain@2")
    # The version still counts as withdrawn.
    assert store.open("brain").version == 1
    assert [version.artefact.version for version in store.versions.of("brain")] == [1]
    assert store.versions.unreadable("brain").keys() == {2}


def test_verify_command_reports_damaged_versions_and_continues(store: Store) -> None:
    publish(store, "3")
    publish(store, "4")
    store.withdraw("brain@4", actor="ada", reason="wrong")
    unreadable(store.open("brain@1").path / GRAPH)
    (store.root / "brain" / "2.withdrawn.json").write_text("{")
    result = CliRunner().invoke(app, ["verify", "--store", str(store.root)])
    assert result.exit_code == 1
    said = [line.split()[:2] for line in result.output.splitlines() if line[:1] in "rw"]
    assert said == [["refused", "brain@1:"], ["refused", "brain@2:"], ["whole", "brain@3"]]


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[os.stat_result]:
    """What was flushed to disk, as it was then."""
    found, fsync = [], os.fsync

    def watched(descriptor: int) -> None:
        found.append(os.fstat(descriptor))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return found


def test_private_file_is_private_when_it_is_flushed(tmp_path: Path, flushed: list[os.stat_result]) -> None:
    write_durably(tmp_path / "key.pem", b"key", mode=0o600)
    assert stat.filemode(flushed[0].st_mode) == "-rw-------"
    write_durably(tmp_path / "key.pub.pem", b"key")
    assert (tmp_path / "key.pub.pem").stat().st_mode & 0o777 == 0o644


def test_first_version_of_a_name_flushes_the_folder_of_the_name_too(
    tmp_path: Path, flushed: list[os.stat_result]
) -> None:
    published = publish(Store(tmp_path / "store"), b"1")
    inodes = {found.st_ino for found in flushed}
    assert {folder.stat().st_ino for folder in (published.path.parent, tmp_path / "store")} <= inodes


def test_failed_durable_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(OSError, match="taken"):
        write_durably(taken, b"content")
    assert list(tmp_path.iterdir()) == [taken]


def test_remove_folder_deletes_a_folder_and_ignores_an_absent_one(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    write = path / "deeper" / "file"
    write.parent.mkdir(parents=True)
    write.write_bytes(b"content")
    remove_folder(path)
    remove_folder(path)
    assert list(tmp_path.iterdir()) == []
