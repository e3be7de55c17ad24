"""A DynUNet on volumes over NVFLARE's connections is the one of the same run in one process, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.harness.forked import Forked
from benchmarks.network.consortium import Consortium
from model_store.store import Store
from training.config import RunConfig
from training.data.federation import load_federation
from training.methods.iop_fl import IopFlConfig
from training.phantom import VOLUMES, write_federation
from training.run import Run, execute

SITES = ("aster", "birch")
CONFIG = "method: {width: 2, rounds: 2, least_steps: 2, personal_epochs: 1}\nrun: {seed: 4}\n"


def test_a_federation_on_volumes_has_the_digests_of_one_in_process(tmp_path: Path) -> None:
    data = write_federation(tmp_path / "phantom", SITES, patients_per_site=3, task=VOLUMES)
    reference = Store(tmp_path / "reference")
    config = IopFlConfig(width=2, rounds=2, least_steps=2, personal_epochs=1)
    config = config.prepared(reference, VOLUMES, VOLUMES.name)
    run = Run(load_federation(data), "iop-fl", config, RunConfig(seed=4, consent="all"))
    execute(run, tmp_path / "run", workers=0, store=reference)
    expected = {name: reference.open(name).digest for name in reference.versions.names()}
    assert set(expected) >= {VOLUMES.name, f"{VOLUMES.name}.global"}

    (tmp_path / "network").mkdir()
    (tmp_path / "network" / "config.yaml").write_text(CONFIG)
    with Consortium(tmp_path / "network", data, SITES, begin=Forked) as consortium:
        operator = consortium.start_operator(
            "--method", "iop-fl", "--config", consortium.root / "config.yaml"
        )
        operator.wait_for("listening on")
        sites = [consortium.start_site(site) for site in SITES]
        assert operator.end() == 0, operator.text()
        assert [site.end() for site in sites] == [0, 0]
        store = Store(consortium.root / "store")
        assert {name: store.open(name).digest for name in store.versions.names()} == expected
        record = json.loads((consortium.root / "run" / "record.json").read_text())
    assert record["config"]["optimiser"] == "adamw"
