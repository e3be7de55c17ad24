"""Pick a cluster's model for a hospital outside the federation, from its unlabelled images.

FedBiCross gives every member hospital its cluster's model; the paper has no outside hospitals. Without labels
to choose by, a criterion estimates the cost of each model on the images, and the model with the least cost is
picked:

    information   mean entropy of the answers minus the entropy of the mean answer (-1..0): a suitable model
                  is certain, but not always of the same class; the default, because it was the best on the
                  phantom
    statistics    distance of each batch norm's input from its running statistics (Hellinger, 0..1)
    combined      the sum of these two
    entropy       uncertainty of the answers (0..1)
    consistency   change of the answers when a little noise is added to the images (0..1)
    consensus     distance of the answers from the mean of all clusters' answers (0..1)

By `entropy` and `consistency`, a model that always gives the same answer has the least cost. With two
clusters, both have the same cost by `consensus`. If all images of a hospital are of one class, `information`
is misleading.

Legend: N images, C channels, H and W height and width, K classes, D draws of images, S scans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.gate.statistics import squared_hellinger
from personalization.networks.capabilities import moving_norms, required_norms, spatial_axes
from personalization.options.picking import Criterion

# Noise that `consistency` adds, in standard deviations of each image.
NOISE = 0.2
# Images per forward pass, and the largest number of pixels. They bound the memory; only the noise depends on
# them.
_BATCH, _PIXELS = 64, 2**19


@dataclass(frozen=True)
class ObservedCluster:
    """A model's outputs and statistics for each image, so that any subset of images can be evaluated.

    `answers` and `noisy` [N, K] are class probabilities, the latter for the images with noise. `moments`
    [N, 2, C] has the mean and the mean square over each image of every input channel of the batch norms, the
    layers one after another. `expected` [2, C] has their running means and variances, and `shares` [C] the
    weight of each channel: layers are weighted equally, and so are the channels of a layer. All are float64,
    on the CPU.
    """

    answers: Tensor
    noisy: Tensor
    moments: Tensor
    expected: Tensor
    shares: Tensor


@torch.no_grad()
def observe(
    network: nn.Module, images_NCHW: Tensor, seed: int = 0, check_cancelled: CancelCheck = never_cancelled
) -> ObservedCluster:
    """Run the model on images in evaluation mode, as when served, on its own device.

    `seed` draws the noise, which is the same for every model. `check_cancelled` is called before every batch,
    and may raise. Raises ValueError for no images, NetworkError for a network without batch norm.
    """
    if not len(images_NCHW):
        raise ValueError("expected at least one image to pick a cluster by, found none")
    norms = required_norms(network, "a cluster is picked by statistics").values()
    network.eval()
    device = next(network.parameters()).device
    draw = torch.Generator().manual_seed(seed)
    plain, noisy = [], []
    size = max(1, min(_BATCH, _PIXELS // images_NCHW[0, 0].numel()))
    with _watched(network) as moments:
        for part in torch.split(images_NCHW, size):
            check_cancelled()
            plain.append(network(part.to(device)).double().softmax(dim=1).cpu())
    for part in torch.split(images_NCHW, size):
        check_cancelled()
        noise = torch.randn(part.shape, generator=draw) * part.std(
            dim=(1, *spatial_axes(part)), keepdim=True, correction=0
        )
        noisy.append(network((part + NOISE * noise).to(device)).double().softmax(dim=1).cpu())
    means, variances = (
        [getattr(n, f"running_{what}").double().cpu() for n in norms] for what in ("mean", "var")
    )
    return ObservedCluster(
        torch.cat(plain),
        torch.cat(noisy),
        torch.cat([torch.cat(found) for found in moments], dim=2),
        torch.stack([torch.cat(means), torch.cat(variances)]),
        torch.cat([torch.full_like(mean, 1 / (len(norms) * len(mean))) for mean in means]),
    )


@contextmanager
def _watched(network: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Within the context, collect the moments of each batch norm's input, [B, 2, C], per forward pass."""
    norms = moving_norms(network).values()
    moments: list[list[Tensor]] = [[] for _ in norms]

    def watch(own: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].double()
            axes = spatial_axes(values)
            found = torch.stack([values.mean(dim=axes), values.square().mean(dim=axes)], dim=1)
            own.append(found.cpu())

        return hook

    handles = [norm.register_forward_pre_hook(watch(own)) for norm, own in zip(norms, moments, strict=True)]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def entropies(answers: Tensor) -> Tensor:
    """Compute -sum_k p log p of each answer [..., K], divided by log K."""
    normalised: Tensor = torch.special.entr(answers).sum(dim=-1) / math.log(answers.shape[-1])
    return normalised


def statistics_cost(observed: ObservedCluster, weights_DN: Tensor) -> Tensor:
    """Compute the mean squared Hellinger distance of batch-norm inputs from the running statistics.

    Each channel is treated as a normal distribution: 0 for equal, 1 for disjoint distributions (or NaN).
    """
    mean_DC, square_DC = torch.einsum("dn,nmc->mdc", weights_DN, observed.moments)
    variance_DC = (square_DC - mean_DC.square()).clamp(min=0)
    expected_mean, expected_variance = observed.expected
    return squared_hellinger(expected_mean, expected_variance, mean_DC, variance_DC) @ observed.shares


def information_cost(observed: ObservedCluster, weights_DN: Tensor) -> Tensor:
    """Compute the mean entropy minus the entropy of the mean answer.

    This is minus the mutual information of image and class, divided by log K: 0 for answers that are always
    the same, -1 for certain answers with all classes in equal parts.
    """
    return weights_DN @ entropies(observed.answers) - entropies(weights_DN @ observed.answers)


def variation(first_NK: Tensor, second_NK: Tensor) -> Tensor:
    """Compute the total variation distance [N] between two answers to each image, within 0..1."""
    return (first_NK - second_NK).abs().sum(dim=1) / 2


def costs(criterion: Criterion, observed: Mapping[str, ObservedCluster]) -> dict[str, float]:
    """Compute the cost of every cluster's model by a criterion, over all images."""
    count = len(next(iter(observed.values())).answers)
    even = torch.full((1, count), 1 / count, dtype=torch.float64)
    return {name: float(found) for name, found in _weighted(criterion, observed, even).items()}


def _weighted(
    criterion: Criterion, observed: Mapping[str, ObservedCluster], weights_DN: Tensor
) -> dict[str, Tensor]:
    """Compute the costs [D] for D weightings of the images; each row of `weights_DN` sums to 1."""
    if criterion == "consensus":
        mean = torch.stack([own.answers for own in observed.values()]).mean(dim=0)
        return {name: weights_DN @ variation(own.answers, mean) for name, own in observed.items()}
    return {name: _COSTS[criterion](own, weights_DN) for name, own in observed.items()}


_COSTS: Mapping[Criterion, Callable[[ObservedCluster, Tensor], Tensor]] = {
    "combined": lambda own, weights: statistics_cost(own, weights) + information_cost(own, weights),
    "statistics": statistics_cost,
    "information": information_cost,
    "entropy": lambda own, weights: weights @ entropies(own.answers),
    "consistency": lambda own, weights: weights @ variation(own.answers, own.noisy),
}


def cheapest(found: Mapping[str, float]) -> str:
    """Find the cluster with the least cost, the first of equals. Costs that are not finite are ignored.

    Raises ValueError if no cost is finite.
    """
    numbers = {name: cost for name, cost in found.items() if math.isfinite(cost)}
    if not numbers:
        raise ValueError(f"no cluster's model has a cost that is a number: {dict(found)}")
    return min(numbers, key=numbers.__getitem__)


def stability(
    criterion: Criterion,
    observed: Mapping[str, ObservedCluster],
    scan_of_image: Tensor,
    generator: torch.Generator,
    draws: int = 100,
) -> float:
    """Compute the share of bootstrap draws of the scans that pick the same cluster as all scans together.

    `scan_of_image` [N] has the scan, 0, 1, …, of each image, or the patient if patients are known.
    """
    chosen = cheapest(costs(criterion, observed))
    scans = int(scan_of_image.max()) + 1
    drawn_DS = torch.randint(scans, (draws, scans), generator=generator)
    often_DS = torch.zeros(draws, scans, dtype=torch.float64)
    often_DS.scatter_add_(1, drawn_DS, torch.ones_like(often_DS))
    weights_DN = often_DS[:, scan_of_image]
    found = _weighted(criterion, observed, weights_DN / weights_DN.sum(dim=1, keepdim=True))
    each = [cheapest({name: float(cost[draw]) for name, cost in found.items()}) for draw in range(draws)]
    return each.count(chosen) / draws
