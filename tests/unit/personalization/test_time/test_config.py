from __future__ import annotations

import json
import math
from typing import Any

import pytest

from personalization.errors import AdaptationError
from personalization.options.adaptation import RoutingOptions
from personalization.options.presets import PRESETS
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import LossWeights, Objective, WeightedSum
from personalization.test_time.recipe import Recipe, Routing, objective_of, recipe_of


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("preset", "auto", "'ladder', 'intent', .*"),
        ("router", "soft", "'direct' or 'pooled'"),
        ("epochs", 0, "greater than or equal to 1"),
        ("epochs", 201, "less than or equal to 200"),
        ("epochs", 2.0, "a valid integer"),
        ("batch_size", 0, "greater than or equal to 1"),
        ("seed", -1, "greater than or equal to 0"),
        ("seed", True, "a valid integer"),
        ("routing_rate", 0.0, "greater than 0"),
        ("routing_rate", 1e4, "less than or equal to 10"),
        ("bn_rate", math.nan, "a finite number"),
        ("noise", -0.1, "greater than or equal to 0"),
        ("noise", math.inf, "a finite number"),
        ("shape_weight", -1.0, "greater than or equal to 0"),
    ],
)
def test_a_field_out_of_bounds_is_named(field: str, value: Any, expected: str) -> None:
    with pytest.raises(AdaptationError, match=f"adaptation: {field}: expected {expected}, found") as caught:
        AdaptationConfig(**{field: value})
    assert repr(value) in str(caught.value)


def test_a_preset_must_learn_what_it_is_for() -> None:
    with pytest.raises(AdaptationError, match=r"train_bn_affine: expected true: preset 'tent'.*found False"):
        AdaptationConfig(preset="tent", train_bn_affine=False)
    assert AdaptationConfig(preset="statistics", train_bn_affine=False).passes == 0
    assert AdaptationConfig(preset="paper", train_bn_affine=False).learns == {"routing"}


def test_as_published_brings_its_router_and_batches_and_rejects_another_router() -> None:
    for options in (RoutingOptions, AdaptationConfig):
        found = options(preset="as-published")
        assert (found.router, found.batch_size) == ("pooled", 5)
        assert options(preset="as-published", batch_size=8).batch_size == 8
        assert options(preset="official").router == "direct"
    with pytest.raises(AdaptationError, match=r"router: expected 'pooled': preset 'as-published'.*'direct'"):
        AdaptationConfig(preset="as-published", router="direct")


def test_a_configuration_has_the_fields_and_defaults_of_the_options() -> None:
    assert AdaptationConfig().facts() == RoutingOptions(preset="paper").model_dump() | {"routing_rate": 0.1}
    assert RoutingOptions().preset == "auto"


def weights(**options: Any) -> LossWeights:
    config = AdaptationConfig(**options)
    objective = objective_of(config.preset)
    assert isinstance(objective, WeightedSum)
    return objective.weights(config)


def test_presets_are_the_losses_they_are_named_for() -> None:
    assert weights(preset="paper") == weights(preset="statistics") == LossWeights(1, 0.01, 0.01)
    assert weights(preset="official") == weights(preset="as-published") == LossWeights(0.1, 1, 10)
    assert weights(preset="tent") == LossWeights(0, 0, 1)
    assert weights(shape_weight=0.5) == LossWeights(1, 0.5, 0.01)
    assert weights(preset="official", shape_weight=0.0) == LossWeights(0.1, 0, 10)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_recipe(preset: str) -> None:
    recipe = recipe_of(preset)
    assert isinstance(recipe, Recipe)
    if isinstance(recipe, Routing):
        assert isinstance(objective_of(preset), Objective)
    else:
        with pytest.raises(AdaptationError, match="weighs no models"):
            objective_of(preset)


def test_the_rate_follows_the_router_unless_given() -> None:
    assert AdaptationConfig().rate == 0.1
    assert AdaptationConfig(router="pooled").rate == 1e-3
    assert AdaptationConfig(router="pooled", routing_rate=0.02).rate == 0.02


def test_facts_are_json_and_tell_configurations_apart() -> None:
    facts = AdaptationConfig().facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts == AdaptationConfig(routing_rate=0.1).facts()
    assert facts != AdaptationConfig(seed=1).facts()
