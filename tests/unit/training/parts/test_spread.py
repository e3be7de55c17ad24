"""How far members are apart, from FedAvg's last pass to the published file."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.spread import FILE, Spread
from tests.helpers.training.sites import EMPTY, TASK, context, phase_of, site_data
from training.algorithm import Memory
from training.choices.fedavg import FedAvgConfig
from training.engine.egress import SiteSpec, let_out
from training.engine.reduction import Reducer
from training.local.networks import network_of
from training.local.scores import weight_of
from training.methods.fedavg import FedAvg
from training.parts.train import Noted, Shared
from training.privacy import Noising, PrivacyDemand
from training.state_tree import part

SITES = {
    "A": site_data("A", 6, 4, 0),
    "B": site_data("B", 4, 2, 10, contrast=3.0),
    "C": site_data("C", 2, 2, 20),
}


def published(specs: dict[str, SiteSpec] | None = None) -> tuple[Memory, Spread | None, FedAvg]:
    """The last pass at all sites, by their policies."""
    algorithm = FedAvg(FedAvgConfig(width=2, batch_size=4, rounds=1), TASK)
    server = algorithm.initial(context("initial", 0))
    weights = part(server.tensors, "train/w_g")
    shared = Shared(weights, latest=Noted(0, {"val_dice": 0.5}))
    server = algorithm.train.slot.write(server, shared)
    phase = phase_of(algorithm, "revalidate")
    reducer = Reducer(phase)
    for site, data in SITES.items():
        received = phase.broadcast(server, site)
        result = phase.client_step(context("revalidate", 0, site=site), received, EMPTY, data)
        out = let_out(phase, (specs or {}).get(site, SiteSpec(site, dict)), result)
        reducer.add(site, out.uploads, out.weight, out.metrics, sent=received)
    after = phase.server_step(context("revalidate", 0), server, reducer.result())
    content = algorithm.publication(after).files.get(FILE)
    return server, None if content is None else Spread.model_validate_json(content), algorithm


def test_the_spread_is_that_of_a_loop_over_members_and_a_site_of_one_patient_sends_none() -> None:
    server, spread, algorithm = published()
    assert spread is not None
    assert spread.members == 2  # C has one patient
    network = network_of(algorithm.network, part(server.tensors, "train/w_g"), torch.device("cpu"))
    natural = []
    for site in "AB":
        train = SITES[site].train
        found = profile(network, torch.from_numpy(train.images), train.patients)
        # A norm that follows another one has no shift of its means in a network without training.
        least = torch.full_like(found.shift, 1e-8)
        natural.append(torch.maximum(found.shift - found.sampling, 0.2 * found.shift).maximum(least))
    expected = 3 * (natural[0] + natural[1]) / 2
    torch.testing.assert_close(spread.tau("arithmetic"), expected, rtol=1e-4, atol=1e-9)
    shares = [float((SITES[site].train.targets > 0).mean()) for site in "AB"]
    assert spread.share == pytest.approx((shares[0] * shares[1]) ** 0.5)
    assert spread.size == pytest.approx(statistics.stdev(map(math.log, shares)))
    assert weight_of(SITES["A"], "sample") == 6  # it counts once all the same
    assert len(spread.to_bytes()) < 8192


@pytest.mark.parametrize(
    "spec",
    [
        SiteSpec("B", dict, allows=frozenset({"weights"})),
        SiteSpec("B", dict, demand=PrivacyDemand(kinds={"weights": Noising(clip=1, noise=1)})),
    ],
    ids=["policy", "noise"],
)
def test_a_member_that_refuses_or_adds_noise_leaves_too_few(spec: SiteSpec) -> None:
    _, spread, algorithm = published({"B": spec})
    assert spread is None
    result = phase_of(algorithm, "revalidate")
    assert spec.refusal(result, next(group for group in result.uploads if group.name == "spread"))
