"""The loop of test-time adaptation: learn from a hospital's unlabeled images (IOP-FL, 1.4 with 1.7).

    step 0: measure                                    for routing, the uniform average of the models
    for each epoch:
        for each batch, each time the same:
            one step of the preset's objective, over what the preset learns
        measure over all images, with the same noise every time; stop if that is not safe
    keep the safe state with the lowest loss, step 0 among them (`personalization.keep_best`)

No label is used. The loss that chooses an epoch is measured after it, not during it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.checkpoint import digest
from personalization.errors import AdaptationError
from personalization.iop_fl.network import parameter_groups, routed_layers
from personalization.iop_fl.routers import PooledRouter
from personalization.keep_best import KeepBest
from personalization.networks.capabilities import MOST_DIMENSIONS, spatial_axes
from personalization.state import State, clone
from personalization.test_time.checkpoint import AdaptationCheckpoint, EpochRecord, Fingerprint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import (
    Batch,
    EpochScore,
    Objective,
    class_maps,
    json_float,
    score,
)
from personalization.test_time.safety import SafetyLimits, unsafe_reason

_LIMITS = SafetyLimits()


@dataclass(frozen=True)
class Adaptation:
    """The result of an adaptation. `history[i]` is epoch i, step 0 first.

    `stopped` says why it ended early, None if it ran through; `fell_back` that the network is as at step 0,
    because it was stopped or because no epoch was better; never where nothing was to be learned.
    """

    best_epoch: int
    history: tuple[EpochRecord, ...]
    stopped: str | None
    fell_back: bool


@dataclass(frozen=True)
class Learning:
    """What is learned, and by which loss.

    Attributes:
        network: changed in place. Its parameters outside `groups` are frozen.
        groups: the learned parameters, each with the rate of Adam.
        objective: the loss of a batch, and the step.
        origin: tensors that decide the result too, such as a teacher's answers. A checkpoint belongs to them.
    """

    network: nn.Module
    groups: tuple[tuple[list[nn.Parameter], float], ...]
    objective: Objective
    origin: State = field(default_factory=dict)


def routing(network: nn.Module, config: AdaptationConfig, objective: Objective) -> Learning:
    """What a preset of routing learns of a routed network: coefficients, batch norm's scale and shift.

    Raises AdaptationError for a network that is not routed as configured.
    """
    _check_routed(network, config)
    rates = {"routing": config.rate, "bn": config.bn_rate}
    groups = tuple(
        (parameters if name in config.learns else [], rates[name])
        for name, parameters in parameter_groups(network).items()
    )
    return Learning(network, groups, objective)


def learn(
    learning: Learning,
    images_NCHW: Tensor,
    config: AdaptationConfig,
    *,
    resume: AdaptationCheckpoint | None = None,
    after_epoch: Callable[[AdaptationCheckpoint], None] | None = None,
    check_cancelled: CancelCheck = never_cancelled,
    limits: SafetyLimits = _LIMITS,
) -> Adaptation:
    """Adapt a network in place to one hospital's images, and leave it at its best safe state.

    `after_epoch` gets a checkpoint after every epoch, step 0 included, with the network in its present state.
    `resume` continues from any of them bit for bit, also in another process, and passes it to `after_epoch`
    again: a killed process may not have handled it. `check_cancelled` is called before every step and every
    batch that is measured. An exception of either ends the adaptation and is raised, with the network at the
    best safe state so far. Nothing is drawn from torch's global generator.

    Raises AdaptationError for images that do not fit, CheckpointError for a checkpoint of another
    configuration, other experts or other images.
    """
    _check(images_NCHW)
    run = _Run(learning, images_NCHW, config, limits, check_cancelled)
    run.run(resume, after_epoch)
    last = run.history[-1]
    stopped = None if last.safe else f"stopped at epoch {last.epoch}: {last.reason}"
    fell_back = run.best_epoch == 0 and config.passes > 0
    return Adaptation(run.best_epoch, tuple(run.history), stopped, fell_back)


class _Run(KeepBest[EpochRecord, AdaptationCheckpoint]):
    """A running adaptation."""

    def __init__(
        self,
        learning: Learning,
        images: Tensor,
        config: AdaptationConfig,
        limits: SafetyLimits,
        check_cancelled: CancelCheck,
    ) -> None:
        network, objective = learning.network, learning.objective
        self._images, self._config = images, config
        self._objective, self._limits, self._check_cancelled = objective, limits, check_cancelled
        network.requires_grad_(False)
        for parameters, _ in learning.groups:
            for parameter in parameters:
                parameter.requires_grad_(True)
        groups = [{"params": parameters, "lr": rate} for parameters, rate in learning.groups]
        self._optimiser = torch.optim.Adam(groups, betas=(0.9, 0.999))
        learned = {name: value for name, value in network.named_parameters() if value.requires_grad}
        super().__init__(network, learned, config.passes)
        self._initial = self.best
        frozen = {name: value for name, value in network.named_parameters() if not value.requires_grad}
        experts = digest(frozen | dict(network.named_buffers()) | learning.origin)
        self._fingerprint = Fingerprint(config.facts(), experts, digest({"images": images}))

    @override
    def start(self) -> EpochRecord:
        self._before = class_maps(self.network, self._batches(), self._check_cancelled)
        start = self._score()
        self._start = start.reading
        return self._record(0, start)

    @override
    def restore(self, checkpoint: AdaptationCheckpoint) -> None:
        self._fingerprint.check(checkpoint.fingerprint)
        self._initial, self.best = checkpoint.initial, checkpoint.best
        # Computing step 0's masks again costs less than storing them in every checkpoint.
        self.load(self._initial)
        self.start()
        self.history, self.best_epoch = list(checkpoint.history), checkpoint.best_epoch
        self.load(checkpoint.state)
        for name, parameter in self.learned.items():
            prefix = f"{name}/"
            moments = {
                k.removeprefix(prefix): v for k, v in checkpoint.optimiser.items() if k.startswith(prefix)
            }
            if moments:
                self._optimiser.state[parameter] = {
                    # The count of steps lives on the CPU, the moments with their parameter
                    moment: value.clone() if moment == "step" else value.to(parameter, copy=True)
                    for moment, value in moments.items()
                }

    @override
    def learn(self, epoch: int) -> EpochRecord:
        return self._learn(epoch) or self._record(epoch, self._score())

    @override
    def improves(self, record: EpochRecord, best: EpochRecord) -> bool:
        return record.loss is not None and best.loss is not None and record.loss < best.loss

    @override
    def checkpoint(self) -> AdaptationCheckpoint:
        optimiser = {
            f"{name}/{moment}": value.detach().clone()
            for name, parameter in self.learned.items()
            for moment, value in self._optimiser.state.get(parameter, {}).items()
        }
        return AdaptationCheckpoint(
            fingerprint=self._fingerprint,
            epoch=self.history[-1].epoch,
            state=clone(self.learned),
            optimiser=optimiser,
            best_epoch=self.best_epoch,
            best=self.best,
            initial=self._initial,
            history=tuple(self.history),
        )

    def _learn(self, epoch: int) -> EpochRecord | None:
        """Train one epoch. Returns a record that is not safe if the epoch broke off, otherwise None."""
        self.network.train()
        config, objective = self._config, self._objective
        for step, chosen in enumerate(objective.epoch_batches(len(self._images), config, epoch)):
            self._check_cancelled()
            batch = Batch.of(self._images, chosen).on(self.network)
            seed = objective.step_seed(config, epoch, step)
            if not math.isfinite(objective.step(self.network, batch, config, self._optimiser, seed)):
                reason = f"the loss of step {step + 1} is not a finite number; lower the learning rates"
                return EpochRecord(epoch, None, None, None, None, None, None, safe=False, reason=reason)
        return None

    def _batches(self) -> Iterator[Batch]:
        """The batches in which images are measured; one at a time, since all would be a second cohort."""
        for chosen in self._objective.batches(len(self._images), self._config):
            yield Batch.of(self._images, chosen)

    def _score(self) -> EpochScore:
        return score(
            self._objective,
            self.network,
            self._batches(),
            self._config,
            self._before,
            self._check_cancelled,
        )

    def _record(self, epoch: int, found: EpochScore) -> EpochRecord:
        reason = unsafe_reason(found.reading, self._start, self._limits)
        return EpochRecord(
            epoch,
            loss=json_float(found.reading.loss),
            consistency=json_float(found.consistency),
            shape=json_float(found.shape),
            entropy=json_float(found.entropy),
            foreground=json_float(found.reading.foreground),
            agreement=json_float(found.reading.agreement),
            safe=reason is None,
            reason=reason,
        )


def _check(images: Tensor) -> None:
    dimensions = len(spatial_axes(images))
    if not 1 <= dimensions <= MOST_DIMENSIONS or not len(images) or not images.is_floating_point():
        raise AdaptationError(
            "images: expected at least one, floating, [N, C, H, W], "
            f"found {list(images.shape)} {images.dtype}"
        )
    if not bool(torch.isfinite(images).all()):
        bad = [index for index, image in enumerate(images) if not bool(torch.isfinite(image).all())]
        raise AdaptationError(
            f"images: {len(bad)} of {len(images)} have values that are not finite, first image {bad[0]}"
        )


def _check_routed(network: nn.Module, config: AdaptationConfig) -> None:
    layers = routed_layers(network).values()
    if not layers:
        raise AdaptationError(
            f"expected a routed network (see `route`), found a plain {type(network).__name__}"
        )
    if len(next(iter(layers)).experts) > 1:  # one expert alone needs no router of either kind
        found = "pooled" if any(isinstance(layer.router, PooledRouter) for layer in layers) else "direct"
        if found != config.router:
            raise AdaptationError(
                f"adaptation: router: the configuration says '{config.router}', the network was routed with "
                f"'{found}'; route it as configured"
            )
