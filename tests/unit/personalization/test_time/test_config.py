from __future__ import annotations

import json
import math
from typing import Any

import pytest

from personalization.errors import AdaptationError
from personalization.test_time.config import AdaptationConfig, LossWeights


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("preset", "tent", "one of paper, official"),
        ("router", "soft", "one of direct, pooled"),
        ("epochs", 0, "a whole number from 1"),
        ("epochs", 2.0, "a whole number"),
        ("batch_size", 0, "a whole number from 1"),
        ("seed", -1, "a whole number from 0"),
        ("seed", True, "a whole number"),
        ("routing_rate", 0.0, "a positive number"),
        ("routing_rate", 1e4, "a positive number of at most 1000"),
        ("bn_rate", math.nan, "a positive number"),
        ("noise", -0.1, "zero or a positive number"),
        ("noise", math.inf, "zero or a positive number"),
        ("shape_weight", -1.0, "zero or a positive number"),
    ],
)
def test_a_field_out_of_bounds_is_named(field: str, value: Any, expected: str) -> None:
    with pytest.raises(AdaptationError, match=f"{field}: expected {expected}.*found") as caught:
        AdaptationConfig(**{field: value})
    assert repr(value) in str(caught.value)


def test_presets_are_the_losses_they_are_named_for() -> None:
    assert AdaptationConfig("paper").weights == LossWeights(1, 0.01, 0.01)
    assert AdaptationConfig("official").weights == LossWeights(0.1, 1, 10, official=True)
    assert AdaptationConfig(shape_weight=0.5).weights == LossWeights(1, 0.5, 0.01)
    assert AdaptationConfig("official", shape_weight=0.0).weights == LossWeights(0.1, 0, 10, official=True)


def test_the_rate_follows_the_router_unless_given() -> None:
    assert AdaptationConfig().rate == 0.1
    assert AdaptationConfig(router="pooled").rate == 1e-3
    assert AdaptationConfig(router="pooled", routing_rate=0.02).rate == 0.02


def test_facts_are_json_and_tell_configurations_apart() -> None:
    facts = AdaptationConfig().facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts == AdaptationConfig(routing_rate=0.1).facts()
    assert facts != AdaptationConfig(seed=1).facts()
