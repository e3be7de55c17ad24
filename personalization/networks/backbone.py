"""What a network offers that can be frozen and adapted from outside, by scale and shift (FedIns).

Legend: B batch, C channels, H and W height and width, Q width of a query, F width of the features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from personalization.errors import NetworkError
from personalization.networks.registry import build


class Backbone(nn.Module, ABC):
    """A network as `head(features(image))`, with places where its activations may be scaled and shifted."""

    in_channels: int
    head_path: str

    @property
    @abstractmethod
    def ssf_paths(self) -> tuple[str, ...]:
        """The modules whose outputs may be scaled and shifted channel by channel, in the order they run."""

    @property
    @abstractmethod
    def query_width(self) -> int:
        """Q."""

    @abstractmethod
    def query(self, image_BCHW: Tensor) -> Tensor:
        """[B, Q]: what an image is looked up by."""

    @abstractmethod
    def features(self, image_BCHW: Tensor) -> Tensor:
        """[B, F], or [B, F, H, W]: what the head turns into logits."""


def build_backbone(name: str, /, **arguments: Any) -> Backbone:
    """`build`, for a network that is a backbone. Raises NetworkError for another one."""
    network = build(name, **arguments)
    if not isinstance(network, Backbone):
        raise NetworkError(f"'{name}' cannot be adapted by scale and shift: expected a unet or a vit")
    return network
