"""The verdict on candidates that are known to be good or bad."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from personalization.gate import ROUTING, GateVerdict, ObservedRouting, judge, statistics_distance
from personalization.gate.masks import Maps
from personalization.iop_fl.batch_norm import bake_statistics
from personalization.iop_fl.merge import merge
from personalization.iop_fl.network import route
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt
from tests.helpers.personalization.discs import UNGUARDED, discs, space


def failed(verdict: GateVerdict) -> set[str]:
    assert verdict.passed == all(check.passed for check in verdict.checks)
    return {check.name for check in verdict.checks if not check.passed}


IMAGES, _ = discs(8, 7, contrast=1.2)


def maps_of(network: nn.Module, images: Tensor = IMAGES) -> Maps:
    with torch.no_grad():
        found: Maps = network.eval()(images).argmax(dim=1).numpy().astype(np.uint8)
        return found


@cache
def parent() -> nn.Module:
    return bake_statistics(space().plain(), IMAGES)


def verdict_of(candidate: nn.Module | Maps, replica: nn.Module | Maps | None = None) -> GateVerdict:
    network = candidate if isinstance(candidate, nn.Module) else parent()
    masks = maps_of(candidate) if isinstance(candidate, nn.Module) else candidate
    other = masks if replica is None else maps_of(replica) if isinstance(replica, nn.Module) else replica
    distance = statistics_distance(parent().state_dict(), network.state_dict())
    return judge(
        ROUTING, ObservedRouting(masks, maps_of(parent()), [other], range(len(masks)), 2, 0.0, distance)
    )


def adapted(config: AdaptationConfig, images: Tensor = IMAGES, guarded: bool = True) -> nn.Module:
    network = route(space())
    adapt(network, images, config, **({} if guarded else {"limits": UNGUARDED}))
    return merge(space(), network, images)


def test_the_parent_itself_passes() -> None:
    verdict = verdict_of(parent())
    assert verdict.passed
    values = {check.name: check.value for check in verdict.checks}
    assert (values["agreement"], values["size_factor"], values["fragments"]) == (1, 1, 1)
    assert values["statistics_distance"] == pytest.approx(0, abs=1e-9)


def test_an_honest_adaptation_passes() -> None:
    config = AdaptationConfig(epochs=2, batch_size=4)
    verdict = verdict_of(adapted(config), adapted(config.model_copy(update={"seed": 1})))
    assert failed(verdict) == set()


def test_shuffled_weights_fail() -> None:
    network = copy.deepcopy(parent())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in network.parameters():
            order = torch.randperm(value.numel(), generator=generator)
            value.copy_(value.flatten()[order].view_as(value))
    assert "agreement" in failed(verdict_of(network))
    # Even where their statistics are measured again, as those of a candidate would be
    assert {"agreement", "statistics_distance"} <= failed(verdict_of(bake_statistics(network, IMAGES)))


def test_a_run_wrecked_by_its_rate_fails_if_nothing_stops_it() -> None:
    config = AdaptationConfig(preset="paper", bn_rate=3.0, epochs=2, batch_size=4)
    assert {"agreement", "size_factor", "emptied"} <= failed(verdict_of(adapted(config, guarded=False)))
    assert verdict_of(adapted(config)).passed  # stopped in time, it is step 0


def test_planted_masks_fail_for_what_they_are() -> None:
    good = maps_of(parent())
    assert {"agreement", "size_factor", "emptied"} <= failed(verdict_of(np.zeros_like(good)))
    assert {"agreement", "size_factor", "giant"} <= failed(verdict_of(np.ones_like(good)))
    # Confetti as large as the mask that it replaces: its size gives nothing away
    generator = np.random.default_rng(0)
    confetti = generator.permuted(good.reshape(len(good), -1), axis=1).reshape(good.shape)
    assert failed(verdict_of(confetti)) == {"agreement", "fragments"}
    # Confetti on top of a good mask still agrees with it
    strewn = good.copy()
    strewn[:, ::4, ::8] = 1
    assert "fragments" in failed(verdict_of(strewn))
    # Right for this seed, something else for another
    assert failed(verdict_of(good, np.roll(good, 5, axis=2))) == {"stability"}


def test_a_candidate_that_finds_nothing_where_the_federation_finds_something_fails() -> None:
    empty = np.zeros((6, 32, 32), dtype=np.uint8)
    target = empty.copy()
    target[:, 8:24, 8:24] = 1
    assert failed(
        judge(ROUTING, ObservedRouting(empty, empty, [empty], range(6), 2, 0.0, 0.0, [target, target]))
    ) == {"consensus_gain"}


def test_a_cohort_of_truly_empty_scans_passes_if_it_stays_empty() -> None:
    empty = np.zeros((6, 32, 32), dtype=np.uint8)
    assert judge(ROUTING, ObservedRouting(empty, empty, [empty], range(6), 2, 0.0, 0.0)).passed
    assert judge(
        ROUTING, ObservedRouting(empty, empty, [empty], range(6), 2, 0.0, 0.0, [empty, empty])
    ).passed
    seen = empty.copy()
    seen[:, 8:24, 8:24] = 1
    found = failed(judge(ROUTING, ObservedRouting(seen, empty, [seen], range(6), 2, 0.0, 0.0)))
    assert {"agreement", "size_factor", "giant"} <= found
