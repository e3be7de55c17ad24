from __future__ import annotations

import weakref
from collections import UserDict

import pytest
import torch

from personalization.errors import NetworkError, StateError
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import build
from personalization.state import State
from tests.helpers.personalization.routing_cases import ARGUMENTS, state


def test_routing_space_keeps_the_given_states_with_global_last() -> None:
    inside = {"birch": state(2), "aster": state(1)}
    space = RoutingSpace.of("unet", ARGUMENTS, inside, state(0))
    assert space.names == ("aster", "birch", "global")
    assert list(space.experts) == list(space.names)
    for expert, given in (*inside.items(), ("global", state(0))):
        assert space.experts[expert].keys() == given.keys()
        assert all(torch.equal(space.experts[expert][name], tensor) for name, tensor in given.items())


def test_routing_space_experts_are_views_of_one_copy() -> None:
    given = state(0)
    space = RoutingSpace.of("unet", ARGUMENTS, {"aster": state(1)}, given)
    before = given["conv.weight"].clone()
    given["conv.weight"].zero_()
    assert torch.equal(space.experts["global"]["conv.weight"], before)
    storages = {tensor.untyped_storage().data_ptr() for tensor in space.stacks.values()}
    for expert in space.experts.values():
        assert {tensor.untyped_storage().data_ptr() for tensor in expert.values()} == storages


def test_routing_space_loads_one_model_at_a_time() -> None:
    class Reading(UserDict[str, State]):
        """Makes each model on access, and asserts that the previous one was released."""

        alive: weakref.ref[torch.Tensor] | None = None

        def __getitem__(self, site: str) -> State:
            assert self.alive is None or self.alive() is None
            made = state(self.data[site])
            self.alive = weakref.ref(made["conv.weight"])
            return made

    reading = Reading({"birch": 2, "aster": 1, "cedar": 3})
    space = RoutingSpace.of("unet", ARGUMENTS, reading, state(0))
    assert torch.equal(space.experts["birch"]["conv.weight"], state(2)["conv.weight"])


def test_plain_copies_the_global_model() -> None:
    space = RoutingSpace.of("unet", ARGUMENTS, {}, state(0, torch.float32))
    expected = build("unet", **ARGUMENTS).eval()
    expected.load_state_dict(state(0, torch.float32))
    image = torch.randn(2, 2, 32, 16, generator=torch.Generator().manual_seed(0))
    plain = space.plain().eval()
    torch.testing.assert_close(plain(image), expected(image))
    assert all(parameter.requires_grad for parameter in plain.parameters())
    with torch.no_grad():
        plain.conv.weight.zero_()
    assert torch.equal(space.experts["global"]["conv.weight"], state(0, torch.float32)["conv.weight"])


def test_routing_space_rejects_a_mismatched_state_by_site_and_tensor() -> None:
    def space(wrong: dict[str, torch.Tensor]) -> RoutingSpace:
        return RoutingSpace.of("unet", ARGUMENTS, {"aster": state(1), "birch": wrong}, state(0))

    head, norm = "conv.weight", "encoder1.enc1_bn1.running_mean"
    with pytest.raises(StateError, match=rf"inside model 'birch'.*'{head}'.*\[2, 2, 1, 1\].*\[2, 2, 3, 3\]"):
        space({**state(2), head: torch.zeros(2, 2, 3, 3, dtype=torch.float64)})
    with pytest.raises(StateError, match=rf"inside model 'birch'.*missing \['{norm}'\]"):
        space({name: tensor for name, tensor in state(2).items() if name != norm})
    with pytest.raises(StateError, match=r"inside model 'birch'.*unexpected \['extra'\]"):
        space({**state(2), "extra": torch.zeros(1)})
    with pytest.raises(StateError, match=rf"inside model 'birch'.*'{head}' has 4 of 4"):
        space({**state(2), head: torch.full((2, 2, 1, 1), float("nan"), dtype=torch.float64)})
    with pytest.raises(StateError, match=r"inside model 'birch'.*float64.*float32"):
        space(state(2, torch.float32))
    wrong = {**state(0), head: torch.zeros(3, 2, 1, 1, dtype=torch.float64)}
    with pytest.raises(StateError, match=rf"global model.*'{head}'"):
        RoutingSpace.of("unet", ARGUMENTS, {"aster": state(1)}, wrong)


def test_routing_space_rejects_a_site_called_global_and_unknown_networks() -> None:
    with pytest.raises(StateError, match="'global' is reserved for the global model"):
        RoutingSpace.of("unet", ARGUMENTS, {"global": state(1)}, state(0))
    with pytest.raises(NetworkError, match="unknown network 'u-net'"):
        RoutingSpace.of("u-net", ARGUMENTS, {}, state(0))
