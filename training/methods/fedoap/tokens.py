"""A site's entry in FedOAP's token bank, within bounds: tokens are features of patients.

Legend: B batch, N tokens, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from personalization.networks import FedOapUNet
from training.algorithm import Noise, State
from training.bounds import FeatureBounds, clipped
from training.local.data import Examples


@torch.no_grad()
def mean_tokens(
    network: FedOapUNet, slices: Examples, batch_size: int, bounds: FeatureBounds, noise: Noise
) -> State:
    """{"key": [N, D], "value": [N, D]}: means over a site's training images, as they are; {} for too few
    images or patients.

    The clip is of an image's keys, and of its values. Sums are float64, the mean is float32. `noise` is the
    context's. Leaves the network in evaluation mode.
    """
    if not bounds.allow(slices.patients):
        return {}
    network.eval()
    device = next(network.parameters()).device
    sums: dict[str, Tensor] = {}
    for images in torch.split(torch.from_numpy(slices.images), batch_size):
        # A copy is aligned as torch aligns: some kernels add up in another order otherwise.
        tokens = dict(zip(("key", "value"), network.keys_and_values(images.clone().to(device)), strict=True))
        for name, entry_BND in tokens.items():
            added = clipped(entry_BND.cpu().double(), bounds.clip).sum(0)
            sums[name] = sums[name] + added if name in sums else added
    mean = {name: total / len(slices) for name, total in sums.items()}
    if bounds.noise and bounds.clip is not None:
        deviation = bounds.noise * bounds.clip / len(slices)
        draws = noise("tokens", mean, deviation)
        for tensor in mean.values():
            tensor += torch.from_numpy(draws.normal(0, deviation, tensor.shape))
    return {name: tensor.float() for name, tensor in mean.items()}
