"""Label-free features of an adaptation: what the gate predicts its gain from.

All are means over a cohort, and cost one forward pass of the parent and one of the candidate.

Legend: N images, C channels, K classes, H and W height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.gate.masks import mean_fragments
from personalization.gate.routing import Targets
from personalization.gate.statistics import squared_hellinger
from personalization.iop_fl.batch_norm import image_moments
from personalization.iop_fl.network import mixed_batches
from personalization.networks.capabilities import BatchNorm, moving_norms, running

BATCH = 16
# Share of all pixels, added to a target's size before its logarithm.
_EPS = 1e-3
# Quantile over a member's patients that counts as a large target.
LARGE = 0.95


@dataclass(frozen=True)
class View:
    """What one network says of a cohort.

    Attributes:
        maps: its masks, [N, H, W] uint8.
        certainty: its soft Dice with its own masks (SDC, arXiv 2402.10665).
        foreground: share of the pixels that are a target.
        shift: how far the statistics that its batch norms see are from their running ones, by thirds of the
            network (`statistics_distance`); None where it was not measured.
    """

    maps: Tensor
    certainty: float
    foreground: float
    shift: tuple[float, float, float] | None


@torch.no_grad()
def view(
    network: nn.Module,
    images_NCHW: Tensor,
    check_cancelled: CancelCheck = never_cancelled,
    *,
    shift: bool = False,
) -> View:
    """One forward pass, with running statistics; measuring the `shift` takes as long again."""
    network.eval()
    norms = list(moving_norms(network).values()) if shift else []
    sums: list[list[Tensor]] = [[] for _ in norms]

    def note(index: int, features_BCHW: Tensor) -> None:
        mean, variance = image_moments(features_BCHW)
        sums[index].append(torch.stack([mean, variance + mean.square()]).sum(dim=1))

    handles = [
        norm.register_forward_pre_hook(lambda _norm, inputs, index=index: note(index, inputs[0]))
        for index, norm in enumerate(norms)
    ]
    batches = mixed_batches(images_NCHW, BATCH)
    maps, overlap, total, target = [], 0.0, 0.0, 0
    try:
        for batch in batches:
            check_cancelled()
            probabilities = torch.softmax(network(batch), dim=1)
            found = probabilities.argmax(dim=1)
            maps.append(found.to("cpu", torch.uint8))
            foreground, mask = 1 - probabilities[:, 0], (found > 0).to(probabilities)
            overlap += float(2 * (foreground * mask).sum())
            total += float(foreground.sum() + mask.sum())
            target += int(mask.sum())
    finally:
        for handle in handles:
            handle.remove()
    order = torch.cat([torch.arange(first, len(images_NCHW), len(batches)) for first in range(len(batches))])
    together = torch.cat(maps)
    return View(
        torch.empty_like(together).index_copy_(0, order, together),
        overlap / total if total else 1.0,
        target / together.numel(),
        _thirds([_distance(norm, parts, len(images_NCHW)) for norm, parts in zip(norms, sums, strict=True)])
        if shift
        else None,
    )


def _distance(norm: BatchNorm, parts: list[Tensor], count: int) -> float:
    """Mean squared Hellinger distance over a layer's channels."""
    mean, square = torch.stack(parts).sum(dim=0) / count
    variance = (square - mean.square()).clamp(min=0)
    usual_mean, usual_variance = (statistic.double() for statistic in running(norm))
    return float(squared_hellinger(usual_mean, usual_variance, mean, variance).mean())


def _thirds(distances: list[float]) -> tuple[float, float, float]:
    """Mean over the first, the middle and the last third of the layers; 0 of none."""
    groups: list[list[float]] = [[], [], []]
    for index, distance in enumerate(distances):
        groups[3 * index // len(distances)].append(distance)
    early, middle, late = (sum(group) / max(len(group), 1) for group in groups)
    return early, middle, late


@dataclass(frozen=True)
class Features:
    """What the gate knows of one adaptation.

    Attributes:
        early, middle, late: square root of the shift of the parent's statistics, by thirds of the layers.
        certainty: that of the parent.
        certainty_change: the candidate's minus the parent's.
        size_change: logarithm of the candidate's target over the parent's, squashed.
        size_gain: how much nearer the candidate's target is than the parent's to the federation's, in
            logarithms, squashed: beyond a factor of two a target is found or lost. 0 if that size is unknown.
        disagreement: 1 - Dice of the candidate's masks with the parent's, all images as one.
    """

    early: float
    middle: float
    late: float
    certainty: float
    certainty_change: float
    size_change: float
    size_gain: float
    disagreement: float

    def values(self) -> list[float]:
        """In the order of `FEATURES`."""
        return [getattr(self, name) for name in FEATURES]


FEATURES = tuple(Features.__dataclass_fields__)


def features_of(parent: View, candidate: View, share: float) -> Features:
    """Features of a candidate beside its parent, from what both say of the cohort that was adapted to.

    `share` is the share of the pixels that are a target at the federation's members, 0 if it is unknown. The
    parent's view has its shift.
    """
    assert parent.shift is not None
    early, middle, late = (math.sqrt(shift) for shift in parent.shift)
    ours, theirs = candidate.maps > 0, parent.maps > 0
    both = int(ours.sum()) + int(theirs.sum())
    agreement = 2 * int((ours & (candidate.maps == parent.maps)).sum()) / both if both else 1.0
    away, still_away = (abs(_log_ratio(view.foreground, share)) for view in (parent, candidate))
    return Features(
        early,
        middle,
        late,
        parent.certainty,
        candidate.certainty - parent.certainty,
        math.tanh(2 * _log_ratio(candidate.foreground, parent.foreground)),
        math.tanh(2 * (away - still_away)) if share else 0.0,
        1 - agreement,
    )


def _log_ratio(one: float, other: float) -> float:
    return math.log((one + _EPS) / (other + _EPS))


def targets_of(targets_NHW: Tensor, patients: Sequence[str], classes: int) -> Targets:
    """What a member's targets look like, of class indices; `patients` has each slice's.

    `largest` is the 95th percentile over patients, so that one unusual patient neither counts nor shows.
    """
    maps = targets_NHW.numpy()
    shares = (maps > 0).mean(axis=tuple(range(1, maps.ndim)))
    _, index = np.unique(np.asarray(patients), return_inverse=True)
    by_patient = np.bincount(index, weights=shares) / np.bincount(index)
    return Targets(float(shares.mean()), float(np.quantile(by_patient, LARGE)), mean_fragments(maps, classes))


def typical_targets(members: Sequence[Targets]) -> Targets:
    """Targets of several members: the geometric mean of the shares (0 if one has none, or there are no
    members), the largest, and the mean of the pieces."""
    if not members:
        return Targets()
    shares = [member.share for member in members]
    share = math.exp(math.fsum(map(math.log, shares)) / len(shares)) if all(shares) else 0.0
    largest = max(member.largest for member in members)
    return Targets(share, largest, math.fsum(member.pieces for member in members) / len(members))
