"""Decoupled cross-attention of FedOAP: own queries attend to own tokens and to other sites' tokens (Eq. 3).

Legend: B batch, N own tokens of an image, S other sites, M tokens of one of them, D features, h heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from personalization.errors import NetworkError


def cross_attention(
    query_BND: Tensor,
    key_BND: Tensor,
    value_BND: Tensor,
    bank_key_SMD: Tensor,
    bank_value_SMD: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q K^T / sqrt(D/h)) V per head, with own and bank entries concatenated in K and V.

    The bank is the same for every image and detached: no gradient reaches another site's tokens. S may be 0.
    To mask a site, leave it out of the bank, which is equivalent.

    Returns the attended values [B, N, D], and the share of the attention on each source [B, 1 + S] (own
    tokens, then the sites in the bank's order; mean over heads and queries, detached, rows sum to 1).

    Memory grows with B h N (N + S M): the weights are kept, because their sums are reported to users.
    Raises NetworkError when heads do not divide D.
    """
    features = query_BND.shape[-1]
    if features % heads:
        raise NetworkError(f"attention: {heads} heads do not divide {features} features")
    tokens, (sites, entries) = query_BND.shape[1], bank_key_SMD.shape[:2]
    query, key, value = (
        _by_head(x, heads) for x in (query_BND * math.sqrt(heads / features), key_BND, value_BND)
    )
    scores = query @ key.transpose(-1, -2)  # [h, B, N, N]
    if not sites:
        weights = torch.softmax(scores, dim=-1)
        return _together(weights @ value), torch.ones_like(weights[0, :, 0, :1])
    # One product per head over all images, so that the bank is not copied for each image.
    bank_key, bank_value = (
        x.detach().reshape(sites * entries, heads, -1).transpose(0, 1) for x in (bank_key_SMD, bank_value_SMD)
    )
    width = features // heads
    foreign = query.reshape(heads, -1, width) @ bank_key.transpose(-1, -2)
    foreign = foreign.reshape(heads, -1, tokens, sites * entries)
    weights = torch.softmax(torch.cat((scores, foreign), dim=-1), dim=-1)
    own, others = torch.split(weights, [tokens, sites * entries], dim=-1)
    attended = others.reshape(heads, -1, sites * entries) @ bank_value
    result = own @ value + attended.reshape(heads, -1, tokens, width)
    shares = others.detach().reshape(heads, -1, tokens, sites, entries).sum(-1)
    mass = torch.cat((own.detach().sum(-1, keepdim=True), shares), dim=-1).mean(dim=(0, 2))
    return _together(result), mass


def _by_head(x_BND: Tensor, heads: int) -> Tensor:
    """Split the features by head: [B, N, D] -> [h, B, N, D/h]."""
    _, tokens, features = x_BND.shape
    return x_BND.reshape(-1, tokens, heads, features // heads).permute(2, 0, 1, 3)


def _together(x_hBNd: Tensor) -> Tensor:
    """Join the heads' features: [h, B, N, D/h] -> [B, N, D]."""
    heads, _, tokens, width = x_hBNd.shape
    return x_hBNd.permute(1, 2, 0, 3).reshape(-1, tokens, heads * width)
