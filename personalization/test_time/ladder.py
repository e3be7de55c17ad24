"""The ladder: batch-norm statistics between those of training and those of the hospital's images.

The further a hospital's scanner is from the federation's, the larger the dose that helps; a full dose is
nearly always too much. Early layers see the scanner, late ones the anatomy, and few images give poor
statistics (Schneider et al., NeurIPS 2020; alpha-BN, arXiv 2110.04065; Vianna et al., arXiv 2402.04958).
Where the members have said how far hospitals naturally are apart, the shift itself tells the dose
(`dose_by_shift`).

A network without batch norm to move is refused (NetworkError): the ladder would answer as it is.

Legend: N images, C channels, K classes, H and W height and width, R rungs, ... one to three spatial axes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.errors import RoutingError
from personalization.iop_fl.batch_norm import Profile, blend_statistics, doses_by_depth, profile
from personalization.iop_fl.spread import Spread
from personalization.networks.capabilities import (
    MOST_DIMENSIONS,
    BatchNorm,
    per_channel,
    required_norms,
    running,
    spatial_axes,
)

# For the first, the middle and the last third of the batch norms; chosen on phantoms.
DOSES = (0.5, 0.5, 0.5)
# Weight of the federation's statistics, as a number of images: N images get N / (N + this) of the dose.
PRIOR_IMAGES = 5.0
# Statistics are measured in one pass, on as many evenly spaced images as have this many pixels together; of
# volumes on this many at least, in several passes where they need too much memory at once.
MOST_PIXELS = 2**22
LEAST_VOLUMES = 16
BATCH = 16
# The slices by which a scan's shift is measured: neighbours say the same, in half of a pass.
SCAN_STEP = 2
# Every so many images are looked at in negative.
_EVERY = 4
Doses = tuple[float, float, float]
# By shift: the ratio up to which a shift counts as natural, and the shape of the dose by thirds.
NATURAL = 1.0
EARLY: Doses = (1.0, 0.5, 0.0)
# Above so many times `NATURAL`, four standard deviations, all thirds move towards the same dose.
VERY_LARGE = 16.0
# Squared shift that is as good as none.
_NO_SHIFT = 1e-6


@dataclass(frozen=True)
class Dose:
    """The dose that a shift asks for.

    Attributes:
        shift: R, the squared shift of the scans over what is natural between hospitals; 1 is as usual.
        share: a = max(0, 1 - c / R), the share of the shift that is not natural.
        doses: of the first, the middle and the last third of the batch norms.
        layers: R of every batch norm.
    """

    shift: float
    share: float
    doses: Doses
    layers: tuple[float, ...]


def dose_by_shift(found: Profile, spread: Spread) -> Dose:
    """One dose for all layers from the shift of the scans, of the shape `EARLY`; 0 where it is natural.

        R_l = 1/2 sum over means and variances of D_l / (tau_l + s_l)
        R   = exp(mean over l of log R_l)
        a   = max(0, 1 - c / R)        w = max(0, 1 - 16 c / R)
        doses = (1 - w) a (1, 1/2, 0) + w (a, a, a)

    D and s are the shift of the scans and its sampling variance over patients; of one patient s is what the
    members' patients have. tau is natural (`Spread.tau`). c = 1 is unbiased: D - (tau + s) over D is the
    share that is not natural. One scalar, since doses by layer move late layers, where the shift is anatomy.

    Raises RoutingError for a spread of other batch norms.
    """
    if found.layers != spread.layers:
        raise RoutingError(
            f"spread: expected that of the network's {len(found.layers)} batch norms, found one of "
            f"{len(spread.layers)}: {', '.join(spread.layers[:3])}, ..."
        )
    sampling = spread.sampling(1) if found.sampling is None else found.sampling
    ratios_L = _ratios(found.shift, spread.tau() + sampling)
    shift, share, doses_3 = _dose(ratios_L)
    early, middle, late = doses_3.tolist()
    return Dose(float(shift), float(share), (early, middle, late), tuple(ratios_L.tolist()))


def mirrored(
    network: nn.Module,
    images_NCHW: Tensor,
    found: Profile,
    spread: Spread,
    check_cancelled: CancelCheck = never_cancelled,
) -> float:
    """How many times farther the images are than in negative, at the first third of the batch norms.

    About 1 or less for what a scanner does, and far above it for inverted scans, of which the negative looks
    like the members'. Takes a third of a forward pass of every fourth image. `found` is the
    images' profile.
    """
    third = math.ceil(len(found.layers) / 3)
    few = images_NCHW[::_EVERY]
    # About the mean of all channels together: one mean for each would turn a colour into its complement's.
    negative = 2 * few.mean(dim=(1, *spatial_axes(few)), keepdim=True) - few
    sampling = spread.sampling(1) if found.sampling is None else found.sampling
    usual = (spread.tau() + sampling)[:third]
    other = profile(network, negative, [0] * len(few), BATCH, check_cancelled, first=third)
    ratios = _ratios(found.shift[:third], usual) / _ratios(other.shift, usual)
    return float(ratios.log().mean().exp())


def _ratios(shift_L2: Tensor, usual_L2: Tensor) -> Tensor:
    """R_l [L]; 1 of a layer that is dead, in which nothing ever shifts."""
    return ((shift_L2 + _NO_SHIFT) / (usual_L2 + _NO_SHIFT)).mean(dim=1)


def _dose(ratios_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R, a and the doses by thirds [3], as tensors: a graph computes them too."""
    shift = ratios_L.log().mean().exp()
    share = ((shift - NATURAL) / shift).clamp(min=0)
    uniform = ((shift - VERY_LARGE * NATURAL) / shift).clamp(min=0)
    return shift, share, torch.stack([share * ((1 - uniform) * shape + uniform) for shape in EARLY])


def blended(
    network: nn.Module,
    images_NCHW: Tensor,
    doses: Doses,
    check_cancelled: CancelCheck = never_cancelled,
) -> nn.Module:
    """The network, in place and in eval mode, with its statistics moved towards those of the images.

    Batch norm l of third g moves by A_g N / (N + 5) (`blend_statistics`). Costs one forward pass, and none
    where no dose is above 0.
    """
    if not any(doses):
        required_norms(network, "statistics are moved")
        return network.eval()
    share = len(images_NCHW) / (len(images_NCHW) + PRIOR_IMAGES)
    measured = thinned(images_NCHW)
    scaled = doses_by_depth(network, doses)
    return blend_statistics(
        network, measured, [share * dose for dose in scaled], len(measured), check_cancelled
    )


def thinned(images_NCHW: Tensor) -> Tensor:
    """Evenly spaced images with at most `MOST_PIXELS` together, at least one, or `LEAST_VOLUMES`."""
    sides = images_NCHW.shape[2:]
    most = max(1, MOST_PIXELS // math.prod(sides))
    if len(sides) == MOST_DIMENSIONS:
        most = max(LEAST_VOLUMES, most)
    return images_NCHW[:: math.ceil(len(images_NCHW) / most)]


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


class ScanByShift(nn.Module):
    """The answer for one scan with the dose that its shift asks for, in one graph of two passes.

    The first pass measures the scan's shift at every batch norm as it is, on every second slice; the second
    answers with statistics moved as `blend_statistics` moves them. Equals `blended` by `dose_by_shift` of
    these slices as one patient. For export; the network's weights are shared, and there once in the graph.
    """

    def __init__(self, network: nn.Module, spread: Spread) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).eval()
        self._norms = []
        for name in required_norms(network, "a dose by shift moves statistics"):
            moved = _MovedNorm(self.network.get_submodule(name))
            self.network.set_submodule(name, moved)
            self._norms.append(moved)
        self._usual = (spread.tau() + spread.sampling(1)).float()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits [B, K, H, W]; the images of a batch are one scan."""
        for norm in self._norms:
            norm.dose, norm.measures = 0.0, True
        self.network(images_BCHW[::SCAN_STEP])
        shift_L2 = torch.stack([norm.shift for norm in self._norms])
        _, _, doses_3 = _dose(_ratios(shift_L2, self._usual))
        # A sum, since a graph that is exported keeps no number of images.
        images = torch.ones_like(images_BCHW.mean(dim=(1, *spatial_axes(images_BCHW)))).sum()
        count = len(self._norms)
        for index, norm in enumerate(self._norms):
            norm.dose, norm.measures = doses_3[3 * index // count] * images / (images + PRIOR_IMAGES), False
        found: Tensor = self.network(images_BCHW)
        return found


class _MovedNorm(nn.Module):
    """Batch norm with statistics between its running ones and those of its input."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        assert isinstance(norm, BatchNorm)
        self.norm, self.measures = norm, False
        self.dose: float | Tensor = 0.0
        self.shift = torch.zeros(2)

    def forward(self, features_BC: Tensor) -> Tensor:
        norm, axes = self.norm, (0, *spatial_axes(features_BC))
        mean, variance = (per_channel(statistic, features_BC) for statistic in running(norm))
        if self.measures:
            self.shift = self._shift(features_BC, mean, variance)
        if isinstance(self.dose, Tensor) or self.dose:
            seen = features_BC.mean(dim=axes, keepdim=True)
            spread = (features_BC - seen).square().mean(dim=axes, keepdim=True)
            apart = self.dose * (1 - self.dose) * (mean - seen).square()
            variance = (1 - self.dose) * variance + self.dose * spread + apart
            mean = (1 - self.dose) * mean + self.dose * seen
        normal = (features_BC - mean) / torch.sqrt(variance + norm.eps)
        if not norm.affine:
            return normal
        return normal * per_channel(norm.weight, features_BC) + per_channel(norm.bias, features_BC)

    def _shift(self, features_BC: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Mean over the channels of d_m^2 and of d_v^2 [2] (`Profile`)."""
        axes, eps = (0, *spatial_axes(features_BC)), self.norm.eps
        seen = features_BC.mean(dim=axes, keepdim=True)
        spread = (features_BC - seen).square().mean(dim=axes, keepdim=True)
        moved = (seen - mean).square() / (variance + eps)
        return torch.stack([moved.mean(), (((spread + eps) / (variance + eps)).log() / 2).square().mean()])


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
