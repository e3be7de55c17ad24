"""Networks that are bad on purpose."""

from __future__ import annotations

import torch

from benchmarks.accuracy.dose.planted import ONE_LAYER, shuffled
from tests.helpers.personalization.discs import space


def test_shuffling_one_layer_leaves_the_others() -> None:
    network = space().plain()
    changed = shuffled(network, torch.Generator().manual_seed(0), ONE_LAYER)
    different = [
        name
        for (name, old), new in zip(network.named_parameters(), changed.parameters(), strict=True)
        if not torch.equal(old, new)
    ]
    assert different == [f"{ONE_LAYER}.weight"]
