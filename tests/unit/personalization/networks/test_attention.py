from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from personalization.errors import NetworkError
from personalization.networks.attention import cross_attention

B, N, S, M, D, HEADS = 2, 3, 2, 5, 8, 4


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(sites: int = S) -> list[torch.Tensor]:
    own = [3 * drawn(B, N, D, seed=seed) for seed in range(3)]
    return [*own, *(2 * drawn(sites, M, D, seed=seed) for seed in (3, 4))]


def naive(q, k, v, bank_k, bank_v, heads):
    """Eq. 3 as printed, one number at a time."""
    width = D // heads
    result, mass = torch.zeros(B, N, D, dtype=torch.float64), torch.zeros(B, 1 + len(bank_k))
    for b in range(B):
        tokens = [(0, k[b, j], v[b, j]) for j in range(N)]
        tokens += [(1 + s, bank_k[s, j], bank_v[s, j]) for s in range(len(bank_k)) for j in range(M)]
        for h in range(heads):
            cut = slice(h * width, (h + 1) * width)
            for i in range(N):
                scores = [
                    sum(float(a) * float(c) for a, c in zip(q[b, i, cut], key[cut], strict=True))
                    / math.sqrt(width)
                    for _, key, _ in tokens
                ]
                total = sum(math.exp(score) for score in scores)
                for (source, _, value), score in zip(tokens, scores, strict=True):
                    share = math.exp(score) / total
                    result[b, i, cut] += share * value[cut]
                    mass[b, source] += share / (heads * N)
    return result, mass


@pytest.mark.parametrize("heads", [1, 4])
def test_cross_attention_equals_the_naive_loop(heads):
    attended, mass = cross_attention(*inputs(), heads)
    expected, shares = naive(*inputs(), heads)
    torch.testing.assert_close(attended, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mass, shares.double(), rtol=1e-5, atol=1e-7)
    assert float(mass.min()) > 0


def test_cross_attention_without_bank_equals_self_attention():
    q, k, v, *bank = inputs(sites=0)
    attended, mass = cross_attention(q, k, v, *bank, HEADS)
    split = [x.reshape(B, N, HEADS, D // HEADS).transpose(1, 2) for x in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*split).transpose(1, 2).reshape(B, N, D)
    torch.testing.assert_close(attended, expected)
    assert torch.equal(mass, torch.ones(B, 1, dtype=torch.float64))


def test_gradients_reach_own_tokens_but_not_the_bank():
    tensors = [x.requires_grad_() for x in inputs()]
    attended, mass = cross_attention(*tensors, HEADS)
    attended.square().sum().backward()
    assert tensors[3].grad is None
    assert tensors[4].grad is None
    assert not mass.requires_grad

    def frozen(q, k, v):
        return cross_attention(q, k, v, *(x.detach() for x in tensors[3:]), HEADS)[0]

    assert torch.autograd.gradcheck(frozen, tensors[:3])


def test_heads_that_do_not_divide_the_features_are_rejected():
    with pytest.raises(NetworkError, match="3 heads do not divide 8"):
        cross_attention(*inputs(), 3)
