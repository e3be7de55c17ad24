"""What a site does with a pool: its images' queries, training, scoring, and which entries they pick.

Legend: N images, B of a batch, M entries, Q width of a query, T tokens, D width of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from personalization.augmentation import Augmentation
from personalization.domain_randomisation import randomise_half
from personalization.fedins import InstanceAdaptive, PoolOutput, fedins_loss, random_entries, usage_of
from personalization.losses import Loss
from personalization.precision import mixed_precision, to_float32
from personalization.transfer import sent
from training.algorithm import Noise, State
from training.bounds import FeatureBounds, clipped
from training.local.data import Answers, Examples
from training.local.loop import mean_loss
from training.methods.fedins.config import FedInsConfig, PoolPicking

# For the images of one split at a site: 1,300 images of 224 pixels for a ViT-S/14.
MOST_STEM_BYTES = 2**29


def queries_of(network: InstanceAdaptive, data: Examples, batch_size: int) -> Tensor:
    """[N, Q], on the CPU. They depend on the frozen backbone alone: made once, they are good for the run."""
    device = network.pool.keys.device
    parts = [
        network.query(part.clone().to(device)).cpu()
        for part in torch.split(torch.from_numpy(data.images), batch_size)
        if len(part)
    ]
    return torch.cat(parts) if parts else torch.empty(0, network.backbone.query_width)


def stems_of(network: InstanceAdaptive, data: Examples, batch_size: int) -> Tensor | None:
    """[N, T, D], what the images give to the adapted blocks, on the CPU; as good for the run as the queries.

    None where all blocks are adapted, and where it is more than `MOST_STEM_BYTES`.
    """
    if network.blocks is None or not len(data):
        return None
    device = network.pool.keys.device
    parts: list[Tensor] = []
    for images in torch.split(torch.from_numpy(data.images), batch_size):
        parts.append(network.stem(images.clone().to(device)).cpu())
        if len(data) * parts[0][0].nbytes > MOST_STEM_BYTES:
            return None
    return torch.cat(parts)


def see(network: InstanceAdaptive, data: Examples, batch_size: int, *, stems: bool = True) -> State:
    """{"queries": [N, Q]} and, of blocks that are kept, {"stems": [N, T, D]}."""
    found = {"queries": queries_of(network, data, batch_size)}
    if stems and (made := stems_of(network, data, batch_size)) is not None:
        found["stems"] = made
    return found


def summed_queries(queries_NQ: Tensor, patients: Sequence[str], bounds: FeatureBounds, noise: Noise) -> State:
    """{"sum": [Q] float64, "count": []}, of which a server makes a mean; {} for too few images or patients.

    `patients` has each image's. `bounds` are on the site's own mean: noise of its sum is `count` times that
    of the mean. `noise` is the context's.
    """
    if not bounds.allow(patients):
        return {}
    total = clipped(queries_NQ[:, None].double(), bounds.clip).squeeze(1).sum(0)
    if bounds.noise and bounds.clip is not None:
        deviation = bounds.noise * bounds.clip
        draws = noise("queries", {"sum": total}, deviation)
        total += torch.from_numpy(draws.normal(0, deviation, total.shape))
    return {"sum": total, "count": torch.tensor(float(len(queries_NQ)))}


def routed(
    network: InstanceAdaptive,
    images: Tensor,
    queries: Tensor,
    routing: PoolPicking,
    generator: torch.Generator,
    penalty_M: Tensor | None = None,
    stem: Tensor | None = None,
) -> PoolOutput:
    """The network's answer, or that of a control: one mean for the whole batch, or entries at random."""
    if routing == "instance":
        return network.answer(images, queries, penalty_M, stem)
    stem = network.stem(images) if stem is None else stem
    if routing == "random":
        picked = random_entries(queries - network.pool.centre, network.pool.keys, network.top, generator)
        return PoolOutput(network.apply_delta(stem, network.pool.delta(picked)), picked)
    picked = network.pick(queries, penalty_M)
    delta = network.pool.delta(picked)
    mean = type(delta)(*(tensor.mean(dim=0, keepdim=True) for tensor in vars(delta).values()))
    return PoolOutput(network.apply_delta(stem, mean), picked)


def train_pool(
    network: InstanceAdaptive,
    data: Examples,
    seen: State,
    config: FedInsConfig,
    round_: int,
    loss: Loss,
    generator: torch.Generator,
    penalty_M: Tensor | None = None,
) -> float:
    """Train the pool in place for a round; returns the mean loss of the batches.

    `seen` has what `see` makes of the images. `generator` alone decides order, augmentation and random
    entries. `penalty_M` is subtracted from similarities before choosing.
    """
    device = network.pool.keys.device
    rate = config.learning_rate * config.learning_rate_decay**round_
    optimisers = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    optimiser = optimisers[config.optimiser](network.pool.parameters(), lr=rate)
    network.train()
    known = loss if data.told is None else data.told.loss(loss)
    losses: list[Tensor] = []
    randomise = config.randomises(round_)
    for _ in range(config.local_epochs):
        for images, targets, chosen in _epoch(data, config, generator, device):
            images, randomised = randomise_half(images, generator) if randomise else (images, False)
            changed = config.augment or randomised
            queries = network.query(images) if changed else sent(seen["queries"][chosen], device)
            stem = sent(seen["stems"][chosen], device) if "stems" in seen and not changed else None
            optimiser.zero_grad(set_to_none=True)
            with mixed_precision(config.precision, device):
                found = routed(network, images, queries, config.routing, generator, penalty_M, stem)
            total = fedins_loss(
                known(to_float32(found.logits), targets), found.picked.similarities, config.key_weight
            )
            torch.autograd.backward(total)
            optimiser.step()
            losses.append(total.detach())
    return mean_loss(losses)


@torch.no_grad()
def predict_pool(
    network: InstanceAdaptive, data: Examples, seen: State, config: FedInsConfig, generator: torch.Generator
) -> Answers:
    """The answer to every scan, or to every image with a class. There is at least one image.

    Every image picks its own entries, and the slices of a scan pick together, as the service lets them.
    """
    device = network.pool.keys.device
    asking = data.together(seen["queries"]) if config.routing == "instance" else seen["queries"]

    def logits() -> Iterator[Tensor]:
        for start in range(0, len(data), config.batch_size):
            some = slice(start, start + config.batch_size)
            images = torch.from_numpy(data.images[some].copy()).to(device)
            stem = seen["stems"][some].to(device) if "stems" in seen else None
            yield routed(
                network, images, asking[some].to(device), config.routing, generator, stem=stem
            ).logits

    return data.answered(logits())


@torch.no_grad()
def usage_by(network: InstanceAdaptive, queries_NQ: Tensor) -> Tensor:
    """How often images with these queries pick each entry, int64 [M]."""
    picked = network.pick(queries_NQ.to(network.pool.keys.device))
    return usage_of(picked.entries, network.pool.keys.shape[0])


def _epoch(
    data: Examples, config: FedInsConfig, generator: torch.Generator, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every image once, shuffled: images and targets on a device, and indices. No batch norm asks for more
    than one image."""
    images = torch.from_numpy(data.images)
    targets = torch.from_numpy(data.targets)
    for chosen in torch.split(torch.randperm(len(images), generator=generator), config.batch_size):
        batch, truth = sent(images[chosen], device), sent(targets[chosen], device)
        if config.augment:
            batch, truth = data.turned(batch, truth, *Augmentation().draw(len(chosen), generator))
        yield batch, truth, chosen
