"""Label-free features of an adaptation: what the gate predicts its gain from.

All are means over a cohort, and cost one forward pass of the parent and one of the candidate.

Legend: N images, C channels, K classes, H and W height and width.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.gate.masks import mean_fragments
from personalization.gate.routing import Targets
from personalization.gate.statistics import squared_hellinger
from personalization.iop_fl.batch_norm import Measuring, Profile
from personalization.iop_fl.network import at_once, mixed_indices
from personalization.networks.capabilities import moving_norms, running

BATCH = 16
# Share of all pixels, added to a target's size before its logarithm.
_EPS = 1e-3
# Quantile over a member's patients that counts as a large target.
LARGE = 0.95


@dataclass(frozen=True)
class View:
    """What one network says of a cohort.

    Attributes:
        maps: its masks, [N, H, W] uint8; of a classification the classes [N].
        certainty: its soft Dice with its own masks (SDC, arXiv 2402.10665).
        foreground: share of the pixels that are a target.
        shift: how far the statistics that its batch norms see are from their running ones, by thirds of the
            network (`statistics_distance`); None where it was not measured.
        profile: the same as a dose by shift takes it; None where it was not measured.
    """

    maps: Tensor
    certainty: float
    foreground: float
    shift: tuple[float, float, float] | None
    profile: Profile | None = None


@torch.no_grad()
def view(
    network: nn.Module,
    images_NCHW: Tensor,
    check_cancelled: CancelCheck = never_cancelled,
    *,
    shift: bool = False,
    patients: Sequence[Hashable] | None = None,
) -> View:
    """One forward pass, with running statistics, which measures the `shift` too.

    `patients`, of every image, ask for the profile; a network without batch norm to move then raises
    NetworkError.
    """
    network.eval()
    measuring = None
    if patients is not None:
        measuring = Measuring(network, patients)
    elif shift and moving_norms(network):
        measuring = Measuring(network, [0] * len(images_NCHW))
    batches = mixed_indices(len(images_NCHW), at_once(BATCH, images_NCHW.shape[2:]))
    maps, overlap, total, target = [], 0.0, 0.0, 0
    with measuring or nullcontext():
        for indices in batches:
            check_cancelled()
            batch = images_NCHW[indices] if measuring is None else measuring.images(indices, images_NCHW)
            probabilities = torch.softmax(network(batch), dim=1)
            found = probabilities.argmax(dim=1)
            maps.append(found.to("cpu", torch.uint8))
            foreground, mask = 1 - probabilities[:, 0], (found > 0).to(probabilities)
            overlap += float(2 * (foreground * mask).sum())
            total += float(foreground.sum() + mask.sum())
            target += int(mask.sum())
    order, together = torch.cat(batches), torch.cat(maps)
    found_shift = measuring.profile() if measuring is not None else None
    return View(
        torch.empty_like(together).index_copy_(0, order, together),
        overlap / total if total else 1.0,
        target / together.numel(),
        _thirds(_distances(network, found_shift)) if shift or found_shift is not None else None,
        found_shift if patients is not None else None,
    )


def _distances(network: nn.Module, found: Profile | None) -> list[float]:
    """Mean squared Hellinger distance over the channels of every layer."""
    if found is None:
        return []
    distances = []
    for norm, mean, variance in zip(
        moving_norms(network).values(), found.means, found.variances, strict=True
    ):
        usual_mean, usual_variance = (statistic.double().cpu() for statistic in running(norm))
        distances.append(float(squared_hellinger(usual_mean, usual_variance, mean, variance).mean()))
    return distances


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
    return Features(
        early,
        middle,
        late,
        parent.certainty,
        candidate.certainty - parent.certainty,
        math.tanh(2 * _log_ratio(candidate.foreground, parent.foreground)),
        size_gain(parent, candidate, share) or 0.0,
        1 - agreement,
    )


def size_gain(parent: View, candidate: View, share: float, natural: float = 0.0) -> float | None:
    """How much nearer the candidate's target is to the federation's size (`Features`); None if that is
    unknown. Sizes count as equal within `natural` of the logarithm."""
    away, still_away = (
        max(abs(_log_ratio(view.foreground, share)) - natural, 0.0) for view in (parent, candidate)
    )
    return math.tanh(2 * (away - still_away)) if share else None


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
