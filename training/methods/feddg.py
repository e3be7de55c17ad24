"""FedDG (ELCFS): Liu et al., FedDG: Federated Domain Generalization on Medical Image Segmentation, CVPR 2021.

FedAvg in which the sites show each other how their images look, and train for images that look otherwise.
Once, every site sends amplitudes A of its training images at the lowest frequencies, without the phases P,
and gets those of the others. A step then is an episode on a batch x and its view x' by other sites:

    F(x)  = A e^{iP}        F(x') = ((1 - lambda) A + lambda A_other) e^{iP}      lambda drawn from 0 to 1
    w'    = w - eta clip(grad L(x; w), 100)             L: the loss of the task, soft Dice
    total = L(x; w) + L(x'; w') + gamma InfoNCE         by Adam, also through w': of second order

InfoNCE (`personalization.feddg.contrast`) attracts the mean features of both passes at the boundary of a
class, and those of the background around it, and repels one from the other. The features are what the last
layer reads. Batch norm's running statistics are those of x.

The authors' code (liuquande/FedDG-ELCFS at its last commit) differs: `reading: code` is the first order (its
inner gradient has no graph), the constant term alone (its training has a window of one frequency), replaced
instead of interpolated, of an eighth of the images. Images here are normalised, so that the constant term
says little.

Shared:  what FedAvg shares. Once, the amplitudes (kind `features`): of single images, so a site that bounds
         features by a least number of images or patients sends none. `clip` bounds the norm of an image's,
         `noise` is in that unit. A site that refuses features sends none either, and gets the others'.
Stays:   phases, and what stays in FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from model_store.task import IGNORED, Task
from personalization.feddg import boundary_contrast, interpolated, low_amplitudes, most_periods
from personalization.networks import outline
from personalization.networks.capabilities import head_paths
from personalization.precision import mixed_precision, to_float32
from training.algorithm import (
    ClientResult,
    Group,
    Memory,
    Phase,
    Plan,
    RoundResult,
    SiteSize,
    State,
    StepContext,
)
from training.bounds import clipped
from training.choices.fedavg import FedAvgConfig
from training.errors import ConfigurationError
from training.local.data import Examples, slices_of
from training.local.loop import mean_loss, new_optimiser, scheduled_batches
from training.local.networks import state_of
from training.local.norms import held_statistics, least_batch
from training.local.schedule import Batch
from training.local.site import SiteData
from training.methods.fedavg import FedAvg
from training.methods.registry import register
from training.parts.part import Part, Slot
from training.parts.train import SiteRound, Update

AMPLITUDES = Group("amplitudes", "features", "collect", essential=False, bounded=True)
BANK = Group("bank", "features")


class FedDgConfig(FedAvgConfig):
    """What FedDG takes beside FedAvg's."""

    reading: Literal["paper", "code"] = Field(
        "paper", description="where the next four come from if they are not given: the paper, or its code"
    )
    periods: int = Field(
        1, ge=0, description="frequencies that travel: up to so many periods along each side"
    )
    spectra_share: float = Field(1.0, gt=0, le=1, description="share of a site's training images they are of")
    mixing: Literal["interpolated", "replaced"] = Field(
        "interpolated", description="lambda is drawn from 0 to 1, or is 1"
    )
    order: Literal["second", "first"] = Field("second", description="of the gradient of the outer loss")
    inner_rate: float = Field(1e-3, gt=0, description="eta, of the inner step")
    inner_clip: float = Field(100.0, gt=0, description="bound on each value of the inner gradient")
    boundary_weight: float = Field(0.1, ge=0, description="gamma, of the contrast at the boundary")

    CODE: ClassVar[Mapping[str, Any]] = {
        "periods": 0,
        "spectra_share": 0.125,
        "mixing": "replaced",
        "order": "first",
    }

    @model_validator(mode="before")
    @classmethod
    def _of_the_code(cls, content: Any) -> Any:
        chosen = isinstance(content, dict) and content.get("reading") == "code"
        return {**cls.CODE, **content} if chosen else content


@dataclass(frozen=True)
class Bank:
    """Amplitudes [N, C, ...] by site: at the server of all sites, at a site of the others."""

    amplitudes: State = field(default_factory=dict)


class Amplitudes(Part):
    """The exchange of amplitudes, once: two phases."""

    def __init__(self, config: FedDgConfig, task: Task) -> None:
        self.config = config
        self.task = task
        self.slot = Slot("amplitudes", Bank())

    @override
    def plan(self) -> Plan:
        window = (self.task.in_channels, *(2 * self.config.periods + 1 for _ in self.task.size))
        sent = replace(AMPLITUDES, check=partial(_check_amplitudes, window))
        return (
            Phase("amplitudes", 1, (), (sent,), self.measure_step, self.keep, everyone=True),
            Phase("bank", 1, (BANK,), (), self.bank_step, self.forget, self.send, everyone=True),
        )

    def bank(self, memory: Memory) -> State:
        """What a site, or the server, has."""
        return self.slot.read(memory).amplitudes

    def send(self, server: Memory, site: str) -> Mapping[str, State]:
        """The other sites' amplitudes."""
        return {BANK.name: {name: tensor for name, tensor in self.bank(server).items() if name != site}}

    def measure_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Amplitudes of some training images, within the site's bounds on features."""
        images, bounds = torch.from_numpy(slices_of(data.train).images), context.bounds
        # An image's amplitudes are features of one image of one patient.
        if not len(images) or not bounds.allow(("",)):
            return ClientResult({AMPLITUDES.name: {}}, weight=1.0)
        count = max(1, round(self.config.spectra_share * len(images)))
        chosen = torch.randperm(len(images), generator=context.generator("amplitudes"))[:count]
        found = low_amplitudes(images[chosen], self.config.periods)
        if bounds.clip is not None:
            found = clipped(found.flatten(2), bounds.clip).view_as(found)
        if bounds.noise and bounds.clip is not None:
            deviation = bounds.noise * bounds.clip
            draws = context.noise("amplitudes", {"amplitudes": found}, deviation)
            # A negative amplitude would be another phase.
            found = (found + torch.from_numpy(draws.normal(0, deviation, found.shape)).float()).clamp(min=0)
        return ClientResult({AMPLITUDES.name: {"amplitudes": found}}, weight=1.0)

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """The bank, by site."""
        sent = result.collected.get(AMPLITUDES.name, {})
        return self.slot.write(server, Bank({site: s["amplitudes"] for site, s in sent.items() if s}))

    def forget(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """The sites have the bank; the server drops it."""
        return self.slot.clear(server)

    def bank_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Keep the other sites' amplitudes."""
        bank = Bank({site: tensor.clone() for site, tensor in received[BANK.name].items()})
        return ClientResult({}, 1.0, self.slot.write(memory, bank))


@register("feddg", FedDgConfig, refused={"volumes": "its amplitudes and boundary episodes are of slices"})
class FedDg(FedAvg):
    """FedAvg by episodes, with amplitudes from other sites."""

    def __init__(self, config: FedDgConfig, task: Task) -> None:
        super().__init__(config, task)
        self.amplitudes = Amplitudes(config, task)
        self.exchange(self.describe, self.describe, self.amplitudes)
        self.config: FedDgConfig = config
        self._head = head_paths(outline(self.network.name, **self.network.arguments))[-1]
        if config.periods > most_periods(task.size):
            raise ConfigurationError(
                f"feddg does not fit the task '{task.name}'",
                [
                    f"periods: expected at most {most_periods(task.size)} in images of "
                    f"{'x'.join(map(str, task.size))}, found {config.periods}"
                ],
            )

    @override
    def update(self, network: nn.Module, here: SiteRound) -> Update:
        """FedAvg's update, by episodes."""
        loss = self.episodes(
            here.context, network, slices_of(here.data.train), self.amplitudes.bank(here.memory)
        )
        return Update(state_of(network), loss)

    def episodes(
        self, context: StepContext, network: nn.Module, slices: Examples, bank: Mapping[str, Tensor]
    ) -> float:
        """Train in place; returns the mean total loss. Without a bank x' is x."""
        schedule = self.schedule(context.round)
        optimiser, least = new_optimiser(network, schedule), least_batch(network, slices, schedule.batch_size)
        draw = context.generator("interpolation")
        network.train()
        losses: list[Tensor] = []
        for batch in scheduled_batches(slices, schedule, context.generator("train"), least):
            seen = self.seen_elsewhere(batch.images, bank, draw)
            optimiser.zero_grad(set_to_none=True)
            total = self.episode(network, batch, seen)
            torch.autograd.backward(total)
            optimiser.step()
            losses.append(total.detach())
        return mean_loss(losses)

    def seen_elsewhere(self, images: Tensor, bank: Mapping[str, Tensor], draw: torch.Generator) -> Tensor:
        """The images, each with amplitudes of an image of another site; every site is as likely."""
        if not bank:
            return images
        sites = sorted(bank)
        others = []
        for site in torch.randint(len(sites), (len(images),), generator=draw).tolist():
            own = bank[sites[site]]
            others.append(own[int(torch.randint(len(own), (), generator=draw))])
        shares = torch.rand(len(images), generator=draw)
        if self.config.mixing == "replaced":
            shares = torch.ones_like(shares)
        return interpolated(images, torch.stack(others), shares)

    def episode(self, network: nn.Module, batch: Batch, seen: Tensor) -> Tensor:
        """The total loss of a batch and of `seen`, the same images as seen elsewhere."""
        config, weights = self.config, dict(network.named_parameters())
        device = next(iter(weights.values())).device
        logits, features = self._answer(network, weights, batch.images.to(device), batch.randomised)
        inner = batch.loss(self.loss, logits)
        second = config.order == "second"
        slopes = torch.autograd.grad(
            inner, list(weights.values()), create_graph=second, retain_graph=True, allow_unused=True
        )
        moved = {
            name: weight
            if slope is None
            else weight - config.inner_rate * slope.clamp(-config.inner_clip, config.inner_clip)
            for (name, weight), slope in zip(weights.items(), slopes, strict=True)
        }
        # The running statistics are those of images as they are.
        logits, others = self._answer(network, moved, seen.to(device), held=True)
        total = inner + batch.loss(self.loss, logits)
        if config.boundary_weight:
            outlined = batch.targets.masked_fill(batch.targets == IGNORED, 0)
            contrasted = boundary_contrast((features, others), outlined, self.classes)
            total = total + config.boundary_weight * contrasted
        return total

    def _answer(
        self, network: nn.Module, weights: Mapping[str, Tensor], images: Tensor, held: bool
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, K, ...] and the input [B, F, ...] of the last layer, float32, with these weights."""
        features: list[Tensor] = []
        hook = network.get_submodule(self._head).register_forward_pre_hook(
            lambda _, inputs: features.append(inputs[0])
        )
        try:
            with mixed_precision(self.config.precision, images.device), held_statistics(network, held):
                logits = functional_call(network, dict(weights), (images,))
        finally:
            hook.remove()
        return to_float32(logits), to_float32(features[0])


def _check_amplitudes(window: tuple[int, ...], state: State, size: SiteSize) -> None:
    """Raise for what no site of this size can send: every image has one window of amplitudes."""
    found = state.get("amplitudes")
    if list(state) != ["amplitudes"] or found is None or found.dtype != torch.float32:
        raise ValueError(f"expected the float32 tensor 'amplitudes', found {sorted(state)}")
    most = len(found) if size.images is None else size.images
    if tuple(found.shape[1:]) != window or not 1 <= len(found) <= most:
        raise ValueError(
            f"expected [N, {', '.join(map(str, window))}] of 1 to {most} images, found {list(found.shape)}"
        )
    if bool((found < 0).any()):
        raise ValueError("expected amplitudes of at least 0")
