"""A run that is killed at any instant and resumed publishes the same bytes as an undisturbed run."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from model_store.store import Store
from tests.helpers.training.killing import Killable, committed, kill
from training.phantom import write_federation

NAMES = ["phantom", "phantom.aster", "phantom.birch", "phantom.global"]
KILLS = 6


def digests(root: Path) -> dict[str, str]:
    """Every artefact of the store with its digest; each name has one version."""
    store = Store(root / "store")
    assert store.versions.names() == NAMES
    assert all(len(store.versions.of(name)) == 1 for name in NAMES)
    return {name: store.open(name).digest for name in NAMES}


@pytest.fixture(scope="module")
def killable(tmp_path_factory):
    data = write_federation(
        tmp_path_factory.mktemp("phantom"), sites=("aster", "birch"), patients_per_site=3, size=16
    )
    # The moving average, so that every site has a model to publish.
    fields = {"personal": "moving-average", "domain_randomisation": "late"}
    return Killable(data, "iop-fl", rounds=4, batch_size=8, **fields)


@pytest.fixture(scope="module")
def reference(killable, tmp_path_factory):
    """The digests of an undisturbed run."""
    root = tmp_path_factory.mktemp("reference")
    assert killable.run(root, workers=1)
    return digests(root)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("workers", [1, 2])
def test_run_killed_at_random_instants_publishes_the_same_bytes(killable, reference, tmp_path, workers):
    draw = random.Random(workers)
    kills: list[tuple[int, float]] = []
    attempt = 0
    while len(kills) < KILLS:
        root = tmp_path / str(attempt)
        attempt += 1
        ended = False
        while not ended:
            # Any instant from before the next round to the end of the publication after the last one.
            instant = (committed(root) + draw.randint(0, 2), draw.uniform(0, 0.25))
            ended = killable.run(root, workers, instant if len(kills) < KILLS else None)
            if not ended:
                kills.append((committed(root), instant[1]))
        assert digests(root) == reference, kills


def publish_with_kills(killable, out, draw):
    """Run to the end, killed up to four times while it publishes; how many kills came before the end."""
    ended, kills = False, 0
    while not ended:
        if kills < 4:
            # Watch the store, and kill the run once one of its parts is there.
            run, part = killable.start(out, 1), draw.choice(NAMES[1:])
            while not (out / "store" / part / "1").exists():
                time.sleep(0.002)
            kill(run.pid)
            ended = killable.end(out, run)
        else:
            ended = killable.run(out, 1)
        kills += not ended
        store = Store(out / "store")
        for name in store.versions.names():
            store.open(name).verify()
        if "phantom" in store.versions.names():
            assert set(store.versions.names()) == set(NAMES)
    return kills


@pytest.mark.timeout(200)
def test_run_killed_while_publishing_leaves_only_whole_artefacts(killable, reference, tmp_path):
    draw = random.Random(7)
    # On a busy machine a run may end before its first kill. It shows nothing, so start another one.
    for attempt in range(5):
        out = tmp_path / str(attempt)
        out.mkdir()
        if publish_with_kills(killable, out, draw):
            break
    else:
        pytest.fail("no kill came before the end of a run, in five runs")
    assert digests(out) == reference
