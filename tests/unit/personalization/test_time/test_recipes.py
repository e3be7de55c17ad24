"""What holds of every recipe."""

from __future__ import annotations

import pytest
import torch

from personalization.cancellation import never_cancelled
from personalization.export import to_onnx
from personalization.iop_fl.network import routed_layers
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import build
from personalization.options.presets import PRESETS
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import Adapted, recipe_of
from tests.helpers.personalization.discs import discs, headed, space

CPU = torch.device("cpu")
IMAGES = discs(6, 3, contrast=1.5)[0]


def space_for(preset: str) -> RoutingSpace:
    """The space; with rotation heads for the preset that needs them."""
    return headed(space()) if preset == "ttt" else space()


def adapted(preset: str, over: RoutingSpace | None = None, **options: object) -> Adapted:
    config = AdaptationConfig(**{"preset": preset, "epochs": 2, "batch_size": 3, **options})
    return recipe_of(preset).adapt(over or space_for(preset), IMAGES, config, CPU)


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name].norm != "instance"])
def test_every_recipe_ends_in_one_plain_network_the_same_at_every_call(preset: str) -> None:
    found = adapted(preset)
    assert not found.merged.training
    assert not routed_layers(found.merged)
    again = adapted(preset)
    for name, tensor in found.merged.state_dict().items():
        assert torch.equal(again.merged.state_dict()[name], tensor)
    assert to_onnx(found.merged, 1, (32, 32)) == to_onnx(again.merged, 1, (32, 32))
    if preset != "intent":  # an answer to one scan, not a network of a hospital
        over = space_for(preset)
        name, arguments = recipe_of(preset).architecture(over, AdaptationConfig(preset=preset))
        build(name, **arguments).load_state_dict(found.merged.state_dict())


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.learns])
def test_a_recipe_that_learns_resumes_bit_for_bit(preset: str) -> None:
    config = AdaptationConfig(preset=preset, epochs=3, batch_size=3)
    points: list[AdaptationCheckpoint] = []
    recipe = recipe_of(preset)
    over = space_for(preset)
    whole = recipe.adapt(over, IMAGES, config, CPU, after_epoch=lambda _, point: points.append(point))
    content = points[1].to_bytes()
    again = recipe.adapt(over, IMAGES, config, CPU, resume=AdaptationCheckpoint.from_bytes(content))
    assert again.adaptation.history == whole.adaptation.history
    for name, tensor in whole.merged.state_dict().items():
        assert torch.equal(again.merged.state_dict()[name], tensor)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_that_says_it_learns_nothing_has_no_parameter_to_learn(preset: str) -> None:
    if PRESETS[preset].norm == "instance":
        return
    config = AdaptationConfig(preset=preset, router=PRESETS[preset].router or "direct")
    learning = recipe_of(preset).learning(
        recipe_of(preset).over(space_for(preset), config), IMAGES, config, never_cancelled
    )
    learned = [] if learning is None else [each for found, _ in learning.groups for each in found]
    assert bool(learned) == bool(PRESETS[preset].learns)
