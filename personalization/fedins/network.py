"""A frozen network that every image adapts to itself, from a pool.

Legend: B batch, C channels or picked entries, H and W height and width, K classes, Q width of a query,
F width of the features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from personalization.fedins.lookup import PoolLookup, look_up
from personalization.fedins.points import adapted, points_of
from personalization.fedins.pool import Delta, SsfPool, head_of
from personalization.networks import Backbone

ENTRIES, SIMILARITIES, QUERY = "entries", "similarities", "query"


@dataclass(frozen=True)
class Answer:
    """Logits [B, K] or [B, K, H, W], and what each image picked."""

    logits: Tensor
    picked: PoolLookup


class InstanceAdaptive(nn.Module):
    """The backbone is frozen, and in evaluation mode whatever `train` says; the pool is what is trained.

    As a graph, by `to_onnx`, it is one pass after the other, with every weight in it once. `query` depends on
    the image alone, and nothing else on the query's pass but by it: the graph can be cut there.
    """

    extra_outputs = (ENTRIES, SIMILARITIES, QUERY)

    def __init__(self, backbone: Backbone, classes: int, entries: int, top: int) -> None:
        """The pool is as `SsfPool` makes it; `top` is C, clamped to the number of entries."""
        super().__init__()
        self.backbone = backbone.eval().requires_grad_(False)
        self.points = points_of(backbone)
        self.top = min(top, entries)
        feature_width = head_of(backbone.get_submodule(backbone.head_path))[0].shape[1]
        channels = sum(point.channels for point in self.points)
        self.pool = SsfPool(entries, channels, backbone.query_width, classes, feature_width)

    def train(self, mode: bool = True) -> InstanceAdaptive:
        """The pool has no modes, and the backbone is always evaluated."""
        self.training = mode
        return self

    @torch.no_grad()
    def query(self, image_BCHW: Tensor) -> Tensor:
        """[B, Q]: depends on the image and the frozen backbone alone, so it may be kept. Not yet centred."""
        return self.backbone.query(image_BCHW)

    def pick(self, query_BQ: Tensor, penalty_M: Tensor | None = None) -> PoolLookup:
        """The entries for queries as `query` gives them, less the federation's centre."""
        return look_up(query_BQ - self.pool.centre, self.pool.keys, self.top, penalty_M)

    def apply_delta(self, image_BCHW: Tensor, delta: Delta) -> Tensor:
        """Logits of the backbone as adapted by `delta`."""
        with adapted(self.backbone, self.points, delta.scale_BD, delta.shift_BD):
            features = self.backbone.features(image_BCHW)
        if features.ndim == 2:
            weight, bias = delta.head_weight_BKF, delta.head_bias_BK
            return (weight @ features[:, :, None])[:, :, 0] + bias
        flat_BKN = delta.head_weight_BKF @ features.flatten(2) + delta.head_bias_BK[:, :, None]
        return flat_BKN.reshape(*flat_BKN.shape[:2], *features.shape[2:])

    def answer(
        self, image_BCHW: Tensor, query_BQ: Tensor | None = None, penalty_M: Tensor | None = None
    ) -> Answer:
        """Each image adapted by its own entries. `query_BQ` spares the query's pass."""
        query = self.query(image_BCHW) if query_BQ is None else query_BQ
        picked = self.pick(query, penalty_M)
        return Answer(self.apply_delta(image_BCHW, self.pool.delta(picked)), picked)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Logits [B, K] or [B, K, H, W]."""
        return self.answer(image_BCHW).logits

    def forward_with_extras(self, image_BCHW: Tensor) -> tuple[Tensor, ...]:
        """`forward`, and what `extra_outputs` names: [B, C] int64, [B, C] and [B, Q]."""
        query = self.query(image_BCHW)
        found = self.answer(image_BCHW, query)
        return found.logits, found.picked.entries, found.picked.similarities, query
