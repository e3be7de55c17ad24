from __future__ import annotations

import pytest
import torch

from personalization.errors import StateError
from personalization.fedoap.parts import bank_state, identity, split, start_personal
from personalization.networks import build, initialise


def states() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    net = initialise(build("fedoap", in_channels=1, width=2), torch.Generator().manual_seed(0))
    return split(net.state_dict())


def test_start_personal_copies_shared_twins_and_zeroes_the_adapter():
    shared, drawn = states()
    before = {name: tensor.clone() for name, tensor in drawn.items()}
    start = start_personal(shared, drawn)
    assert start.keys() == drawn.keys()
    for name, tensor in start.items():
        if name.startswith("query_stage."):
            assert torch.equal(tensor, shared[name.replace("query_stage", "keyvalue_stage")])
        elif name.startswith("to_query."):
            assert torch.equal(tensor, shared[name.replace("to_query", "to_key")])
        elif name.startswith("adapter.outer."):
            assert not tensor.any()
        else:
            assert torch.equal(tensor, drawn[name])
        tensor.fill_(7)
    assert all(torch.equal(drawn[name], tensor) for name, tensor in before.items())
    assert not any((tensor == 7).all() for tensor in shared.values())


def test_start_personal_with_own_keys_copies_the_drawn_twins():
    net = initialise(build("fedoap", in_channels=1, width=2), torch.Generator().manual_seed(0))
    shared, drawn = split(net.state_dict(), own_keys=True)
    start = start_personal(shared, drawn)
    assert torch.equal(start["query_stage.0.weight"], drawn["keyvalue_stage.0.weight"])
    assert torch.equal(start["keyvalue_stage.0.weight"], drawn["keyvalue_stage.0.weight"])


def test_identity_adapter_gives_the_output_without_adapter():
    net = initialise(build("fedoap", in_channels=1, width=2), torch.Generator().manual_seed(0))
    image = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    without = build("fedoap", in_channels=1, width=2, adapter=False)
    without.load_state_dict({n: t for n, t in net.state_dict().items() if not n.startswith("adapter.")})
    assert not torch.equal(net(image), without(image))
    net.load_state_dict({**net.state_dict(), **identity(split(net.state_dict())[1])})
    torch.testing.assert_close(net(image), without(image))


def test_bank_state_is_sorted_by_site_and_rejects_mixed_shapes():
    entries = {
        site: {"key": torch.full((4, 3), n), "value": -torch.full((4, 3), n)}
        for n, site in ((2.0, "B"), (1.0, "A"))
    }
    bank = bank_state(entries, 3, absent=("B",))
    assert bank["bank_key"][:, 0, 0].tolist() == [1, 2]
    assert bank["bank_value"][:, 0, 0].tolist() == [-1, -2]
    assert bank["bank_present"].tolist() == [True, False]
    assert bank_state({}, 3)["bank_key"].shape == (0, 0, 3)
    with pytest.raises(StateError, match="bank of A, B"):
        bank_state({**entries, "B": {"key": torch.zeros(2, 3), "value": torch.zeros(4, 3)}}, 3)
