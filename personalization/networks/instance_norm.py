"""Instance norm that knows what the federation's images are like, and a network that is steadied by it.

An image, or a patch of a volume, is normalised by its own mean m' and variance v', which say little where
the patch is all air or all organ. A norm that tracks has the mean m and the variance v of the federation's
patches too: moving averages over the steps of training, averaged over the sites as all weights are. A share s
of them gives

    mean = (1 - s) m' + s m        variance = (1 - s) v' + s v + s (1 - s) (m - m')^2

the statistics of the mixture of both. s = 0 is plain instance norm.

Legend: B images, C channels, ... one to three spatial axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from personalization.errors import NetworkError
from personalization.networks.capabilities import InstanceNorm, Traits, norms, per_channel, spatial_axes
from personalization.networks.registry import build


class TrackedInstanceNorm(InstanceNorm):
    """Instance norm with the federation's statistics beside, of which `share` is used in eval mode."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, plain: InstanceNorm) -> None:
        super().__init__(plain.num_features, plain.eps, affine=plain.affine, track_running_stats=True)
        self.share = 0.0

    @override
    def forward(self, features_BC: Tensor) -> Tensor:
        """Normalise; in train mode plainly, and note the statistics."""
        if self.training or not self.share:
            mean, variance = (self.running_mean, self.running_var) if self.training else (None, None)
            return functional.instance_norm(
                features_BC,
                mean,
                variance,
                self.weight,
                self.bias,
                use_input_stats=True,
                momentum=self.momentum or 0.0,
                eps=self.eps,
            )
        axes, share = spatial_axes(features_BC), self.share
        own = features_BC.mean(dim=axes, keepdim=True)
        spread = (features_BC - own).square().mean(dim=axes, keepdim=True)
        usual, usual_spread = (
            per_channel(each, features_BC) for each in (self.running_mean, self.running_var)
        )
        variance = (1 - share) * spread + share * usual_spread + share * (1 - share) * (usual - own).square()
        mean = (1 - share) * own + share * usual
        normal = (features_BC - mean) / torch.sqrt(variance + self.eps)
        if not self.affine:
            return normal
        return normal * per_channel(self.weight, features_BC) + per_channel(self.bias, features_BC)


def track(network: nn.Module) -> None:
    """Make every instance norm of a network note the statistics of training, in place."""
    for path, norm in norms(network).items():
        if isinstance(norm, InstanceNorm) and not isinstance(norm, TrackedInstanceNorm):
            network.set_submodule(path, TrackedInstanceNorm(norm))


def tracked_norms(network: nn.Module) -> dict[str, TrackedInstanceNorm]:
    """Every instance norm that tracks, by path, in registration order."""
    return {path: norm for path, norm in norms(network).items() if isinstance(norm, TrackedInstanceNorm)}


def required_tracked(network: nn.Module, use: str) -> dict[str, TrackedInstanceNorm]:
    """The `tracked_norms`, of which there is at least one. Raises NetworkError naming the `use` otherwise."""
    found = tracked_norms(network)
    if not found:
        kinds = sorted({type(norm).__name__ for norm in norms(network).values()})
        raise NetworkError(
            f"{use}: expected a network with instance norm that knows the federation's statistics, found "
            f"{type(network).__name__} with {', '.join(kinds) or 'no layer that normalises'}; train one with "
            "norm_name (or norm): [instance, {track: true}], or choose a recipe that mixes models"
        )
    return found


class Blended(nn.Module):
    """A network with `shares` of the federation's statistics in the first, middle and last third of norms."""

    def __init__(self, backbone: str, arguments: Mapping[str, Any], shares: Sequence[float]) -> None:
        super().__init__()
        if len(shares) != 3 or not all(0 <= share <= 1 for share in shares):
            raise NetworkError(f"blended: shares: expected 3 numbers within 0..1, found {list(shares)}")
        self.network = build(backbone, **arguments)
        moved = required_tracked(self.network, "statistics are blended").values()
        for index, norm in enumerate(moved):
            norm.share = float(shares[3 * index // len(moved)])
        found = getattr(self.network, "traits", None)
        if isinstance(found, Traits):
            self.traits = Traits(**{**vars(found), "head": tuple(f"network.{path}" for path in found.head)})

    @override
    def forward(self, image_BC: Tensor) -> Tensor:
        """The network's answer. Raises NetworkError as the network does."""
        logits: Tensor = self.network(image_BC)
        return logits
