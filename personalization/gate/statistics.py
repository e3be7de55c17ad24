"""Distance of the hospital's images from the training images, by batch norm's statistics."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.errors import StateError
from personalization.iop_fl.batch_norm import blend_statistics
from personalization.networks.capabilities import moving_norms
from personalization.test_time.ladder import thinned

_MEAN, _VARIANCE = ".running_mean", ".running_var"
# Of batch norm: what it adds to a variance before it divides by it
_EPSILON = 1e-5


def shift_of_statistics(
    parent: Mapping[str, Tensor],
    candidate: nn.Module,
    images_NCHW: Tensor,
    check_cancelled: CancelCheck = never_cancelled,
) -> float:
    """`statistics_distance` of a parent's state and a candidate with statistics of these images alone.

    The candidate's own statistics are shrunk towards the parent's, more so for fewer images, so two images
    would always be near. 0 without batch norm. Costs one pass over evenly spaced images; the candidate stays
    as it was.
    """
    measured, images = copy.deepcopy(candidate), thinned(images_NCHW)
    norms = moving_norms(measured)
    if not norms:
        return 0.0
    blend_statistics(measured, images, [1.0] * len(norms), len(images), check_cancelled)
    return statistics_distance(parent, measured.state_dict())


def statistics_distance(parent: Mapping[str, Tensor], merged: Mapping[str, Tensor]) -> float:
    """Mean squared Hellinger distance between the running statistics of two states, within 0..1.

    Each channel's statistics are taken as a normal distribution:

        H^2 = 1 - sqrt(2 s s' / (v + v')) exp(-(m - m')^2 / (4 (v + v')))        s = sqrt(v)

    0 where they are equal, 1 where they share nothing; the mean is over the channels of a layer, then over
    the layers, so that wide deep layers do not dominate. 0 without batch norm; a channel with statistics that
    are not numbers counts 1. Raises StateError when the states' statistics do not correspond.
    """
    layers = [name.removesuffix(_MEAN) for name in parent if name.endswith(_MEAN)]
    if layers != [name.removesuffix(_MEAN) for name in merged if name.endswith(_MEAN)]:
        raise StateError("statistics: the two states have different batch norm layers; compare one network's")
    distances = []
    for layer in layers:
        m, v = _statistics(parent, layer)
        n, w = _statistics(merged, layer)
        if m.shape != n.shape:
            raise StateError(f"statistics of '{layer}': expected {list(m.shape)}, found {list(n.shape)}")
        distances.append(squared_hellinger(m, v, n, w).mean())
    return float(torch.stack(distances).mean()) if distances else 0.0


def squared_hellinger(m: Tensor, v: Tensor, n: Tensor, w: Tensor) -> Tensor:
    """H^2 of the normal distributions with means m, n and variances v, w, element by element; 1 where one of
    them is no number. Raised by a little, as batch norm does it, variances may be 0."""
    v, w = v + _EPSILON, w + _EPSILON
    affinity = (2 * (v * w).sqrt() / (v + w)).sqrt() * torch.exp(-((m - n) ** 2) / (4 * (v + w)))
    return 1 - affinity.nan_to_num(0)


def _statistics(state: Mapping[str, Tensor], layer: str) -> tuple[Tensor, Tensor]:
    mean, variance = state[layer + _MEAN].double().cpu(), state[layer + _VARIANCE].double().cpu()
    return mean, variance
