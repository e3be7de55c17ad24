"""What releases cost in epsilon, against the definition of differential privacy and Opacus' figures."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from tests.helpers.training.sites import TASK, declared
from training.algorithm import ClientResult
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig, parse
from training.engine.egress import SiteSpec, check_plan, check_privacy, let_out, may_take_part
from training.errors import ConfigurationError, EgressRefused
from training.methods.fedavg import FedAvg
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap
from training.methods.scaffold import CONTROL, Scaffold, ScaffoldConfig
from training.parts.train import WEIGHTS as WEIGHT_GROUP
from training.privacy import Noising, PrivacyDemand, RunPrivacy, epsilon_of

HOW = Noising(clip=1.0, noise=2.0)
WEIGHTS = RunPrivacy(groups={"weights": HOW})
DEMAND = PrivacyDemand(kinds={"weights": HOW})


def hockey_stick(epsilon: float, apart: float) -> float:
    """The delta of N(0, 1) against N(apart, 1) by definition: the integral of max(0, p - e^epsilon q)."""
    return quad(
        lambda x: max(0.0, norm.pdf(x, apart) - math.exp(epsilon) * norm.pdf(x)), -12, 12 + apart, limit=200
    )[0]


@pytest.mark.parametrize(("noises", "delta"), [([2.0], 1e-5), ([4.0] * 10, 1e-3), ([3.0, 5.0, 2.5], 1e-4)])
def test_epsilon_is_that_of_the_definition(noises, delta):
    # Updates of norm C are at most 2 C apart, one release after the other: a Euclidean distance.
    apart = 2 * math.sqrt(sum(1 / noise**2 for noise in noises))
    assert hockey_stick(epsilon_of(noises, delta), apart) == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize(
    ("multiplier", "steps", "delta", "prv", "rdp"),
    [
        # Opacus 1.6.0, sample rate 1: PRVAccountant (its error is 0.01), RDPAccountant.
        (1, 1, 1e-5, 4.387413787977018, 4.728507067217623),
        (2, 10, 1e-5, 7.521641007073685, 8.079406222420491),
        (10, 100, 1e-6, 4.896766038557062, 5.2215396311544175),
        (0.5, 25, 1e-5, 91.82951568406463, 96.11630842505602),
    ],
)
def test_epsilon_is_that_of_opacus_for_half_the_sensitivity(multiplier, steps, delta, prv, rdp):
    found = epsilon_of([2 * multiplier] * steps, delta)
    assert prv - 0.02 <= found <= prv < rdp


def test_epsilon_has_no_limit_but_is_none_without_a_release():
    assert epsilon_of([], 1e-5) == 0
    assert epsilon_of([1e6], 1e-5) == 0  # total variation is below delta
    assert epsilon_of([0.01] * 100, 1e-5) == pytest.approx(2e6, rel=0.01)
    assert np.all(np.diff([epsilon_of([2.0] * n, 1e-5) for n in range(1, 9)]) > 0)


def test_the_stricter_of_run_and_hospital_applies_to_a_group():
    site = SiteSpec(
        "A",
        dict,
        privacy=RunPrivacy(delta=1e-6, groups={"weights": Noising(clip=0.5, noise=1.0)}),
        demand=PrivacyDemand(kinds={"weights": HOW}),
    )
    weights = FedAvg(FedAvgConfig(), TASK).plan()[1].uploads[0]
    assert site.noising(weights) == Noising(clip=0.5, noise=2.0)
    assert site.delta == 1e-6


@pytest.mark.parametrize(
    ("method", "group", "why"),
    [
        (FedAvg(FedAvgConfig(), TASK), "moments", "only a mean of updates of what the sites received"),
        (FedAvg(FedAvgConfig(), TASK), "scores", "is reduced by collect"),
        (FedAvg(FedAvgConfig(), TASK), "bank", "no phase uploads 'bank'; groups that can: weights"),
        (FedOap(FedOapConfig(), TASK), "tokens", "is reduced by collect"),
    ],
)
def test_privacy_of_a_group_that_is_no_mean_of_updates_is_refused_before_the_run(method, group, why):
    check_privacy(method.plan(), WEIGHTS)
    with pytest.raises(ConfigurationError, match=why):
        check_privacy(method.plan(), RunPrivacy(groups={group: HOW}))


def test_privacy_of_weights_beside_another_upload_of_them_without_noise_is_refused():
    plan = Scaffold(ScaffoldConfig(), TASK).plan()
    with pytest.raises(ConfigurationError, match=r"leaves beside 'control_change', .* groups that can: none"):
        check_privacy(plan, WEIGHTS)
    both = [declared("train", 1, (WEIGHT_GROUP, CONTROL), (WEIGHT_GROUP, CONTROL))]
    check_privacy(both, RunPrivacy(groups={"weights": HOW, "control": HOW}))
    with pytest.raises(ConfigurationError, match=r"beside 'control'.* groups that can: control, weights"):
        check_privacy(both, WEIGHTS)


def test_demand_of_a_hospital_keeps_what_cannot_have_noise_at_home():
    plan = FedOap(FedOapConfig(), TASK).plan()
    train, export = plan[1], plan[-1]
    site = SiteSpec("A", dict, consents=True, demand=PrivacyDemand(kinds={"weights": HOW, "features": HOW}))
    check_plan(plan, [site])
    assert [group.name for group in train.uploads if site.refusal(train, group)] == ["tokens"]
    assert not may_take_part(export, site)  # its own model, without noise
    essential = export.uploads[0]
    assert essential.name == "personal"
    assert "this group is reduced by collect" in (site.refusal(export, essential) or "")
    result = ClientResult({"weights": {}, "tokens": {}}, 1.0, metrics={"loss": 1.0})
    assert let_out(train, site, result).withheld == ("tokens",)
    shy = SiteSpec("A", dict, demand=PrivacyDemand(kinds={"statistics": HOW}))
    assert let_out(train, shy, result).withheld == ("metrics",)


def test_method_that_needs_what_cannot_have_noise_is_refused_before_the_run():
    from tests.helpers.training.toy_federation import Toy

    plan = Toy().plan()
    site = SiteSpec("A", dict, demand=PrivacyDemand(kinds={"weights": HOW}))
    check_plan(plan, [site])
    # The same phase without consent.
    with pytest.raises(EgressRefused, match="'trail', of kind weights, which must have differential privacy"):
        check_plan((replace(plan[2], consent=False),), [site])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"privacy": {"groups": {"weights": {"clip": 0, "noise": 1}}}}, "greater than 0"),
        ({"privacy": {"groups": {"weights": {"clip": 1, "noise": "inf"}}}}, "finite"),
        ({"privacy": {"groups": {}}}, "at least 1 item"),
        ({"privacy": {"groups": {"weights": {"clip": 1, "noise": 1}}, "delta": 1}}, "less than 1"),
        ({"privacy_demands": {"A": {"kinds": {"masks": {"clip": 1, "noise": 1}}}}}, "weights"),
        ({"secure_aggregation": True}, "secure aggregation is not available"),
    ],
)
def test_configuration_that_cannot_hold_is_rejected(content, why):
    with pytest.raises(ConfigurationError, match=why):
        parse(RunConfig, content, "a test")
