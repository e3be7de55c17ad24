"""Select the entries of a pool for each image: those with the keys most similar to its query.

Legend: B batch, M entries, C selected entries, Q width of a query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize


@dataclass(frozen=True)
class PoolLookup:
    """The selected `entries` int64 [B, C], most similar first, and their cosine `similarities` [B, C]."""

    entries: Tensor
    similarities: Tensor


def look_up(query_BQ: Tensor, keys_MQ: Tensor, top: int, penalty_M: Tensor | None = None) -> PoolLookup:
    """Select the `top` entries by cosine similarity; all entries if there are fewer.

    Of equal similarities the lower entry comes first, as in onnx. A zero query has similarity 0 with every
    key. `penalty_M` is subtracted for the ranking, and is not part of the similarities. Gradients flow
    through the similarities into the keys, and not through the selection.
    """
    similarity_BM = _cosines(query_BQ, keys_MQ)
    ranked = similarity_BM if penalty_M is None else similarity_BM - penalty_M
    top = min(top, keys_MQ.shape[0])
    if torch.onnx.is_in_onnx_export():
        # onnx's TopK breaks ties this way by definition; torch's order of ties is undefined.
        entries = torch.topk(ranked, top, dim=1).indices
    else:
        entries = torch.sort(ranked.detach(), dim=1, descending=True, stable=True).indices[:, :top]
    return PoolLookup(entries, similarity_BM.gather(1, entries))


def random_entries(query_BQ: Tensor, keys_MQ: Tensor, top: int, generator: torch.Generator) -> PoolLookup:
    """Select `top` entries for each image at random, independent of the query: the control of `look_up`."""
    entries_M = keys_MQ.shape[0]
    drawn = torch.rand(len(query_BQ), entries_M, generator=generator).argsort(dim=1)
    entries = drawn[:, : min(top, entries_M)].to(query_BQ.device)
    similarity_BM = _cosines(query_BQ, keys_MQ)
    return PoolLookup(entries, similarity_BM.gather(1, entries))


def _cosines(query_BQ: Tensor, keys_MQ: Tensor) -> Tensor:
    # Always in full precision: differences between entries are small.
    with torch.autocast(query_BQ.device.type, enabled=False):
        return normalize(query_BQ, dim=1) @ normalize(keys_MQ, dim=1).T
