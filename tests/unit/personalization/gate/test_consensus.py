"""What the federation says together, against a plain loop; and what it says of candidates known to be bad."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import Tensor, nn

from personalization.errors import RoutingError
from personalization.gate import ROUTING, ObservedRouting, consensus, judge
from personalization.gate.routing import consensus_gain
from personalization.iop_fl.layers import BatchStatisticsNorm
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import build
from tests.helpers.personalization.discs import discs, space

IMAGES, _ = discs(7, 3, contrast=1.0)


def experts(over: RoutingSpace) -> list[nn.Module]:
    networks = []
    for state in over.experts.values():
        networks.append(build(over.network, **over.arguments).eval())
        networks[-1].load_state_dict(state)
    return networks


def with_batch_statistics(network: nn.Module) -> nn.Module:
    changed = copy.deepcopy(network)
    for name, module in list(changed.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            changed.set_submodule(name, BatchStatisticsNorm(module))
    return changed


def mean_of(networks: list[nn.Module], batches: list[list[int]]) -> Tensor:
    total = torch.zeros(len(IMAGES), 2, *IMAGES.shape[2:])
    with torch.no_grad():
        for batch in batches:
            for network in networks:
                total[batch] += torch.softmax(network(IMAGES[batch]), dim=1)
    return total.argmax(dim=1)


@pytest.mark.parametrize("inside", [0, 2])
def test_it_is_the_mean_of_all_experts_by_either_statistics(inside: int) -> None:
    networks = experts(space(inside))
    running, batchwise = consensus(space(inside), IMAGES, batch_size=3)
    assert running.dtype == batchwise.dtype == torch.uint8
    assert_array_equal(running, mean_of(networks, [[0], [1], [2], [3], [4], [5], [6]]))
    # Seven in batches of at most three: every third image, so that each batch has some of every scan
    mixed = mean_of([with_batch_statistics(one) for one in networks], [[0, 3, 6], [1, 4], [2, 5]])
    assert_array_equal(batchwise, mixed)
    assert (running != batchwise).any()


def test_it_leaves_the_space_as_it_was_and_can_be_cancelled() -> None:
    shared = space()
    before = {name: stack.clone() for name, stack in shared.stacks.items()}
    calls = []
    consensus(shared, IMAGES, batch_size=4, check_cancelled=lambda: calls.append(1))
    assert len(calls) == 3 * 2 * 2  # experts, statistics, batches
    assert all(torch.equal(stack, before[name]) for name, stack in shared.stacks.items())

    def cancel() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consensus(shared, IMAGES, check_cancelled=cancel)
    with pytest.raises(RoutingError, match="expected at least one image"):
        consensus(shared, IMAGES[:0])


def test_a_candidate_slightly_worse_than_its_parent_is_refused_by_nothing_else() -> None:
    images, _ = discs(10, 5, contrast=1.5)
    references = consensus(space(), images)
    parent = references[0].numpy()
    # A rim of a pixel around every disc: stable, plausible, and close to the parent
    grown = np.maximum.reduce([np.roll(parent, shift, axis) for shift in (0, 1) for axis in (1, 2)])
    verdict = judge(ROUTING, ObservedRouting(grown, parent, [grown], range(10), 2, 0.0, 0.0, references))
    assert {check.name for check in verdict.checks if not check.passed} == {"consensus_gain"}
    assert judge(ROUTING, ObservedRouting(grown, parent, [grown], range(10), 2, 0.0, 0.0)).passed


def test_a_candidate_must_please_both() -> None:
    images, _ = discs(10, 5, contrast=1.5)
    running = consensus(space(), images)[0].numpy()
    other = np.roll(running, 2, axis=2)
    between = np.roll(running, 1, axis=2)

    def gained(candidate: np.ndarray, parent: np.ndarray) -> float:
        found = consensus_gain.measure(
            ObservedRouting(candidate, parent, [], range(10), 2, 0.0, 0.0, [running, other])
        )
        assert found is not None
        return found

    assert gained(other, between) < 0
    assert gained(running, between) < 0
    assert gained(between, np.roll(running, -3, axis=2)) > 0
