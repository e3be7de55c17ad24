"""Which cluster's model suits a hospital that was in no cluster, judged by its images alone.

FedBiCross gives every hospital of the federation its cluster's model; the paper has no hospital from outside.
No label is there to choose by, so a criterion says how badly a model seems to suit the images, and the least
cost is picked:

    statistics    how far each batch norm's input is from what the model expects of it (Hellinger, 0..1)
    information   entropy of each answer less that of the mean answer (-1..0): a model that suits is decided,
                  and not for one class whatever it sees
    combined      the sum of these two
    entropy       how undecided the model is (0..1)
    consistency   how much the answers change with a little noise on the images (0..1)
    consensus     how far the answers are from the mean of all clusters' answers (0..1)

A model that always answers the same is the best of all by `entropy` and `consistency`.

Legend: N images, C channels, H and W height and width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from personalization.gate.statistics import statistics_distance

Criterion = Literal["combined", "statistics", "information", "entropy", "consistency", "consensus"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
# In standard deviations of each image, as `consistency` adds it.
NOISE = 0.2
# Images per forward, and at most so many pixels: bounds the memory, and changes no result but the noise.
_BATCH, _PIXELS = 64, 2**19


@dataclass(frozen=True)
class Observed:
    """What a model makes of images, image by image, so that any part of them can be judged by itself.

    `answers` and `noisy` [N, K] float64 are class probabilities, the latter for the images with noise.
    `moments` has, by batch norm layer, mean and mean square of its input over each image [N, 2, C], and
    `expected` the layers' running statistics.
    """

    answers: Tensor
    noisy: Tensor
    moments: dict[str, Tensor]
    expected: dict[str, Tensor]

    def part(self, index: Tensor) -> Observed:
        """The same of some of the images, which may come more than once."""
        moments = {name: found[index] for name, found in self.moments.items()}
        return Observed(self.answers[index], self.noisy[index], moments, self.expected)


@torch.no_grad()
def observe(
    network: nn.Module, images_NCHW: Tensor, seed: int = 0, tick: Callable[[], None] = lambda: None
) -> Observed:
    """Ask the model, in evaluation mode as it is served, on its own device. `seed` draws the noise, the same
    for every model; `tick` is called before every batch, and may raise. Raises ValueError for no images."""
    if not len(images_NCHW):
        raise ValueError("there is no image to pick a cluster by")
    network.eval()
    device = next(network.parameters()).device
    draw = torch.Generator().manual_seed(seed)
    plain, noisy = [], []
    size = max(1, min(_BATCH, _PIXELS // images_NCHW[0, 0].numel()))
    with _watched(network) as moments:
        for part in torch.split(images_NCHW, size):
            tick()
            plain.append(network(part.to(device)).double().softmax(dim=1).cpu())
    for part in torch.split(images_NCHW, size):
        tick()
        noise = torch.randn(part.shape, generator=draw) * part.std(dim=(1, 2, 3), keepdim=True, correction=0)
        noisy.append(network((part + NOISE * noise).to(device)).double().softmax(dim=1).cpu())
    state = network.state_dict()
    expected = {name: t.cpu() for name, t in state.items() if name.endswith(("running_mean", "running_var"))}
    whole = {name: torch.cat(found) for name, found in moments.items()}
    return Observed(torch.cat(plain), torch.cat(noisy), whole, expected)


@contextmanager
def _watched(network: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Within, every forward pass adds the moments of each batch norm's input, [B, 2, C]."""
    norms = {name: m for name, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    moments: dict[str, list[Tensor]] = {name: [] for name in norms}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].double()
            found = torch.stack([values.mean(dim=(2, 3)), values.square().mean(dim=(2, 3))], dim=1)
            moments[name].append(found.cpu())

        return hook

    handles = [norm.register_forward_pre_hook(watch(name)) for name, norm in norms.items()]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def statistics_cost(observed: Observed) -> float:
    """Mean squared Hellinger distance of what the batch norms see from what they expect, each channel taken
    as a normal distribution: 0 where nothing differs, 1 where nothing is shared (or is no number)."""
    seen: dict[str, Tensor] = {}
    for name, found in observed.moments.items():
        mean, square = found.mean(dim=0)
        variance = (square - mean.square()).clamp(min=0)
        seen |= {f"{name}.running_mean": mean, f"{name}.running_var": variance}
    return statistics_distance({name: observed.expected[name] for name in seen}, seen)


def entropies(answers_NK: Tensor) -> Tensor:
    """[N]: -sum_k p log p of each answer, over log K."""
    normalised: Tensor = torch.special.entr(answers_NK).sum(dim=1) / math.log(answers_NK.shape[1])
    return normalised


def information_cost(answers_NK: Tensor) -> float:
    """Mean entropy less the entropy of the mean answer: minus the mutual information of image and class, over
    log K. 0 for answers that are always the same, -1 for sure ones that are all classes in equal parts."""
    marginal = entropies(answers_NK.mean(dim=0, keepdim=True))
    return float(entropies(answers_NK).mean() - marginal.mean())


def variation(first_NK: Tensor, second_NK: Tensor) -> float:
    """Mean total variation distance between answers to the same images, within 0..1."""
    return float((first_NK - second_NK).abs().sum(dim=1).mean() / 2)


def costs(criterion: Criterion, observed: Mapping[str, Observed]) -> dict[str, float]:
    """What every cluster's model costs by a criterion."""
    if criterion == "consensus":
        mean = torch.stack([own.answers for own in observed.values()]).mean(dim=0)
        return {name: variation(own.answers, mean) for name, own in observed.items()}
    return {name: _COSTS[criterion](own) for name, own in observed.items()}


_COSTS: Mapping[Criterion, Callable[[Observed], float]] = {
    "combined": lambda own: statistics_cost(own) + information_cost(own.answers),
    "statistics": statistics_cost,
    "information": lambda own: information_cost(own.answers),
    "entropy": lambda own: float(entropies(own.answers).mean()),
    "consistency": lambda own: variation(own.answers, own.noisy),
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
    tick: Callable[[], None] = lambda: None,
) -> float:
    """Share of bootstrap draws of the scans that pick what all scans together pick.

    `scan_of_image` [N] says from which scan, 0, 1, …, each image is.
    """
    chosen = cheapest(costs(criterion, observed))
    images = [torch.nonzero(scan_of_image == scan).flatten() for scan in range(int(scan_of_image.max()) + 1)]
    same = 0
    for _ in range(draws):
        tick()
        drawn = torch.randint(len(images), (len(images),), generator=generator).tolist()
        index = torch.cat([images[scan] for scan in drawn])
        again = costs(criterion, {name: own.part(index) for name, own in observed.items()})
        same += cheapest(again) == chosen
    return same / draws
