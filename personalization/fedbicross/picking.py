"""Which cluster's model suits a hospital that was in no cluster, judged by its images alone.

FedBiCross gives every hospital of the federation its cluster's model; the paper has no hospital from outside.
No label is there to choose by, so a criterion says how badly a model seems to suit the images, and the least
cost is picked:

    information   entropy of each answer less that of the mean answer (-1..0): a model that suits is decided,
                  and not for one class whatever it sees; the default, as it came out best on the phantom
    statistics    how far each batch norm's input is from what the model expects of it (Hellinger, 0..1)
    combined      the sum of these two
    entropy       how undecided the model is (0..1)
    consistency   how much the answers change with a little noise on the images (0..1)
    consensus     how far the answers are from the mean of all clusters' answers (0..1)

A model that always answers the same is the best of all by `entropy` and `consistency`. Of two clusters both
cost the same by `consensus`. A hospital whose images are all of one class misleads `information`.

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
from personalization.options.picking import Criterion

# In standard deviations of each image, as `consistency` adds it.
NOISE = 0.2
# Images per forward, and at most so many pixels: bounds the memory, and changes no result but the noise.
_BATCH, _PIXELS = 64, 2**19


@dataclass(frozen=True)
class Observed:
    """What a model makes of images, image by image, so that any part of them can be judged by itself.

    `answers` and `noisy` [N, K] are class probabilities, the latter for the images with noise. `moments`
    [N, 2, C] has mean and mean square over each image of what each channel of the batch norms sees, the
    layers one after another, `expected` [2, C] their running means and variances, and `shares` [C] what each
    counts: every layer the same, and its channels alike. All float64, on the CPU.
    """

    answers: Tensor
    noisy: Tensor
    moments: Tensor
    expected: Tensor
    shares: Tensor


@torch.no_grad()
def observe(
    network: nn.Module, images_NCHW: Tensor, seed: int = 0, check_cancelled: CancelCheck = never_cancelled
) -> Observed:
    """Ask the model, in evaluation mode as it is served, on its own device. `seed` draws the noise, the same
    for every model; `check_cancelled` is called before every batch, and may raise. Raises ValueError for no
    images."""
    if not len(images_NCHW):
        raise ValueError("there is no image to pick a cluster by")
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
        noise = torch.randn(part.shape, generator=draw) * part.std(dim=(1, 2, 3), keepdim=True, correction=0)
        noisy.append(network((part + NOISE * noise).to(device)).double().softmax(dim=1).cpu())
    norms = batch_norms(network)
    means, variances = (
        [getattr(n, f"running_{what}").double().cpu() for n in norms] for what in ("mean", "var")
    )
    return Observed(
        torch.cat(plain),
        torch.cat(noisy),
        torch.cat([torch.cat(found) for found in moments], dim=2),
        torch.stack([torch.cat(means), torch.cat(variances)]),
        torch.cat([torch.full_like(mean, 1 / (len(norms) * len(mean))) for mean in means]),
    )


def batch_norms(network: nn.Module) -> list[nn.BatchNorm2d]:
    """Those that keep running statistics, in the order of the modules."""
    found = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    return [norm for norm in found if norm.running_mean is not None]


@contextmanager
def _watched(network: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Within, every forward pass adds the moments of each batch norm's input, [B, 2, C]."""
    norms = batch_norms(network)
    moments: list[list[Tensor]] = [[] for _ in norms]

    def watch(own: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].double()
            found = torch.stack([values.mean(dim=(2, 3)), values.square().mean(dim=(2, 3))], dim=1)
            own.append(found.cpu())

        return hook

    handles = [norm.register_forward_pre_hook(watch(own)) for norm, own in zip(norms, moments, strict=True)]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def entropies(answers: Tensor) -> Tensor:
    """-sum_k p log p of each answer [..., K], over log K."""
    normalised: Tensor = torch.special.entr(answers).sum(dim=-1) / math.log(answers.shape[-1])
    return normalised


def statistics_cost(observed: Observed, weights_DN: Tensor) -> Tensor:
    """Mean squared Hellinger distance of what the batch norms see from what they expect, each channel taken
    as a normal distribution: 0 where nothing differs, 1 where nothing is shared (or is no number)."""
    mean_DC, square_DC = torch.einsum("dn,nmc->mdc", weights_DN, observed.moments)
    variance_DC = (square_DC - mean_DC.square()).clamp(min=0)
    expected_mean, expected_variance = observed.expected
    return squared_hellinger(expected_mean, expected_variance, mean_DC, variance_DC) @ observed.shares


def information_cost(observed: Observed, weights_DN: Tensor) -> Tensor:
    """Mean entropy less the entropy of the mean answer: minus the mutual information of image and class, over
    log K. 0 for answers that are always the same, -1 for sure ones that are all classes in equal parts."""
    return weights_DN @ entropies(observed.answers) - entropies(weights_DN @ observed.answers)


def variation(first_NK: Tensor, second_NK: Tensor) -> Tensor:
    """[N]: total variation distance between two answers to each image, within 0..1."""
    return (first_NK - second_NK).abs().sum(dim=1) / 2


def costs(criterion: Criterion, observed: Mapping[str, Observed]) -> dict[str, float]:
    """What every cluster's model costs by a criterion, over all images."""
    count = len(next(iter(observed.values())).answers)
    even = torch.full((1, count), 1 / count, dtype=torch.float64)
    return {name: float(found) for name, found in _weighted(criterion, observed, even).items()}


def _weighted(
    criterion: Criterion, observed: Mapping[str, Observed], weights_DN: Tensor
) -> dict[str, Tensor]:
    """The same [D] for each way to weight the images; each row of `weights_DN` adds up to 1."""
    if criterion == "consensus":
        mean = torch.stack([own.answers for own in observed.values()]).mean(dim=0)
        return {name: weights_DN @ variation(own.answers, mean) for name, own in observed.items()}
    return {name: _COSTS[criterion](own, weights_DN) for name, own in observed.items()}


_COSTS: Mapping[Criterion, Callable[[Observed, Tensor], Tensor]] = {
    "combined": lambda own, weights: statistics_cost(own, weights) + information_cost(own, weights),
    "statistics": statistics_cost,
    "information": information_cost,
    "entropy": lambda own, weights: weights @ entropies(own.answers),
    "consistency": lambda own, weights: weights @ variation(own.answers, own.noisy),
}


def cheapest(found: Mapping[str, float]) -> str:
    """The cluster of the least cost; of equals the first. One that is no number is never it.

    Raises ValueError where none is a number.
    """
    numbers = {name: cost for name, cost in found.items() if math.isfinite(cost)}
    if not numbers:
        raise ValueError(f"no cluster's model has a cost that is a number: {dict(found)}")
    return min(numbers, key=numbers.__getitem__)


def stability(
    criterion: Criterion,
    observed: Mapping[str, Observed],
    scan_of_image: Tensor,
    generator: torch.Generator,
    draws: int = 100,
) -> float:
    """Share of bootstrap draws of the scans that pick what all scans together pick.

    `scan_of_image` [N] says from which scan, 0, 1, …, each image is; where patients can be told, from which
    patient.
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
