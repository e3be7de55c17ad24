"""FedOAP at a site: the steps that both of its stages take, and the second stage, which is the site's alone.

From the end of stage 1 on a site's memory holds one `model`, whole, and the `bank` as it stands then; `best`
is there while another than the last round's model is the one to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from model_store.manifest import NetworkSpec
from personalization.adamw import Optimiser, cosine, train_adamw
from personalization.domain_randomisation import randomise_half
from personalization.fedoap.losses import second_stage_loss
from personalization.fedoap.parts import split
from personalization.networks import FedOapUNet
from personalization.precision import mixed_precision, to_float32
from training.algorithm import ClientResult, Memory, State, StepContext
from training.errors import SiteFailed
from training.local.data import slices_of
from training.local.networks import state_of
from training.local.scores import ValidationScore, evaluate
from training.local.site import SiteData
from training.methods.fedoap import models
from training.methods.fedoap.config import FedOapConfig
from training.parts.export import export_personal
from training.state_tree import join, part

CLASSES = 2
JOINED = "joined_val_dice"  # of the weights that a site receives, joined to its own: no one's global model
Loss = Callable[[Tensor, Tensor], Tensor]


def logits(config: FedOapConfig, network: FedOapUNet, images: Tensor) -> Tensor:
    """z [B, 1, H, W] float32, for a loss; the network's products are of the configured precision."""
    with mixed_precision(config.precision, images.device):
        found: Tensor = network.segment(images)[0]
    return to_float32(found)


def _batches(
    config: FedOapConfig, data: SiteData, context: StepContext, randomise: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch after the other."""
    if not len(data.train):
        raise SiteFailed("expected at least one training slice, found none")
    draw, slices = context.generator("train"), slices_of(data.train)
    for _ in count():
        for images, targets in slices.epoch(config.batch_size, draw, config.augment, 1, context.device):
            yield randomise_half(images, draw)[0] if randomise else images, targets


def take_steps(
    config: FedOapConfig,
    network: FedOapUNet,
    data: SiteData,
    context: StepContext,
    memory: Memory,
    loss: Loss,
    rates: Sequence[float],
    randomise: bool,
) -> tuple[float, Optimiser]:
    """Train in place, a batch per rate, one epoch after the other; moments go on from the memory's.

    Gives the mean loss and the optimiser after it. Raises SiteFailed when there is nothing to train on.
    """
    endless = _batches(config, data, context, randomise)
    before = Optimiser(config.weight_decay, part(memory.tensors, "optimiser"), memory.facts.get("taken", 0))
    return train_adamw(network, endless, loss, rates, before)


def begin(model: State, bank: State, score: ValidationScore) -> ClientResult:
    """The end of stage 1: from here on the site's model is one, and its bank stands."""
    facts = {"total": score.total, "patients": score.patients, "round": 0}
    kept = Memory(join({"model": model, "bank": bank}), {"latest": facts, "best": facts})
    return ClientResult({}, 1.0, kept, score.metrics(JOINED))


def fine_tune(
    config: FedOapConfig,
    spec: NetworkSpec,
    context: StepContext,
    memory: Memory,
    data: SiteData,
    loss_of: Callable[[FedOapUNet], Loss] | None = None,
) -> ClientResult:
    """A round of stage 2, validated after it; `loss_of` a network replaces the configured loss.

    Raises SiteFailed without a model or a training slice.
    """
    model, bank = model_of(memory), part(memory.tensors, "bank")
    network = models.on_device(spec, model, models.entries(bank), context.device)
    steps = config.fine_tune_steps or config.local_steps
    rates = cosine(
        config.fine_tune_rate or config.learning_rate,
        config.least_rate,
        steps * context.rounds,
        range(steps * context.round, steps * (context.round + 1)),
    )
    loss = loss_of(network) if loss_of else _loss(config, network, context.generator("perturbation"))
    randomise = config.domain_randomisation != "none"
    mean, optimiser = take_steps(config, network, data, context, memory, loss, rates, randomise)
    score = evaluate(network, data.val, CLASSES, config.batch_size)
    shared, personal = split(state_of(network), own_keys=config.own_keys)
    latest = {"total": score.total, "patients": score.patients, "round": context.round + 1}
    best = memory.facts["best"]
    states = {"model": {**shared, **personal}, "bank": bank, "optimiser": optimiser.moments}
    if config.selection == "last" or score.beats(ValidationScore(best["total"], best["patients"])):
        best = latest
    else:
        states["best"] = part(memory.tensors, "best") or model
    facts = {"latest": latest, "best": best, "taken": optimiser.taken}
    metrics = {**score.metrics("personal_val_dice"), "loss": mean}
    return ClientResult({}, 1.0, Memory(join(states), facts), metrics)


def chosen(memory: Memory) -> State:
    """The model of stage 2 that the site keeps; empty at a site without one."""
    return part(memory.tensors, "best") or part(memory.tensors, "model")


def export(memory: Memory) -> ClientResult:
    """The chosen model. The bank it attends to is the server's already. Raises SiteFailed without one."""
    model = chosen(memory) or model_of(memory)
    facts = memory.facts["best"]
    return export_personal(model, ValidationScore(facts["total"], facts["patients"]))


def _loss(config: FedOapConfig, network: FedOapUNet, generator: torch.Generator) -> Loss:
    """One forward pass for both terms of the perturbed boundary loss."""

    def loss(images: Tensor, targets: Tensor) -> Tensor:
        return second_stage_loss(
            logits(config, network, images),
            targets,
            generator,
            perturbed=config.fine_tune_loss == "perturbed",
            variance=config.pbl_variance,
            threshold=config.pbl_threshold,
            trade_off=config.pbl_trade_off,
        )

    return loss


def model_of(memory: Memory) -> State:
    """The site's model as it is now. Raises SiteFailed without one."""
    found = part(memory.tensors, "model")
    if not found:
        raise SiteFailed("it has no model of its own: it dropped out of the phase 'validate'")
    return found
