"""FedOAP killed at random instants and resumed publishes the same bytes as an undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from model_store.store import Store
from tests.helpers.training.killing import Killable, committed
from training.phantom import write_federation

NAMES = ["phantom", "phantom.aster", "phantom.birch", "phantom.global"]
KILLS = 5


def digests(root: Path) -> dict[str, str]:
    store = Store(root / "store")
    assert store.versions.names() == NAMES
    return {name: store.open(name).digest for name in NAMES}


@pytest.fixture
def killable(tmp_path):
    data = write_federation(tmp_path / "data", ("aster", "birch"), patients_per_site=3, size=32)
    config = {"heads": 4, "rounds": 3, "local_steps": 2, "batch_size": 4, "bank_clip": 5.0, "bank_noise": 0.1}
    return Killable(data, "fedoap", **config)


@pytest.mark.timeout(200)
def test_fedoap_killed_at_random_instants_publishes_the_same_bytes(killable, tmp_path):
    reference = tmp_path / "reference"
    assert killable.run(reference, workers=1)
    draw, kills, attempt = random.Random(0), [], 0
    while len(kills) < KILLS:
        root = tmp_path / str(attempt)
        attempt += 1
        for key in (reference / "run").glob("sites/*/key"):
            # The key from which a site draws its noise; every run has its own.
            to = root / "run" / key.relative_to(reference / "run")
            to.parent.mkdir(parents=True)
            to.write_bytes(key.read_bytes())
        ended = False
        while not ended:
            instant = (committed(root) + draw.randint(0, 2), draw.uniform(0, 0.25))
            ended = killable.run(root, 2, instant if len(kills) < KILLS else None)
            if not ended:
                kills.append((committed(root), instant[1]))
        assert digests(root) == digests(reference), kills
