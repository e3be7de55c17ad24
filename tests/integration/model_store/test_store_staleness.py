"""A store that other processes change: what they published or withdrew is seen at the next call."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.harness.forked import fork
from model_store import folder
from model_store.errors import ArtefactWithdrawn
from model_store.manifest import Lineage, ModelManifest, NetworkSpec
from model_store.store import Store
from model_store.task import Task
from tests.helpers.model_store.graphs import graph_of
from tests.helpers.waiting import wait_for

_WRITERS, _VERSIONS = 2, 12


@pytest.fixture(params=["folder", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("bucket_url")


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the folders as rarely as in the largest store."""
    monkeypatch.setattr(folder, "_FEW", 0)
    monkeypatch.setattr(folder, "_SWEEP_S", 3600.0)


def _manifest(name: str, run: str, parents: tuple[str, ...] = ()) -> ModelManifest:
    return ModelManifest(
        name=name,
        task=Task(name="t", labels={"a": (1,)}, size=(32, 32)),
        network=NetworkSpec(name="unet", arguments={}),
        lineage=Lineage(method="fedavg", run=run, sites=("A",), rounds=1, seed=0, parents=parents),
    )


def _publish(store: Store, name: str, run: str, parents: tuple[str, ...] = ()) -> str:
    files = {"weights.safetensors": b"w", "graph.onnx": graph_of("w")}
    return str(store.publish(_manifest(name, run, parents), files))


def _obey(root: str, cache: str, orders: Connection) -> None:
    store = Store(root, Path(cache))
    while (order := orders.recv()) is not None:
        action, *about = order
        if action == "publish":
            orders.send(_publish(store, *about))
        else:
            store.withdraw(*about, actor="ada", reason="bad")
            orders.send(None)


@contextmanager
def _another_process(root: str, cache: Path) -> Iterator[Connection]:
    here, there = multiprocessing.Pipe()
    process = fork(_obey, root, str(cache), there)
    try:
        yield here
    finally:
        here.send(None)
        process.join(60)
        assert process.exitcode == 0


def test_each_change_by_another_process_is_seen_at_the_next_request(root: str, tmp_path: Path) -> None:
    service = Store(root, tmp_path / "here")
    assert service.versions.names() == []
    with _another_process(root, tmp_path / "there") as other:

        def order(*about: object) -> str:
            other.send(about)
            return str(other.recv())

        base = order("publish", "brain", "base")
        digest = service.as_of_now().open(base).digest
        for number in range(1, 5):
            newest = order("publish", "brain", f"run-{number}", (digest,))
            request = service.as_of_now()
            assert str(request.open("brain", verify=False)) == newest
            assert newest in map(str, request.lineage.records())
            assert request.lineage.flagged(request.open(newest, verify=False)) == ()
            order("publish", f"new-{number}", f"new-{number}")
            assert f"new-{number}" in service.as_of_now().versions.shared()
            order("withdraw", newest)
            request = service.as_of_now()
            with pytest.raises(ArtefactWithdrawn):
                request.open(newest)
            assert str(request.open("brain", verify=False)) == base
        child = service.open(order("publish", "child", "child", (digest,)), verify=False)
        assert service.as_of_now().lineage.flagged(child) == ()
        order("withdraw", base)
        assert service.as_of_now().lineage.flagged(child) == (base,)


def _write(root: str, cache: str, log: str, number: int) -> None:
    store = Store(root, Path(cache))
    for turn in range(_VERSIONS):
        made = _publish(store, "brain", f"{number}-{turn}")
        _tell(log, "published", made)
        # Every second one, so that others stay.
        if turn % 2:
            store.withdraw(made, actor="ada", reason="bad")
            _tell(log, "withdrawn", made)
    _tell(log, "over", str(number))


def _tell(log: str, what: str, reference: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.write(handle, json.dumps([what, reference]).encode() + b"\n")
    os.close(handle)


def _told(log: Path) -> list[list[str]]:
    lines: list[list[str]] = [json.loads(line) for line in log.read_text().splitlines()]
    return lines


def test_reader_beside_writers_opens_nothing_withdrawn_and_nothing_outdated(
    root: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.touch()
    writers = [
        fork(_write, root, str(tmp_path / f"cache-{number}"), str(log), number) for number in range(_WRITERS)
    ]
    wait_for(lambda: any(what == "published" for what, _ in _told(log)))
    service = Store(root, tmp_path / "here")
    opened = set()
    while sum(what == "over" for what, _ in _told(log)) < _WRITERS:
        assert all(writer.exitcode in (None, 0) for writer in writers)
        before = _told(log)
        gone = {reference for what, reference in before if what == "withdrawn"}
        there = {reference for what, reference in before if what == "published"}
        request = service.as_of_now()
        assert {str(record) for record in request.lineage.records()} >= there
        newest = request.open("brain", verify=False)
        assert str(newest) not in gone
        numbers = [int(each.split("@")[1]) for each in there]
        # One that is being withdrawn may be left out before its writer says so.
        assert newest.version >= max(n for n in numbers if service.versions.tombstone("brain", n) is None)
        opened.add(str(newest))
        for reference in gone:
            with pytest.raises(ArtefactWithdrawn):
                request.open(reference)
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert len(opened) > 1
    final = service.as_of_now().versions.of("brain")
    assert [each.artefact.version for each in final] == list(range(1, _WRITERS * _VERSIONS + 1))
    assert sum(each.withdrawn is not None for each in final) == _WRITERS * _VERSIONS // 2
