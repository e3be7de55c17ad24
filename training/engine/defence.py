"""What a federation's server believes of its sites: weights of a mean, sizes of updates, robust reductions.

Legend: n sites, x_k an upload, w what the server sent, m_k training images, f sites that may lie.

    size of an update      ||x_k - w||; of three sites or more, more than
                           bound = most_norm median_j(||x_j - w||) max(1, m_k / median_j(m_j)), j not k,
                           is too much: x_k <- w + (x_k - w) bound / ||x_k - w||, or the site is dropped.
                           A site with more images takes more steps, and so moves further. Noise for
                           differential privacy that the site adds is never too much
    median                 coordinate by coordinate (Yin et al., ICML 2018)
    trimmed mean           coordinate by coordinate, without the `trim` n lowest and highest, at least one of
                           each (same paper)
    Krum                   the x_k with the least sum of squared distances to its n - f - 2 nearest
                           (Blanchard et al., NeurIPS 2017)

Robust reductions count every site alike, whatever its weight. They need all uploads of a round at once, which
lie in files; memory holds one tensor of all sites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from personalization.state import State, clone

_NONE: Mapping[str, Any] = MappingProxyType({})

Robust = Literal["mean", "median", "trimmed-mean", "krum"]


def update_norm(upload: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> float:
    """Compute ||x - w|| over the floating tensors, in float64."""
    squares = (
        float((tensor.double() - sent[name].double()).square().sum())
        for name, tensor in upload.items()
        if tensor.is_floating_point()
    )
    return math.sqrt(math.fsum(squares))


def bounds(
    norms: Mapping[str, float],
    most: float,
    images: Mapping[str, int] = _NONE,
    noises: Mapping[str, float] = _NONE,
) -> dict[str, float]:
    """Map each site to the largest norm that its update may have (see the top of the module).

    `images` has the sites' numbers of training images, without those that are unknown, and `noises` the
    norms of the noise that sites add. There is no bound for fewer than three sites, since any of two may
    be the one that lies, nor where the median of the other sites' updates is zero.
    """
    found: dict[str, float] = {}
    for site in norms:
        typical = median(norm for other, norm in norms.items() if other != site) if len(norms) >= 3 else 0.0
        if not typical:
            found[site] = math.inf
            continue
        others = [count for other, count in images.items() if other != site and other in norms]
        larger = images[site] / max(median(others), 1) if site in images and others else 1.0
        found[site] = max(most * typical * max(1.0, larger), noises.get(site, 0.0))
    return found


def capped(weights: Sequence[float], share: float) -> list[float]:
    """Lower the largest weights, all to one value, so that none is more than `share` of their sum.

    With too few weights for that, all become equal.
    """
    if share == 1:
        return list(weights)
    ordered = sorted(weights)
    # The `cut` largest get the cap: of the sum, each then has exactly the share.
    for cut in range(min(math.ceil(1 / share), len(ordered))):
        rest = ordered[: len(ordered) - cut]
        cap = share * math.fsum(rest) / (1 - share * cut)
        if rest[-1] <= cap:
            return [min(weight, cap) for weight in weights]
    return [1.0] * len(weights)


def scaled(upload: Mapping[str, Tensor], sent: Mapping[str, Tensor], factor: float) -> State:
    """Compute w + factor (x - w). Integer tensors are the upload's. With factor 0, x may overflow."""
    return {
        name: sent[name].clone()
        if not factor and tensor.is_floating_point()
        else (sent[name].double() + factor * (tensor.double() - sent[name].double())).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor.clone()
        for name, tensor in upload.items()
    }


def least_uploads(how: Robust, trim: float, liars: int) -> int:
    """Return the number of uploads below which `robust_reduction` raises ValueError."""
    if how == "krum":
        return liars + 3
    return 3 if how == "trimmed-mean" and trim else 1


def robust_reduction(uploads: Sequence[Mapping[str, Tensor]], how: Robust, trim: float, liars: int) -> State:
    """Reduce uploads of equal names and shapes. Integer tensors are the first upload's, or the chosen one's.

    Raises ValueError where there are too few uploads for `liars` or `trim`.
    """
    count = len(uploads)
    if how == "krum":
        return clone(uploads[krum(uploads, liars)])
    # A share of few sites would round to none, and leave a plain mean.
    cut = max(1, math.floor(trim * count)) if trim else 0
    if how == "trimmed-mean" and count <= 2 * cut:
        raise ValueError(f"trim: expected to leave a site of {count}, found {trim}")
    result: State = {}
    for name, first in uploads[0].items():
        if not first.is_floating_point():
            result[name] = first.clone()
            continue
        values = torch.stack([upload[name].double() for upload in uploads]).sort(dim=0).values
        if how == "median":
            reduced = (values[(count - 1) // 2] + values[count // 2]) / 2
        else:
            reduced = values[cut : count - cut].mean(dim=0)
        result[name] = reduced.to(first.dtype)
    return result


def krum(uploads: Sequence[Mapping[str, Tensor]], liars: int) -> int:
    """Choose an upload by its distance to its nearest ones. Raises ValueError for fewer than `liars` + 3."""
    count = len(uploads)
    nearest = count - liars - 2
    if nearest < 1:
        raise ValueError(f"liars: expected at most {count - 3} of {count} sites for krum, found {liars}")
    squares = torch.zeros(count, count, dtype=torch.float64)
    for name, first in uploads[0].items():
        if first.is_floating_point():
            flat = torch.stack([upload[name].double().flatten() for upload in uploads])
            # Differences, not products: where the uploads are alike, products cancel.
            for site in range(count):
                squares[site] += (flat - flat[site]).square().sum(dim=1)
    squares.fill_diagonal_(math.inf)
    return int(squares.sort(dim=1).values[:, :nearest].sum(dim=1).argmin())
