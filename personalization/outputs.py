"""Run a network as `model_store.preprocessing.answers` runs one: arrays in, arrays out."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Outputs = Literal["probabilities", "logits"]


@torch.no_grad()
def outputs(
    network: nn.Module, images: NDArray[np.float32], kind: Outputs, *, regions: bool = False
) -> NDArray[np.float32]:
    """What a network in evaluation mode gives for images [B, C, ...], on its own device: [B, K, ...].

    Probabilities are the softmax over K, or with `regions` the sigmoid of each, as in its exported graph.
    """
    parameter = next(network.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    # A copy is contiguous and aligned as torch aligns: some kernels add up in another order otherwise.
    logits = network(torch.from_numpy(images.copy()).to(device))
    return as_arrays(logits, kind, regions=regions)


def as_arrays(logits: Tensor, kind: Outputs, *, regions: bool = False) -> NDArray[np.float32]:
    """The outputs of a network, of this kind, on the CPU in float32."""
    found = logits.float()
    if kind == "probabilities":
        found = found.sigmoid() if regions else found.softmax(dim=1)
    array: NDArray[np.float32] = found.cpu().numpy()
    return array
