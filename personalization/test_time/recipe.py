"""A preset from end to end: from a routing space and a hospital's images to one plain network.

    recipe_of("ladder").adapt(space, images, config, device)

A recipe that learns says what (`learning`), and the loop of `personalization.test_time.adapt` does it. Every
recipe ends in one plain network with fixed batch-norm statistics (`merged`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.errors import AdaptationError
from personalization.iop_fl.merge import merge
from personalization.iop_fl.network import route
from personalization.iop_fl.space import RoutingSpace
from personalization.networks.capabilities import moving_norms, norms, required_norms
from personalization.networks.instance_norm import tracked_norms
from personalization.networks.rotation import TellsTurns
from personalization.options.movable import Movable
from personalization.test_time.adapt import Adaptation, Learning, learn, routing
from personalization.test_time.checkpoint import AdaptationCheckpoint, EpochRecord
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import Objective
from personalization.test_time.safety import SafetyLimits

# Images per forward pass outside training; limits memory use. It affects only the coefficients of pooled
# routers, which depend on the statistics of their batch.
BATCH = 16
_NOTHING_LEARNED = EpochRecord(0, None, None, None, None, None, None, safe=True, reason=None)


@dataclass(frozen=True)
class Adapted:
    """A finished adaptation over `space`: what was learned at its chosen epoch, and the plain served network.

    `learned` is None where nothing was.
    """

    adaptation: Adaptation
    space: RoutingSpace
    learned: nn.Module | None
    merged: nn.Module


class Recipe(ABC):
    """One preset. Computations take place where the images are."""

    def over(self, space: RoutingSpace, config: AdaptationConfig) -> RoutingSpace:  # noqa: ARG002
        """The models that it uses."""
        return space

    def architecture(self, space: RoutingSpace, config: AdaptationConfig) -> tuple[str, dict[str, Any]]:  # noqa: ARG002
        """Name and arguments of the plain network, for the registry."""
        return space.network, dict(space.arguments)

    def learning(
        self,
        space: RoutingSpace,  # noqa: ARG002
        images_NCHW: Tensor,  # noqa: ARG002
        config: AdaptationConfig,  # noqa: ARG002
        check_cancelled: CancelCheck,  # noqa: ARG002
    ) -> Learning | None:
        """What is learned, at step 0; None for a recipe of forward passes alone."""
        return None

    @abstractmethod
    def merged(
        self,
        space: RoutingSpace,
        learned: nn.Module | None,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> nn.Module:
        """The plain network that is served, in eval mode, from what was learned."""

    def adapt(
        self,
        space: RoutingSpace,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        device: torch.device,
        check_cancelled: CancelCheck = never_cancelled,
        *,
        resume: AdaptationCheckpoint | None = None,
        after_epoch: Callable[[nn.Module, AdaptationCheckpoint], None] | None = None,
    ) -> Adapted:
        """Adapt to images [N, C, H, W] on `device`, deterministically.

        `after_epoch` gets the network as it is learned; a recipe that learns nothing does not call it. Raises
        what `learn`, `check_cancelled` and `after_epoch` raise.
        """
        images, space = images_NCHW.to(device), self.over(space, config)
        learning = self.learning(space, images, config, check_cancelled)
        if learning is None:
            adaptation = Adaptation(0, (_NOTHING_LEARNED,), None, fell_back=False)
            merged = self.merged(space, None, images, config, check_cancelled)
            return Adapted(adaptation, space, None, merged)
        network = learning.network.to(device)

        def note(checkpoint: AdaptationCheckpoint) -> None:
            if after_epoch is not None:
                after_epoch(network, checkpoint)

        adaptation = learn(
            learning,
            images,
            config,
            resume=resume,
            after_epoch=note,
            check_cancelled=check_cancelled,
        )
        merged = self.merged(space, network, images, config, check_cancelled)
        return Adapted(adaptation, space, network, merged)


@dataclass(frozen=True)
class Routing(Recipe):
    """Learn the coefficients of the space's models layer by layer, batch norm's scale and shift, or both."""

    objective: Objective

    @override
    def over(self, space: RoutingSpace, config: AdaptationConfig) -> RoutingSpace:
        return space_for(config, space)

    @override
    def learning(
        self,
        space: RoutingSpace,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> Learning:
        """The models in equal parts.

        Raises NetworkError where all that the preset moves is batch norm, and the network has none.
        """
        network = route(space, config.router).to(images_NCHW.device)
        if "routing" not in config.of_preset.learns:
            required_norms(space.outline(), f"preset '{config.preset}' moves statistics, scale and shift")
        return routing(network, config, self.objective)

    @override
    def merged(
        self,
        space: RoutingSpace,
        learned: nn.Module | None,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> nn.Module:
        """Merged by the mean coefficients, with the statistics of the images (`merge`)."""
        assert learned is not None
        return merge(space, learned, images_NCHW, batch_size=BATCH, check_cancelled=check_cancelled)


def adapt(
    network: nn.Module,
    images_NCHW: Tensor,
    config: AdaptationConfig,
    *,
    resume: AdaptationCheckpoint | None = None,
    after_epoch: Callable[[AdaptationCheckpoint], None] | None = None,
    check_cancelled: CancelCheck = never_cancelled,
    limits: SafetyLimits | None = None,
    objective: Objective | None = None,
) -> Adaptation:
    """`learn` of a routed network (`route`), with a preset of routing.

    `objective` replaces the preset's, for an experiment; a checkpoint does not record it. Raises
    AdaptationError for a network that does not fit, and what `learn` raises.
    """
    return learn(
        routing(network, config, objective or objective_of(config.preset)),
        images_NCHW,
        config,
        resume=resume,
        after_epoch=after_epoch,
        check_cancelled=check_cancelled,
        limits=limits or SafetyLimits(),
    )


def objective_of(preset: str) -> Objective:
    """The objective of a preset of routing. Raises AdaptationError for another preset."""
    recipe = recipe_of(preset)
    if not isinstance(recipe, Routing):
        raise AdaptationError(f"preset: expected one of routing, found '{preset}', which weighs no models")
    return recipe.objective


def space_for(config: AdaptationConfig, space: RoutingSpace) -> RoutingSpace:
    """The models that an adaptation routes over: all of `space`, or its global model, by the preset."""
    return space if config.of_preset.models == "all" else space.alone()


def movable_in(network: nn.Module) -> Movable:
    """What presets can move in a network: norms of a kind, a head that tells turns."""
    return Movable(
        ", ".join(sorted({type(norm).__name__ for norm in norms(network).values()})) or "no norm at all",
        batch=bool(moving_norms(network)),
        tracked=bool(tracked_norms(network)),
        turns=isinstance(network, TellsTurns) and getattr(network, "rotation", None) is not None,
    )


def recipe_of(preset: str) -> Recipe:
    """The recipe of a preset in `PRESETS`: `RECIPE` of its module in `personalization.test_time.presets`."""
    module = import_module(f"personalization.test_time.presets.{preset.replace('-', '_')}")
    recipe: Recipe = module.RECIPE
    return recipe
