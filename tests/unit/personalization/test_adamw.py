from __future__ import annotations

import pytest
import torch
from torch import nn

from personalization.adamw import Optimiser, cosine, train_adamw

RATES = cosine(0.1, 0.01, 5, range(5))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(5)
    ]


def network() -> nn.Linear:
    net = nn.Linear(3, 2)
    nn.init.constant_(net.weight, 0.5)
    nn.init.zeros_(net.bias)
    return net


def trained(*cuts: int) -> tuple[nn.Linear, Optimiser]:
    """Five steps in pieces; each piece rebuilds network and optimiser from the state of the previous one."""
    net, optimiser = network(), Optimiser(weight_decay=0.3)
    for first, last in zip((0, *cuts), (*cuts, 5), strict=True):
        state, net = net.state_dict(), network()
        net.load_state_dict(state)
        _, optimiser = train_adamw(
            net,
            batches()[first:last],
            lambda x, y, net=net: (net(x) - y).square().mean(),
            RATES[first:last],
            optimiser,
        )
    return net, optimiser


def test_train_adamw_in_pieces_equals_torch_adamw_in_one_run():
    reference = network()
    adamw = torch.optim.AdamW(reference.parameters(), lr=RATES[0], weight_decay=0.3)
    for rate, (x, y) in zip(RATES, batches(), strict=True):
        adamw.param_groups[0]["lr"] = rate
        adamw.zero_grad()
        (reference(x) - y).square().mean().backward()
        adamw.step()
    for cuts in ((), (2,), (1, 4)):
        net, optimiser = trained(*cuts)
        assert torch.equal(net.weight, reference.weight)
        assert torch.equal(net.bias, reference.bias)
        assert optimiser.taken == 5
        assert torch.equal(optimiser.moments["exp_avg/weight"], adamw.state[reference.weight]["exp_avg"])


def test_cosine_falls_from_peak_to_least_rate():
    assert cosine(1.0, 0.2, 4, range(5)) == pytest.approx([1.0, 0.8828427, 0.6, 0.3171573, 0.2])


def test_train_adamw_with_too_few_batches_is_rejected():
    with pytest.raises(ValueError, match="expected 2 batches to train on, found 1"):
        train_adamw(
            network(),
            batches()[:1],
            lambda x, y: (x.sum() + y.sum()).requires_grad_(),
            [0.1, 0.1],
            Optimiser(),
        )
