"""Publishing from several processes at once, and from processes killed while publishing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness.forked import fork
from model_store.manifest import Lineage, ModelManifest, NetworkSpec
from model_store.store import Store
from model_store.task import Task
from tests.helpers.model_store.graphs import graph_of


def _publish(root: Path, contents: list[str]) -> None:
    store = Store(root)
    for content in contents:
        store.publish(
            ModelManifest(
                name="brain",
                task=Task(name="t", labels={"a": (1,)}, size=(32, 32)),
                network=NetworkSpec(name="unet", arguments={}),
                lineage=Lineage(method="fedavg", run="r", sites=("A",), rounds=1, seed=0),
            ),
            {"weights.safetensors": content.encode() * 1000, "graph.onnx": graph_of(content)},
        )


def _publish_at_the_end_of(pipe: Connection, root: Path, contents: list[str]) -> None:
    with suppress(EOFError):
        pipe.recv()
    _publish(root, contents)


def test_two_publishing_processes_get_distinct_version_numbers(tmp_path: Path) -> None:
    # Both publish "shared": content that is already published must not become a second version.
    here, there = multiprocessing.Pipe(duplex=False)
    workers = [
        fork(_publish_at_the_end_of, here, tmp_path, [f"{w}-{i}" for i in range(15)] + ["shared"])
        for w in "ab"
    ]
    here.close()
    there.close()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    versions = Store(tmp_path).versions.of("brain")
    assert [v.artefact.version for v in versions] == list(range(1, 32))
    assert len({v.artefact.digest for v in versions}) == 31
    for version in versions:
        version.artefact.verify()


def test_killed_publish_leaves_only_whole_versions(tmp_path: Path) -> None:
    for round_ in range(3):
        worker = fork(_publish, tmp_path, [f"{round_}-{i}" for i in range(100_000)])
        seen = 3 * (round_ + 1)
        while not (tmp_path / "brain" / str(seen)).exists():
            assert worker.is_alive()
        os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join()
    store = Store(tmp_path)
    for version in store.versions.of("brain"):
        version.artefact.verify()
    _publish(tmp_path, ["after"])
    assert Store(tmp_path).open("brain").read("graph.onnx") == graph_of("after")
