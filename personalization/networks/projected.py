"""A classifier with a projection head before its output: MOON's network (Li et al., CVPR 2021, Section 3.2).

The output layer of another network, features [B, F] to logits [B, K], becomes

    F -> F, ReLU, F -> Z, Z -> K

and its input z [B, Z] is what MOON compares. The first two layers are the projection head.

Legend: B batch, F features, Z width of the projection, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from personalization.errors import NetworkError
from personalization.networks.capabilities import head_paths
from personalization.networks.registry import build

# The last of the layers that replace the output layer: it takes z.
OUTPUT = "3"


def projected(network: str, arguments: Mapping[str, Any], projection: int) -> nn.Module:
    """Build the classifier `network` with a projection of this width, at least 1.

    Raises NetworkError for a network that is no classifier with a linear output layer.
    """
    found = build(network, **arguments)
    path = head_paths(found)[-1]
    head = found.get_submodule(path)
    if not isinstance(head, nn.Linear) or projection < 1:
        raise NetworkError(
            f"projected: expected a network with a linear output layer and a projection of at least 1, found "
            f"'{network}' with {type(head).__name__} and {projection}"
        )
    features, classes = head.in_features, head.out_features
    layers = (
        nn.Linear(features, features),
        nn.ReLU(),
        nn.Linear(features, projection),
        nn.Linear(projection, classes),
    )
    found.set_submodule(path, nn.Sequential(*layers))
    return found
