"""Domain randomisation: images as no scanner shows them, so that a network does not rely on how one does.

An image goes through a random shallow network (GIN: Ouyang et al., Causality-inspired Single-source Domain
Generalization for Medical Image Segmentation, IEEE TMI 2022, Section III-B), is inverted, loses resolution,
each by chance, and then goes through a drawn scanner (`personalization.scanner`). Its shapes stay.

Training changes all images of a batch or none (`randomise_half`). Batch norm in training normalises a batch
by its own statistics. Within a mixed batch, images as they are would be normalised as they never are in
service, which costs accuracy on them (Xie et al., Adversarial Examples Improve Image Recognition, CVPR 2020,
has the same effect, and a batch norm for each kind).

Legend: B images, C channels, F features, ... one to three spatial axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import conv1d, conv2d, conv3d, interpolate, leaky_relu

from personalization.networks.capabilities import spatial_axes
from personalization.scanner import Scanners, with_moments_of
from personalization.transfer import sent

# GIN's sizes are its paper's.
_LAYERS = 4
_FEATURES = 2
_KERNELS = (1, 3)
_LEAST_RESOLUTION = 0.5
_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: conv1d, 2: conv2d, 3: conv3d}
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True)
class Randomisation:
    """Largest severity of the drawn scanners, and shares of the images that each other change befalls."""

    severity: float = 3.0
    convolutions: float = 0.5
    inversion: float = 0.1
    low_resolution: float = 0.2


def randomise_half(
    images_BC: Tensor, generator: torch.Generator, chosen: Randomisation | None = None
) -> tuple[Tensor, bool]:
    """With an even chance, the batch as it is, or every image of it randomised; and whether it was."""
    if bool(torch.rand((), generator=generator) < 0.5):
        return images_BC, False
    return randomise(images_BC, generator, chosen), True


def randomise(images_BC: Tensor, generator: torch.Generator, chosen: Randomisation | None = None) -> Tensor:
    """Each image changed by draws of its own, with the mean and the deviation that each channel had."""
    chosen = chosen or Randomisation()
    count, seen = len(images_BC), images_BC
    convolved, inverted, coarse = (
        torch.rand(count, generator=generator) < share
        for share in (chosen.convolutions, chosen.inversion, chosen.low_resolution)
    )
    if convolved.any():
        seen = seen.clone()
        # By numbers: on a GPU the host would wait for how many a mask chooses.
        places = sent(convolved.nonzero()[:, 0], seen.device)
        seen[places] = random_convolutions(images_BC[places], generator)
    if inverted.any():
        means = seen.mean(dim=spatial_axes(seen), keepdim=True)
        chosen_BC = sent(inverted, seen.device).view(-1, *(1,) * (seen.ndim - 1))
        seen = torch.where(chosen_BC, 2 * means - seen, seen)
    if coarse.any():
        shares = torch.rand(count, generator=generator).tolist()
        fewer = [
            _coarse(image, share) if c else image
            for image, share, c in zip(seen, shares, coarse, strict=True)
        ]
        seen = with_moments_of(torch.stack(fewer), images_BC)
    severities = chosen.severity * torch.rand(count, generator=generator)
    return Scanners.draw(severities, generator, images_BC.ndim - 2).apply(seen, generator)


def random_convolutions(images_BC: Tensor, generator: torch.Generator) -> Tensor:
    """GIN: each image mixed, by a random share, with what a shallow network of its own makes of it.

    The networks have normal weights and shifts, and a leaky ReLU between their layers; a layer's kernel is 1
    or 3 wide, of all images alike. The paper mixes first and then restores the image's norm. Here both have
    the image's mean and deviation before they are mixed: the network's values are far larger, and the share
    would mean little.
    """
    count, channels, *sides = images_BC.shape
    convolution = _CONVOLUTIONS[len(sides)]
    widths = (channels, *(_FEATURES,) * (_LAYERS - 1), channels)
    # All images in one call, as groups of channels.
    made = images_BC.reshape(1, -1, *sides)
    for layer, (inner, outer) in enumerate(pairwise(widths)):
        kernel = _KERNELS[int(torch.randint(len(_KERNELS), (), generator=generator))]
        weights = torch.randn(count * outer, inner, *(kernel,) * len(sides), generator=generator)
        shifts = torch.randn(count * outer, generator=generator)
        weights, shifts = sent(weights, made.device), sent(shifts, made.device)
        made = convolution(made, weights, shifts, padding=kernel // 2, groups=count)
        if layer < _LAYERS - 1:
            made = leaky_relu(made)
    share = sent(torch.rand(count, generator=generator), images_BC.device)
    share = share.view(-1, *(1,) * (images_BC.ndim - 1))
    made = with_moments_of(made.reshape(images_BC.shape), images_BC)
    return with_moments_of(share * made + (1 - share) * images_BC, images_BC)


def _coarse(image_C: Tensor, drawn: float) -> Tensor:
    """An image [C, ...] at a resolution between the half and its own (`drawn` from 0 to 1), and back."""
    sides = image_C.shape[1:]
    share = _LEAST_RESOLUTION + (1 - _LEAST_RESOLUTION) * drawn
    fewer = [max(round(side * share), 1) for side in sides]
    small = interpolate(image_C[None], size=fewer, mode="area")
    return interpolate(small, size=list(sides), mode=_LINEAR[len(sides)], align_corners=False)[0]
