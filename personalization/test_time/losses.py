"""The unsupervised losses of test-time adaptation, on probabilities (softmax over classes).

Each is mean-reduced, so that its size depends on neither batch nor image; the two `official_` ones are the
authors' public code instead, for parity. Probabilities are to be float32 or wider: float16 has no 1e-6.

Legend: B batch, K classes, H and W height and width. All take images, volumes and signals: one to three
spatial axes in the place of H and W.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from personalization.networks.capabilities import spatial_axes

_POOLS: tuple[Callable[..., Tensor], ...] = (
    functional.max_pool1d,
    functional.max_pool2d,
    functional.max_pool3d,
)
# Keeps log finite where a class has probability 0
EPSILON = 1e-6
# Half the side of a shape loss's window, in pixels of an image of 384 (official code)
RANGE_AT_384 = 10


def consistency(first_BKHW: Tensor, second_BKHW: Tensor) -> Tensor:
    """C = mean (z - z')^2 (Eq. 7): how far two views of the same images disagree.

    The mean is over classes too, as in the public code, where Eq. 7 sums over them. Gradients flow through
    both views.
    """
    return (first_BKHW - second_BKHW).square().mean()


def entropy(probabilities_BKHW: Tensor) -> Tensor:
    """Mean over images and pixels of -sum_c p_c ln(p_c + 1e-6) / ln K (Eq. 9): 0 when sure, 1 when even."""
    classes = probabilities_BKHW.shape[1]
    return _information(probabilities_BKHW).sum(dim=1).mean() / math.log(classes)


def official_entropy(probabilities_BKHW: Tensor) -> Tensor:
    """-sum_b p ln(p + 1e-6) / ln K, mean over classes and pixels: the public code's E.

    It sums over the batch in place of the classes: B / K times `entropy`, so it grows with the batch.
    """
    classes = probabilities_BKHW.shape[1]
    return _information(probabilities_BKHW).sum(dim=0).mean() / math.log(classes)


def shape_distance(probabilities_BKHW: Tensor, d: int) -> Tensor:
    """Mean over images and pixels of d(p, q) = sum_c max_Q p_c - min_Q p_c (Eq. 8), Q the (2d+1)^2 around.

    Large along edges, so a compact mask with few of them costs least; wrong for scattered targets (1.5).
    """
    return _spread(probabilities_BKHW, d).sum(dim=1).mean()


def official_shape(probabilities_BKHW: Tensor, d: int = RANGE_AT_384) -> Tensor:
    """|| 1e-6 (max_Q p + max_Q -p) ||_F over the foreground of the whole batch: the public code's S."""
    # Not sqrt of a sum of squares: where nothing varies, that has no gradient
    norm: Tensor = torch.linalg.vector_norm(EPSILON * _spread(probabilities_BKHW[:, 1:], d))
    return norm


def shape_range(*sides: int) -> int:
    """The d of `shape_distance` for images with these sides: 10 pixels at 384, at least 1."""
    return max(1, round(RANGE_AT_384 * min(sides) / 384))


def _information(probabilities: Tensor) -> Tensor:
    return -probabilities * torch.log(probabilities + EPSILON)


def _spread(values: Tensor, d: int) -> Tensor:
    """max - min over the 2d+1 along each axis around each pixel, the part inside the image."""
    return _highest(values, d) + _highest(-values, d)


def _highest(values: Tensor, d: int) -> Tensor:
    # Axis by axis: the same maximum from 2 (2d+1) comparisons a pixel of an image instead of (2d+1)^2
    axes = len(spatial_axes(values))
    pool = _POOLS[axes - 1]
    for axis in range(axes):
        window = tuple(2 * d + 1 if axis == other else 1 for other in range(axes))
        values = pool(values, window, stride=1, padding=tuple(side // 2 for side in window))
    return values
