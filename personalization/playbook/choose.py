"""Choose for a hospital: try the practised recipes on its scans, and take the first that may be accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.gate import PRACTISED, GateVerdict, Observed, Targets, judge, shift_of_statistics
from personalization.iop_fl.space import RoutingSpace
from personalization.playbook.features import Features, View, features_of, view
from personalization.playbook.playbook import Decision, Playbook
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import Adapted, recipe_of

# Recipes that are tried at a hospital: each costs two forward passes if it learns nothing.
MOST_RECIPES = 4


@dataclass(frozen=True)
class Tried:
    """One recipe at the hospital: the candidate, what it and its parent say of the scans, the expectation."""

    config: AdaptationConfig
    adapted: Adapted
    features: Features
    candidate: View
    decision: Decision


@dataclass(frozen=True)
class Choice:
    """The chosen recipe among those that were tried, by trial. `parent` is the global model's view, `targets`
    are the members'."""

    parent: View
    chosen: Tried
    tried: Mapping[str, Tried]
    targets: Targets


def choose(
    playbook: Playbook,
    space: RoutingSpace,
    images_NCHW: Tensor,
    device: torch.device,
    check_cancelled: CancelCheck = never_cancelled,
) -> Choice:
    """Try the playbook's recipes on images [N, C, H, W]; deterministic.

    Costs one forward pass of the parent, and for each recipe its adaptation and one of its candidate.
    """
    images = images_NCHW.to(device)
    parent = view(space.plain().to(device), images, check_cancelled, shift=True)
    made: dict[str, tuple[AdaptationConfig, Adapted, View, Features]] = {}
    for record in playbook.shortlist(MOST_RECIPES):
        config = options_of({**record.options, "target_share": playbook.targets.share or None})
        adapted = recipe_of(config.preset).adapt(space, images, config, device, check_cancelled)
        candidate = view(adapted.merged, images, check_cancelled)
        features = features_of(parent, candidate, playbook.targets.share)
        made[record.name] = config, adapted, candidate, features
    values = {name: features.values() for name, (*_, features) in made.items()}
    decisions = playbook.decisions(values)
    tried = {
        name: Tried(config, adapted, features, candidate, decisions[name])
        for name, (config, adapted, candidate, features) in made.items()
    }
    return Choice(parent, tried[playbook.decide(values).trial], tried, playbook.targets)


def verdict_by_practice(
    choice: Choice,
    parent: nn.Module,
    images_NCHW: Tensor,
    patient_of_image: ArrayLike,
    classes: int,
    source_warnings: float = 0.0,
    check_cancelled: CancelCheck = never_cancelled,
) -> GateVerdict:
    """Judge the chosen candidate by what practice predicts, and by the detectors of collapse.

    Costs one forward pass of the parent: the masks are those that were found when it was tried.
    """
    observed = Observed(
        candidate=choice.chosen.candidate.maps,
        parent=choice.parent.maps,
        replicas=(),
        scan_index=patient_of_image,
        classes=classes,
        source_warnings=source_warnings,
        statistics_distance=shift_of_statistics(parent.state_dict(), parent, images_NCHW, check_cancelled),
        prediction=choice.chosen.decision.expected,
        targets=choice.targets,
    )
    return judge(PRACTISED, observed)


def options_of(options: Mapping[str, Any]) -> AdaptationConfig:
    """A recipe's options as an adaptation takes them."""
    return AdaptationConfig(**options)
