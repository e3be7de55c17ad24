"""Interface of a frozen backbone that FedIns adapts by scaling and shifting its activations (SSF).

Legend: B batch, C channels, H and W height and width, Q width of a query, F width of the features, T tokens,
D width of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from personalization.errors import NetworkError
from personalization.networks.capabilities import Traits, head_paths
from personalization.networks.registry import build


class Backbone(nn.Module, ABC):
    """A network `head(features(image))` with activations that can be scaled and shifted.

    The last module of its traits' head is that head. With `centred_queries`, FedIns subtracts the
    federation's mean from its queries.
    """

    traits: Traits
    in_channels: int
    centred_queries: bool

    @property
    def output_head(self) -> nn.Module:
        """The layer from the features to the answer."""
        return self.get_submodule(head_paths(self)[-1])

    @property
    @abstractmethod
    def ssf_paths(self) -> tuple[str, ...]:
        """Modules with outputs that can be scaled and shifted per channel, in execution order."""

    @property
    @abstractmethod
    def query_width(self) -> int:
        """Width Q of a query."""

    @abstractmethod
    def query(self, image_BCHW: Tensor) -> Tensor:
        """Compute the queries [B, Q] that select entries of the pool for images."""

    @abstractmethod
    def features(self, image_BCHW: Tensor) -> Tensor:
        """Compute the input of the head: [B, F] or [B, F, H, W]."""


class BlockBackbone(Backbone):
    """A backbone that is a row of blocks of one kind, of which the last ones can be adapted alone."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """How many blocks there are."""

    @abstractmethod
    def last_ssf_paths(self, blocks: int) -> tuple[str, ...]:
        """Those of `ssf_paths` from the first of the last `blocks` blocks on."""

    @abstractmethod
    def stem(self, image_BCHW: Tensor, blocks: int) -> Tensor:
        """Compute what the last `blocks` blocks are given, [B, T, D]."""

    @abstractmethod
    def finish(self, stem_BTD: Tensor, blocks: int) -> Tensor:
        """Compute the features from what `stem` gives."""


def build_backbone(name: str, /, **arguments: Any) -> Backbone:
    """Build a network that is a backbone. Raises NetworkError for any other network."""
    network = build(name, **arguments)
    if not isinstance(network, Backbone):
        raise NetworkError(f"'{name}' cannot be adapted by scale and shift: expected a {Backbone.__name__}")
    return network
