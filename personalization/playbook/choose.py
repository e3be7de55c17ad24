"""Choose for a hospital: try the practised recipes on its scans, and take the one with the highest bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.iop_fl.space import RoutingSpace
from personalization.playbook.features import Features, features_of, view
from personalization.playbook.playbook import Decision, Playbook
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import recipe_of

# Recipes that are tried at a hospital, best first: each costs two forward passes if it learns nothing.
MOST_RECIPES = 4


@dataclass(frozen=True)
class Choice:
    """The chosen recipe, what the playbook expects of it, and the features that this rests on."""

    decision: Decision
    config: AdaptationConfig
    features: Features
    tried: Mapping[str, Decision]


def choose(
    playbook: Playbook,
    space: RoutingSpace,
    images_NCHW: Tensor,
    device: torch.device,
    check_cancelled: CancelCheck = never_cancelled,
) -> Choice:
    """Try the playbook's recipes on images [N, C, H, W]; deterministic.

    One forward pass of the parent, and for each recipe its adaptation and one of its candidate.
    """
    images = images_NCHW.to(device)
    before = view(space.plain().to(device), images, check_cancelled)
    found: dict[str, Features] = {}
    for record in playbook.recipes[:MOST_RECIPES]:
        adapted = recipe_of(options_of(record.options).preset).adapt(
            space, images, options_of(record.options), device, check_cancelled
        )
        after = view(adapted.merged, images, check_cancelled)
        found[record.name] = features_of(before, after, playbook.share)
    tried = {name: playbook.decide({name: features.values()}) for name, features in found.items()}
    decision = playbook.decide({name: features.values() for name, features in found.items()})
    record = next(each for each in playbook.recipes if each.name == decision.trial)
    return Choice(decision, options_of(record.options), found[decision.trial], tried)


def options_of(options: Mapping[str, Any]) -> AdaptationConfig:
    """A recipe's options as an adaptation takes them."""
    return AdaptationConfig(**options)
