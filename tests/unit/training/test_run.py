"""A run: the splits of its sites, and the inputs of its id."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.training.sites import TASK
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.cases import Case, Federation, Site, Split
from training.errors import FederationError
from training.run import Run


def run_of(**splits: tuple[Split, ...]) -> Run:
    """A run over sites of one case per split."""
    sites = tuple(
        Site(
            name,
            tuple(Case(Path(f"{i}.png"), Path(f"{i}.png"), f"p{i}", split) for i, split in enumerate(own)),
        )
        for name, own in splits.items()
    )
    return Run(Federation(Path(), TASK, sites, False, "sha256:0"), "fedavg", FedAvgConfig(), RunConfig())


def test_run_id_depends_on_given_splits() -> None:
    """The folds of a benchmark have the same data and different results."""
    first, second = run_of(A=("train", "test")), run_of(A=("test", "train"))
    assert first.federation.digest == second.federation.digest
    assert first.id != second.id
    assert first.id == run_of(A=("train", "test")).id


def test_sites_with_given_splits_and_no_training_patient_are_rejected() -> None:
    run_of(A=("train", "val"), B=("train",)).sites()
    with pytest.raises(FederationError, match="B: none of its 2 patients is in the split 'train'"):
        run_of(A=("train", "val"), B=("val", "test")).sites()
