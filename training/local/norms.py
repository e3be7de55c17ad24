"""The running batch-norm statistics of a network on one site's data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from model_store.manifest import NetworkSpec
from personalization.networks import outline
from personalization.networks.capabilities import batch_norms, moving_norms, running
from training.algorithm import State
from training.local.data import Data
from training.local.networks import network_of, state_of


@contextmanager
def held_statistics(network: nn.Module, randomised: bool) -> Iterator[None]:
    """Leave the running batch-norm statistics as they are while `randomised` images pass.

    They are those of images as they are, which a network meets when it serves.
    """
    norms = moving_norms(network).values() if randomised else ()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


@torch.no_grad()
def least_batch(network: nn.Module, data: Data, batch_size: int) -> int:
    """The images that a batch needs: two where a batch of one would come and the network cannot normalise it.

    Batch norm in training has no variance of a single value: where a small image has become one pixel, it
    needs another image. Leaves the network in evaluation mode if it had to be asked.
    """
    image = data.single(batch_size)
    if image is None:
        return 1
    lonely: list[bool] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        lonely.append(inputs[0].numel() == inputs[0].shape[1])

    hooks = [norm.register_forward_pre_hook(note) for norm in batch_norms(network).values()]
    try:
        network.eval()
        network(torch.tensor(image).to(next(network.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return 2 if any(lonely) else 1


@torch.no_grad()
def estimate_statistics(network: nn.Module, data: Data, batch_size: int = 16) -> None:
    """Replace the running batch-norm statistics by the mean over batches of these slices, not augmented.

    After few steps a moving average still describes the weights of many steps ago. Every batch takes slices
    from the whole set, since neighbours belong to one patient. Volumes are met by windows. Leaves the network
    in training mode.
    """
    slices = data.met()
    least = least_batch(network, slices, batch_size)
    norms = moving_norms(network).values()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
    network.train()
    device = next(network.parameters()).device
    count = min(math.ceil(len(slices) / batch_size), max(len(slices) // least, 1))
    for first in range(count):
        images = torch.tensor(slices.images[first::count]).to(device)
        network(images if len(images) >= least else torch.cat([images] * least))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def with_statistics(
    spec: NetworkSpec, state: State, slices: Data, batch_size: int, device: torch.device
) -> State:
    """A network's weights with the batch-norm statistics that `estimate_statistics` finds."""
    network = network_of(spec, state, device)
    estimate_statistics(network, slices, batch_size)
    return state_of(network)


def batch_moments(network: nn.Module, slices: Data, batch_size: int = 16) -> State:
    """Mean and mean square of every batch norm's input, by `estimate_statistics`: [C] float64 each.

    Nothing where there is no slice. They are means, so that those of several sites can be averaged.
    """
    if not len(slices):
        return {}
    estimate_statistics(network, slices, batch_size)
    found: State = {}
    for path, norm in moving_norms(network).items():
        mean, variance = (statistic.double().cpu() for statistic in running(norm))
        found |= {f"{path}.mean": mean, f"{path}.square": variance + mean.square()}
    return found


def moments_of(spec: NetworkSpec) -> State:
    """Names, shapes and types of a network's `batch_moments`, without values."""
    return {
        f"{path}.{kind}": torch.empty(norm.num_features, dtype=torch.float64, device="meta")
        for path, norm in moving_norms(outline(spec.name, **spec.arguments)).items()
        for kind in ("mean", "square")
    }


def with_moments(state: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> State:
    """A network's state with the running batch-norm statistics that `batch_moments` describe."""
    statistics: State = {}
    for name in moments:
        path, kind = name.rsplit(".", 1)
        if kind == "mean":
            mean = moments[name]
            variance = (moments[f"{path}.square"] - mean.square()).clamp(min=0)
            statistics |= {f"{path}.running_mean": mean, f"{path}.running_var": variance}
    return {name: statistics.get(name, tensor).to(tensor.dtype) for name, tensor in state.items()}


def positive_variances(noisy: State, received: State) -> State:
    """A state with noise, with running variances of at least half those that the site received.

    Below zero they would make the network's outputs NaN, and near zero huge.
    """
    return {
        name: torch.maximum(tensor, received[name] / 2) if name.endswith("running_var") else tensor
        for name, tensor in noisy.items()
    }
