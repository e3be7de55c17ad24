"""Parts of FedDG (Liu et al., CVPR 2021): amplitudes, their interpolation, and contrast at the boundary.

Legend: B images of a batch, C channels, K classes, F features, M embeddings, ... one to three spatial axes,
w = 2 n + 1 the sides of a window of frequencies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor
from torch.nn import functional

from personalization.networks.capabilities import spatial_axes

# The boundary is a target less its erosion by one pixel; the background around it, its dilation by five less
# the target.
ERODED, DILATED = 1, 5
TEMPERATURE = 0.05


def most_periods(sides: Sequence[int]) -> int:
    """The most periods along each side that a window of frequencies can have in images of these sides."""
    return (min(sides) - 1) // 2


def low_amplitudes(images_BC: Tensor, periods: int) -> Tensor:
    """Amplitudes [B, C, w, ...] of the frequencies up to so many periods along each side, float32.

    The constant term is in the middle. Phases, which hold the anatomy, are not among them.
    """
    axes = spatial_axes(images_BC)
    amplitudes = torch.fft.fftn(images_BC, dim=axes).abs()
    lowest: Tensor = amplitudes[_window(images_BC.shape[2:], periods)].float()
    return lowest


def interpolated(images_BC: Tensor, others_BC: Tensor, shares_B: Tensor) -> Tensor:
    """Images with amplitudes (1 - lambda) A + lambda A_other at the lowest frequencies, and their own phases.

    `others_BC` are of `low_amplitudes`, `shares_B` the lambdas. The result is clipped to each image's own
    range, channel by channel.
    """
    axes = spatial_axes(images_BC)
    spectrum = torch.fft.fftn(images_BC, dim=axes)
    amplitudes = spectrum.abs()
    window = _window(images_BC.shape[2:], (others_BC.shape[2] - 1) // 2)
    share = shares_B.to(images_BC).view(-1, *(1 for _ in images_BC.shape[1:]))
    amplitudes[window] = (1 - share) * amplitudes[window] + share * others_BC.to(amplitudes)
    mixed = torch.fft.ifftn(torch.polar(amplitudes, spectrum.angle()), dim=axes).real
    least, most = images_BC.amin(axes, keepdim=True), images_BC.amax(axes, keepdim=True)
    return torch.minimum(torch.maximum(mixed, least), most)


def _window(sides: Sequence[int], periods: int) -> tuple[Tensor | slice, ...]:
    """Indices of the frequencies -periods..periods along every spatial axis of [B, C, ...]."""
    ranges = [torch.arange(-periods, periods + 1) % side for side in sides]
    return (slice(None), slice(None), *torch.meshgrid(*ranges, indexing="ij"))


def boundaries(targets_B: Tensor, label: int) -> tuple[Tensor, Tensor]:
    """The boundary of a class and the background around it, each a mask [B, ...] of numbers 0 and 1."""
    found = []
    for target in targets_B.cpu().numpy() == label:
        eroded = ndimage.binary_erosion(target, iterations=ERODED)
        around = ndimage.binary_dilation(target, iterations=DILATED)
        found.append((target & ~eroded, around & ~target))
    edge, outside = (torch.from_numpy(np.stack(masks)).float() for masks in zip(*found, strict=True))
    return edge, outside


def embeddings(features_BF: Tensor, mask_B: Tensor) -> Tensor:
    """Mean features [M, F] within the masks of the images that have any."""
    axes = spatial_axes(features_BF)
    mask = mask_B.to(features_BF)[:, None]
    present = mask.flatten(1).any(dim=1)
    return ((features_BF * mask).sum(axes) / mask.sum(axes).clamp(min=1))[present]


def contrast(embeddings_MF: Tensor, labels_M: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """InfoNCE by cosine similarity s, the mean over all pairs (a, p) of one label; 0 where there is no pair.

    l(a, p) = -log( exp(s_ap / t) / (exp(s_ap / t) + sum_n exp(s_an / t)) ), n of the other label
    """
    unit = functional.normalize(embeddings_MF, dim=1)
    scores = unit @ unit.T / temperature
    same = labels_M[:, None] == labels_M[None, :]
    pairs = same & ~torch.eye(len(labels_M), dtype=torch.bool, device=same.device)
    if not pairs.any():
        return scores.sum() * 0
    others = torch.logsumexp(scores.masked_fill(same, -torch.inf), dim=1, keepdim=True)
    losses: Tensor = torch.logaddexp(scores, others) - scores
    return losses[pairs].mean()


def boundary_contrast(passes: Sequence[Tensor], targets_B: Tensor, classes: int) -> Tensor:
    """The sum over the foreground classes of `contrast` between boundary and background.

    `passes` have the features [B, F, ...] of the same images in each pass.
    """
    total = passes[0].sum() * 0
    for label in range(1, classes):
        masks = boundaries(targets_B, label)
        parts = [
            (embeddings(features, mask), index)
            for (index, mask), features in itertools.product(enumerate(masks), passes)
        ]
        labels = torch.cat([torch.full((len(found),), index) for found, index in parts])
        total = total + contrast(torch.cat([found for found, _ in parts]), labels.to(total.device))
    return total
