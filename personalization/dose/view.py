"""What a network says of a cohort, and what targets look like, at members and at a hospital.

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
from personalization.gate.parent import Targets
from personalization.iop_fl.batch_norm import Measuring, Profile
from personalization.iop_fl.network import at_once, mixed_indices

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
        foreground: share of the pixels that are a target.
        profile: how far the scans are from what its batch norms expect; None where it was not measured.
    """

    maps: Tensor
    foreground: float
    profile: Profile | None = None


@torch.no_grad()
def view(
    network: nn.Module,
    images_NCHW: Tensor,
    check_cancelled: CancelCheck = never_cancelled,
    *,
    patients: Sequence[Hashable] | None = None,
) -> View:
    """One forward pass, with running statistics.

    `patients`, of every image, ask for the profile; a network without batch norm to move then raises
    NetworkError.
    """
    network.eval()
    measuring = None if patients is None else Measuring(network, patients)
    batches = mixed_indices(len(images_NCHW), at_once(BATCH, images_NCHW.shape[2:]))
    maps = []
    with measuring or nullcontext():
        for indices in batches:
            check_cancelled()
            batch = images_NCHW[indices] if measuring is None else measuring.images(indices, images_NCHW)
            maps.append(network(batch).argmax(dim=1).to("cpu", torch.uint8))
    order, together = torch.cat(batches), torch.cat(maps)
    return View(
        torch.empty_like(together).index_copy_(0, order, together),
        int((together > 0).sum()) / together.numel(),
        None if measuring is None else measuring.profile(),
    )


def size_gain(parent: View, candidate: View, share: float, natural: float = 0.0) -> float | None:
    """How much nearer than the parent's the candidate's target is to the federation's size, in logarithms,
    squashed: beyond a factor of two a target is found or lost. None if that size is unknown. Sizes count as
    equal within `natural` of the logarithm."""
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
