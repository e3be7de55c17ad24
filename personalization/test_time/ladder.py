"""The ladder: batch-norm statistics between those of training and those of the hospital's images.

The further a hospital's scanner is from the federation's, the larger the dose that helps; a full dose is
nearly always too much. Early layers see the scanner, late ones the anatomy, and few images give poor
statistics (Schneider et al., NeurIPS 2020; alpha-BN, arXiv 2110.04065; Vianna et al., arXiv 2402.04958).

A network without batch norm to move is refused (NetworkError): the ladder would answer as it is.

Legend: N images, C channels, K classes, H and W height and width, R rungs, ... one to three spatial axes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.iop_fl.batch_norm import blend_statistics, doses_by_depth
from personalization.iop_fl.network import batches
from personalization.iop_fl.space import RoutingSpace
from personalization.networks.capabilities import (
    BatchNorm,
    moving_norms,
    per_channel,
    required_norms,
    running,
    spatial_axes,
)

# For the first, the middle and the last third of the batch norms; chosen on phantoms.
DOSES = (0.5, 0.5, 0.5)
# Weight of the federation's statistics, as a number of images: N images get N / (N + this) of the dose.
PRIOR_IMAGES = 5.0
# Statistics are measured in one pass, on as many evenly spaced images as have this many pixels together.
MOST_PIXELS = 2**22
BATCH = 16
Doses = tuple[float, float, float]


def blended(
    network: nn.Module,
    images_NCHW: Tensor,
    doses: Doses,
    check_cancelled: CancelCheck = never_cancelled,
) -> nn.Module:
    """The network, in place and in eval mode, with its statistics moved towards those of the images.

    Batch norm l of third g moves by A_g N / (N + 5) (`blend_statistics`). Costs one forward pass.
    """
    share = len(images_NCHW) / (len(images_NCHW) + PRIOR_IMAGES)
    measured = thinned(images_NCHW)
    scaled = doses_by_depth(network, doses)
    return blend_statistics(
        network, measured, [share * dose for dose in scaled], len(measured), check_cancelled
    )


def thinned(images_NCHW: Tensor) -> Tensor:
    """Evenly spaced images with at most `MOST_PIXELS` together, at least one."""
    most = max(1, MOST_PIXELS // math.prod(images_NCHW.shape[2:]))
    return images_NCHW[:: math.ceil(len(images_NCHW) / most)]


@torch.no_grad()
def probabilities(
    network: nn.Module, images_NCHW: Tensor, check_cancelled: CancelCheck = never_cancelled
) -> Tensor:
    """[N, K, H, W] of the images, by a network in the mode it is in."""
    found = []
    for batch in batches(images_NCHW, BATCH):
        check_cancelled()
        found.append(torch.softmax(network(batch), dim=1))
    return torch.cat(found)


def ensemble(
    space: RoutingSpace,
    images_NCHW: Tensor,
    doses: Doses,
    check_cancelled: CancelCheck = never_cancelled,
) -> Tensor:
    """Mean probabilities [N, K, H, W] of all models of the space, each with its own statistics and blended.

    Where no dose is above 0, or no batch norm can be moved, both are the same. Costs three forward passes of
    every model.
    """
    total: Tensor | None = None
    plain = space.plain().to(images_NCHW.device).eval()
    answers = 0
    variants = (False, True) if any(doses) and moving_norms(plain) else (False,)
    for state in space.experts.values():
        for moved in variants:
            network = copy.deepcopy(plain)
            network.load_state_dict(state)
            if moved:
                blended(network, images_NCHW, doses, check_cancelled)
            found = probabilities(network, images_NCHW, check_cancelled)
            total = found if total is None else total + found
            answers += 1
    assert total is not None  # a space has a global model
    return total / answers


class Rungs(nn.Module):
    """Networks that answer together: the mean of their probabilities, as logits, weighted scan by scan.

    InTEnt (Dong et al., CVPR Workshops 2024): a network with several statistics between training's and the
    scan's, weighted by how sure each is of what it finds and of what it leaves out in equal parts. The
    weights are normalised between the least and the surest, as in the authors' code, then a softmax.
    """

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logarithms of mean probabilities [B, K, H, W]; the images of a batch are one scan."""
        return mixed([torch.softmax(network(images_BCHW), dim=1) for network in self.networks])


class ScanLadder(nn.Module):
    """The answer of `Rungs` to a scan in one graph, which measures the scan's statistics as it runs.

    As `blend_statistics` does it for every rung: layer by layer, with the layers before already moved. For
    export; the network's weights are shared, and there once in the graph.
    """

    def __init__(self, network: nn.Module, rungs: Sequence[float]) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).eval()
        self._norms = []
        for name in required_norms(network, "a ladder moves statistics"):
            moved = _MovedNorm(self.network.get_submodule(name))
            self.network.set_submodule(name, moved)
            self._norms.append(moved)
        self._rungs = tuple(rungs)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logarithms of mean probabilities [B, K, H, W]; the images of a batch are one scan."""
        found = []
        for dose in self._rungs:
            for norm in self._norms:
                norm.dose = dose
            found.append(torch.softmax(self.network(images_BCHW), dim=1))
        return mixed(found)


class _MovedNorm(nn.Module):
    """Batch norm with statistics between its running ones and those of its input."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        assert isinstance(norm, BatchNorm)
        self.norm, self.dose = norm, 0.0

    def forward(self, features_BC: Tensor) -> Tensor:
        norm, axes = self.norm, (0, *spatial_axes(features_BC))
        mean, variance = (per_channel(statistic, features_BC) for statistic in running(norm))
        if self.dose:
            seen = features_BC.mean(dim=axes, keepdim=True)
            spread = (features_BC - seen).square().mean(dim=axes, keepdim=True)
            apart = self.dose * (1 - self.dose) * (mean - seen).square()
            variance = (1 - self.dose) * variance + self.dose * spread + apart
            mean = (1 - self.dose) * mean + self.dose * seen
        normal = (features_BC - mean) / torch.sqrt(variance + norm.eps)
        if not norm.affine:
            return normal
        return normal * per_channel(norm.weight, features_BC) + per_channel(norm.bias, features_BC)


def mixed(probabilities: Sequence[Tensor]) -> Tensor:
    """Logarithms of the weighted mean of the rungs' probabilities [B, K, H, W]."""
    found_RBK = torch.stack(list(probabilities))
    weights_R = balanced_weights(found_RBK)
    mean = (weights_R[(slice(None), *(None,) * (found_RBK.ndim - 1))] * found_RBK).sum(dim=0)
    return torch.log(mean.clamp(min=1e-7))


def balanced_weights(probabilities_RBK: Tensor) -> Tensor:
    """Weights [R] of rungs [R, B, K, ...], summing to 1: softmax of minus the balanced entropy, normalised to
    0..1 over the rungs.

    The balanced entropy is the mean of that of the pixels found to be background and of the others; where
    there are none of one kind, that of all pixels.
    """
    classes = probabilities_RBK.shape[2]
    safe = probabilities_RBK.clamp(min=1e-12)
    entropy_RB = -(probabilities_RBK * safe.log()).sum(dim=2) / math.log(classes)
    target_RB = (probabilities_RBK.argmax(dim=2) > 0).to(entropy_RB.dtype)
    pixels = tuple(range(1, entropy_RB.ndim))
    # A sum, since a graph that is exported keeps no number of pixels.
    found, all_ = target_RB.sum(dim=pixels), torch.ones_like(target_RB[0]).sum()
    inside = (entropy_RB * target_RB).sum(dim=pixels) / found.clamp(min=1)
    outside = (entropy_RB * (1 - target_RB)).sum(dim=pixels) / (all_ - found).clamp(min=1)
    both = (found > 0) & (found < all_)
    cost = torch.where(both, (inside + outside) / 2, entropy_RB.mean(dim=pixels))
    span = (cost.max() - cost.min()).clamp(min=1e-12)
    return torch.softmax((cost.max() - cost) / span, dim=0)
