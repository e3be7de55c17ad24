"""What a network says of a cohort, and what members' targets look like, each against another way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from personalization.dose import targets_of, typical_targets, view
from personalization.dose.view import size_gain
from personalization.gate import Targets
from personalization.iop_fl.batch_norm import profile
from tests.helpers.personalization.discs import discs, space


def test_a_view_has_the_masks_size_and_profile_of_one_pass() -> None:
    network, images = space().plain().eval(), discs(20, 1, contrast=1.3)[0]
    patients = [index // 4 for index in range(20)]
    passes: list[int] = []
    handle = network.register_forward_pre_hook(lambda _network, inputs: passes.append(len(inputs[0])))
    found = view(network, images, patients=patients)
    handle.remove()
    assert sum(passes) == 20
    with torch.no_grad():
        maps = network(images).argmax(dim=1)
    assert torch.equal(found.maps, maps.to(torch.uint8))
    assert found.foreground == pytest.approx(float((maps > 0).double().mean()))
    alone = profile(network, images, patients)
    assert found.profile is not None
    torch.testing.assert_close(found.profile.shift, alone.shift)
    assert view(network, images).profile is None


def test_a_target_is_nearer_to_the_federations_size_by_logarithms() -> None:
    blank = view(space().plain(), discs(1)[0])
    parent, candidate = (replace(blank, foreground=size) for size in (0.2, 0.1))
    doubled = math.log(0.201 / 0.101)
    # From twice the federation's size to the same, and the other way.
    assert size_gain(parent, candidate, 0.1) == pytest.approx(math.tanh(2 * doubled))
    assert size_gain(candidate, parent, 0.1) == pytest.approx(math.tanh(-2 * doubled))
    # Members differ by as much themselves.
    assert size_gain(parent, candidate, 0.1, natural=doubled) == 0.0
    assert size_gain(parent, candidate, 0.0) is None


def test_targets_have_their_share_the_large_ones_and_their_pieces() -> None:
    maps = torch.zeros(4, 10, 10, dtype=torch.long)
    maps[0, 0, 0] = maps[0, 5, 5] = 1  # two pieces, 2 %
    maps[1, 2:4, :] = 1  # one piece, 20 %
    maps[2, 4:8, :] = 2  # one piece of another class, 40 %
    found = targets_of(maps, ["a", "a", "b", "c"], 3)
    assert found.share == pytest.approx(0.62 / 4)
    # Patients have 11, 40 and 0 %: nine tenths of the way from 11 to 40.
    assert found.largest == pytest.approx(0.11 + 0.9 * 0.29)
    assert found.pieces == pytest.approx(4 / 3)


def test_members_targets_are_put_together_and_one_without_a_target_leaves_the_share_unknown() -> None:
    members = [Targets(0.04, 0.2, 1.0), Targets(0.01, 0.1, 4.0)]
    found = typical_targets(members)
    assert (found.share, found.largest, found.pieces) == pytest.approx((0.02, 0.2, 2.5))
    assert typical_targets([*members, Targets()]).share == 0
    assert typical_targets([]) == Targets()
