"""Runs that are interrupted in every round, with configurations that `test_frozen_artefacts` has not.

Real kills, at any instant, are in `engine/test_resume`, and within steps of the server in `test_fedbicross`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_store.store import Store
from tests.helpers.training.interrupting import interrupted
from training.config import RunConfig
from training.data.federation import load_federation
from training.methods.registry import method
from training.phantom import write_federation
from training.phantom.shapes import write_shapes
from training.run import Run, execute

SITES = ("aster", "birch", "cedar")
ROUNDS: dict[str, Any] = {"rounds": 3, "batch_size": 8, "width": 2, "least_steps": 2, "learning_rate": 0.01}
CROSS_ATTENTION: dict[str, Any] = {"width": 2, "heads": 4, "rounds": 2, "local_steps": 1, "batch_size": 4}
GENERATED: dict[str, Any] = {
    **{"width": 2, "local_epochs": 1, "batch_size": 8, "epochs": 4, "synthesis_batch": 8, "pool": 2},
    **{"generator_steps": 1, "noise_size": 8, "generator_width": 4},
}


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_federation(tmp_path_factory.mktemp("phantom"), SITES, patients_per_site=3, size=16)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cross-attention needs a map of 2 by 2."""
    return write_federation(tmp_path_factory.mktemp("larger"), SITES, patients_per_site=3, size=32)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes"), images_per_site=12, size=8)


def check(data: Path, folder: Path, name: str, config: dict[str, Any]) -> None:
    """The run publishes when it is interrupted what it publishes undisturbed."""
    settings = RunConfig(seed=3, consent="all", participation=0.7)
    run = Run(load_federation(data), name, method(name).config(**config), settings)
    whole, broken = folder / "whole", folder / "broken"
    expected = execute(run, whole / "run", workers=0, store=Store(whole / "store"))
    for key in (whole / "run").glob("sites/*/key"):
        # The key from which a site draws its noise; every run has its own.
        to = broken / "run" / key.relative_to(whole / "run")
        to.parent.mkdir(parents=True)
        to.write_bytes(key.read_bytes())
    found, interruptions = interrupted(run, broken / "run", Store(broken / "store"))
    assert interruptions == len(found.history)
    assert [made.name for made in found.artefacts] == [made.name for made in expected.artefacts]
    assert [made.digest for made in found.artefacts] == [made.digest for made in expected.artefacts]


def test_what_a_site_remembers_outlasts_rounds_in_which_it_is_not_drawn(scans: Path, tmp_path: Path) -> None:
    check(scans, tmp_path, "scaffold", ROUNDS)


def test_fedoap_draws_the_same_noise_from_its_sites_keys(larger: Path, tmp_path: Path) -> None:
    check(larger, tmp_path, "fedoap", {**CROSS_ATTENTION, "bank_clip": 5.0, "bank_noise": 0.1})


def test_feddp_goes_on_between_rounds_of_the_calibration(larger: Path, tmp_path: Path) -> None:
    check(larger, tmp_path, "feddp", {**CROSS_ATTENTION, "rounds": 1, "fine_tune_rounds": 2})


@pytest.mark.parametrize("name", ["dense", "co-boosting"])
def test_the_pool_of_images_is_that_of_the_epochs_before(shapes: Path, tmp_path: Path, name: str) -> None:
    check(shapes, tmp_path, name, GENERATED)
