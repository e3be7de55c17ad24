"""Every preset on a fixed case, as it was recorded: a refactor changes none of these numbers.

In float64 on networks that were initialised and not trained, so that processors agree to many digits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from personalization.iop_fl.merge import merge
from personalization.iop_fl.network import route
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import build, initialise
from personalization.state import State
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt, space_for
from tests.helpers.personalization.discs import UNGUARDED

RECORDED = json.loads(Path(__file__).with_name("recorded_presets.json").read_text(encoding="utf-8"))
ARGUMENTS = {"in_channels": 1, "classes": 2, "width": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {"preset": "paper"},
    "paper, no shape": {"preset": "paper", "shape_weight": 0.0},
    "paper, pooled": {"preset": "paper", "router": "pooled"},
    "paper, routing alone": {"preset": "paper", "train_bn_affine": False},
    "official": {"preset": "official"},
    "official, pooled": {"preset": "official", "router": "pooled"},
    "statistics": {"preset": "statistics"},
}


def initialised(seed: int) -> State:
    network = initialise(build("unet", **ARGUMENTS), torch.Generator().manual_seed(seed)).double()
    return dict(network.state_dict())


def size(state: dict[str, torch.Tensor]) -> float:
    """Sum of squares of everything in it."""
    return sum(float(value.detach().double().square().sum()) for value in state.values())


def found(options: dict[str, Any]) -> dict[str, Any]:
    """Losses of the epochs, the best one, and the sizes of what was learned and of what is served."""
    whole = RoutingSpace.of("unet", ARGUMENTS, {"a": initialised(1), "b": initialised(2)}, initialised(0))
    images = torch.randn(7, 1, 32, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    config = AdaptationConfig(**options, epochs=2, batch_size=3, seed=5)
    space = space_for(config, whole)
    network = route(space, config.router)
    result = adapt(network, images, config, limits=UNGUARDED)
    return {
        "losses": [record.loss for record in result.history],
        "best_epoch": result.best_epoch,
        "learned": size(dict(network.named_parameters())),
        "merged": size(merge(space, network, images).state_dict()),
    }


@pytest.mark.parametrize("case", OPTIONS)
def test_an_adaptation_is_as_recorded(case: str) -> None:
    result, recorded = found(OPTIONS[case]), RECORDED[case]
    assert result.keys() == recorded.keys()
    for name, value in result.items():
        assert value == pytest.approx(recorded[name], rel=1e-5), name
