"""Instance-adaptive network: a frozen backbone, adapted to each image by entries of a pool.

Legend: B batch, C channels or selected entries, H and W height and width, K classes, Q width of a query,
F width of the features, T tokens, D width of a token.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from personalization.fedins.lookup import PoolLookup, look_up
from personalization.fedins.points import adapted, points_of, with_blocks
from personalization.fedins.pool import Delta, HeadPool, SsfPool, head_of
from personalization.networks import Backbone

ENTRIES, SIMILARITIES, QUERY = "entries", "similarities", "query"


@dataclass(frozen=True)
class PoolOutput:
    """Logits [B, K] or [B, K, H, W], and the entries that each image selected."""

    logits: Tensor
    picked: PoolLookup


class InstanceAdaptive(nn.Module):
    """A frozen backbone, always in evaluation mode, and a trainable pool.

    Its graph, by `to_onnx`, has the query's pass and then the adapted pass, with every weight stored once.
    `query` depends on the image alone, and is the only connection between the passes, so the graph can be
    split there.
    """

    extra_outputs = (ENTRIES, SIMILARITIES, QUERY)

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        entries: int,
        top: int,
        pool: HeadPool | None = None,
        blocks: int | None = None,
    ) -> None:
        """Create the pool as `SsfPool` does, unless one is given. `top` is C, clamped to the entries.

        With `blocks`, so many of the backbone's last blocks are adapted alone.
        """
        super().__init__()
        self.backbone = backbone.eval().requires_grad_(False)
        self.blocks = blocks
        self.points = points_of(backbone, blocks)
        self.top = min(top, entries)
        feature_width = head_of(backbone.output_head)[0].shape[1]
        channels = sum(point.channels for point in self.points)
        self.pool = pool or SsfPool(entries, channels, backbone.query_width, classes, feature_width)

    def train(self, mode: bool = True) -> InstanceAdaptive:
        """Set this module's mode alone: the pool has no modes, and the backbone stays in evaluation mode."""
        self.training = mode
        return self

    @torch.no_grad()
    def query(self, image_BCHW: Tensor) -> Tensor:
        """Compute queries [B, Q], not centred. They depend on image and backbone alone and can be cached."""
        return self.backbone.query(image_BCHW)

    @torch.no_grad()
    def stem(self, image_BCHW: Tensor) -> Tensor:
        """Compute what the adapted blocks are given, [B, T, D]; the images themselves where all are adapted.

        As the queries, it depends on image and backbone alone.
        """
        if self.blocks is None:
            return image_BCHW
        return with_blocks(self.backbone, self.blocks).stem(image_BCHW, self.blocks)

    def pick(self, query_BQ: Tensor, penalty_M: Tensor | None = None) -> PoolLookup:
        """Select entries for the queries that `query` gives, after subtracting the federation's centre."""
        return look_up(query_BQ - self.pool.centre, self.pool.keys, self.top, penalty_M)

    def adapted(self, delta: Any) -> AbstractContextManager[Backbone]:
        """Within the context, the backbone is adapted by what the pool's `delta` gives."""
        assert isinstance(delta, Delta)
        return adapted(self.backbone, self.points, delta.scale_BD, delta.shift_BD)

    def apply_delta(self, stem: Tensor, delta: Any) -> Tensor:
        """Compute the logits of the backbone adapted by `delta`, from what `stem` gives."""
        with self.adapted(delta):
            if self.blocks is None:
                features = self.backbone.features(stem)
            else:
                features = with_blocks(self.backbone, self.blocks).finish(stem, self.blocks)
        weight: Tensor = delta.head_weight_BKF
        bias: Tensor = delta.head_bias_BK
        if features.ndim == 2:
            return (weight @ features[:, :, None])[:, :, 0] + bias
        flat_BKN = weight @ features.flatten(2) + bias[:, :, None]
        return flat_BKN.reshape(*flat_BKN.shape[:2], *features.shape[2:])

    def answer(
        self,
        image_BCHW: Tensor,
        query_BQ: Tensor | None = None,
        penalty_M: Tensor | None = None,
        stem: Tensor | None = None,
    ) -> PoolOutput:
        """Answer each image, adapted by its own entries. With `query_BQ`, the query's pass is skipped; with
        `stem`, what comes before the adapted blocks."""
        query = self.query(image_BCHW) if query_BQ is None else query_BQ
        picked = self.pick(query, penalty_M)
        before = self.stem(image_BCHW) if stem is None else stem
        return PoolOutput(self.apply_delta(before, self.pool.delta(picked)), picked)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Compute logits [B, K] or [B, K, H, W]."""
        return self.answer(image_BCHW).logits

    def forward_with_extras(self, image_BCHW: Tensor) -> tuple[Tensor, ...]:
        """Compute `forward`, and the outputs named by `extra_outputs`: [B, C] int64, [B, C] and [B, Q]."""
        query = self.query(image_BCHW)
        found = self.answer(image_BCHW, query)
        return found.logits, found.picked.entries, found.picked.similarities, query
