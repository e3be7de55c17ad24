"""The default defence on a phantom without a liar: every bit is that of a run without a defence."""

from __future__ import annotations

import pytest
import torch

from training.config import NO_DEFENCE, Defence, RunConfig
from training.data.federation import load_federation
from training.methods.registry import method
from training.phantom import write_federation
from training.run import Run, execute


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Four hospitals, one of them with five times the patients of the others."""
    root = write_federation(tmp_path_factory.mktemp("phantom"), ("aster", "birch", "dune"), 3, 16)
    write_federation(root, ("cedar",), 15, 16)
    return load_federation(root)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedadam"])
def test_an_honest_federation_has_the_same_bits_with_the_default_and_without_a_defence(
    federation, tmp_path, name
):
    config = method(name).config.model_validate({"rounds": 3, "width": 2, "batch_size": 8, "least_steps": 2})
    outcomes = []
    for defence in (NO_DEFENCE, Defence()):
        run = Run(federation, name, config, RunConfig(seed=1, defence=defence))
        result = execute(run, tmp_path / str(len(outcomes)), workers=0)
        assert all(part.scaled is None for entry in result.history for part in entry.sites.values())
        outcomes.append(result.publication.models[0].weights)
    plain, default = outcomes
    assert plain.keys() == default.keys()
    assert all(torch.equal(tensor, default[key]) for key, tensor in plain.items())
