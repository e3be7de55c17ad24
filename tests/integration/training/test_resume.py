"""A run that is killed at any instant and resumed publishes the same bytes as one that is not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model_store.store import Store
from training.phantom import write_federation

NAMES = ["phantom", "phantom.aster", "phantom.birch", "phantom.global"]
KILLS = {1: 10, 2: 10}


class Zygote:
    def __init__(self, data: Path) -> None:
        self.data = data
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.line() == "ready"

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def run(self, root: Path, workers: int, kill_after: float | None = None) -> tuple[bool, float]:
        """Start or resume the run of `root`; whether it ended by itself, and how long it took."""
        command = {
            "data": str(self.data),
            "folder": str(root / "run"),
            "store": str(root / "store"),
            "workers": workers,
        }
        started = time.monotonic()
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        pid = int(self.line())
        if kill_after is not None:
            time.sleep(kill_after)
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                # Gone already, or not yet a group of its own: a run that has done nothing.
                os.kill(pid, signal.SIGKILL) if Path(f"/proc/{pid}").exists() else None
        status = int(self.line())
        assert status == 0 or os.WIFSIGNALED(status), "the run failed by itself; see the log above"
        return status == 0, time.monotonic() - started

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def digests(root: Path) -> dict[str, str]:
    """Every artefact of the store with its digest; each name has one version."""
    store = Store(root / "store")
    assert store.names() == NAMES
    assert all(len(store.versions(name)) == 1 for name in NAMES)
    return {name: store.open(name).digest for name in NAMES}


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    data = write_federation(
        tmp_path_factory.mktemp("phantom"), sites=("aster", "birch"), patients_per_site=3, size=16
    )
    zygote = Zygote(data)
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def reference(zygote, tmp_path_factory):
    """The digests of a run that nobody disturbed, and how long it took."""
    root = tmp_path_factory.mktemp("reference")
    ended, seconds = zygote.run(root, workers=1)
    assert ended
    return digests(root), seconds


def stage(root: Path) -> str:
    """How far a killed run had come."""
    if not (root / "run" / "checkpoint.json").exists():
        return "before the first round"
    checkpoint = json.loads((root / "run" / "checkpoint.json").read_text())
    return "publishing" if checkpoint["step"] == 4 else f"step {checkpoint['step']}"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_instants_it_publishes_the_same_bytes(zygote, reference, tmp_path, workers):
    expected, seconds = reference
    draw = random.Random(workers)
    kills: list[str] = []
    attempt = 0
    while len(kills) < KILLS[workers]:
        root = tmp_path / str(attempt)
        attempt += 1
        ended = False
        while not ended:
            # Late in a test of enough kills the run is let through.
            delay = draw.uniform(0.05, seconds * 0.6) if len(kills) < KILLS[workers] else None
            ended, _ = zygote.run(root, workers, delay)
            if not ended:
                kills.append(stage(root))
        assert digests(root) == expected, kills
    assert len(set(kills)) > 2, kills


@pytest.mark.timeout(200)
def test_killed_while_publishing_nothing_half_made_is_seen(zygote, reference, tmp_path):
    expected, _ = reference
    draw = random.Random(7)
    ended, kills = False, 0
    while not ended:
        # Watch the store, and strike between its first model and the composite.
        ended = (
            _kill_when(zygote, tmp_path, draw.choice(NAMES[1:])) if kills < 4 else zygote.run(tmp_path, 1)[0]
        )
        kills += not ended
        store = Store(tmp_path / "store")
        for name in store.names():
            store.open(name).verify()
        if "phantom" in store.names():
            assert set(store.names()) == set(NAMES)
    assert kills > 0
    assert digests(tmp_path) == expected


def _kill_when(zygote: Zygote, root: Path, name: str) -> bool:
    command = {
        "data": str(zygote.data),
        "folder": str(root / "run"),
        "store": str(root / "store"),
        "workers": 1,
    }
    zygote.process.stdin.write(json.dumps(command) + "\n")
    zygote.process.stdin.flush()
    pid = int(zygote.line())
    while not (root / "store" / name / "1").exists() and Path(f"/proc/{pid}/fd").exists():
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return int(zygote.line()) == 0
