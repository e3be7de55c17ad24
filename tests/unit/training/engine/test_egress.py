"""What leaves a site: kinds that its policy allows, of phases that it consents to."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.training.sites import declared
from training.algorithm import ClientResult, Group, ServerStage
from training.engine.egress import SiteSpec, check_plan, let_out, may_take_part
from training.errors import AlgorithmError, EgressRefused

WEIGHTS = Group("weights", "weights")
TOKENS = Group("tokens", "features", "concat", essential=False)
TRAIN = declared("train", 2, (WEIGHTS,), (WEIGHTS, TOKENS))
EXPORT = declared("export", 1, (), (Group("personal", "weights", "collect"),), consent=True)


def site(*allows, consents=False):
    return SiteSpec("A", list, frozenset(allows), consents)


def test_check_plan_rejects_a_policy_that_withholds_an_essential_group():
    plan = (TRAIN, ServerStage("cluster", 3, lambda context, server: server), EXPORT)
    check_plan(plan, [site("weights"), site("weights", "features", "statistics")])
    with pytest.raises(EgressRefused, match="site A: phase 'train' uploads 'weights', of kind weights"):
        check_plan(plan, [site("features", "statistics")])
    # A site that does not export need not allow the groups that the export sends.
    check_plan((EXPORT,), [site()])


@pytest.mark.parametrize(
    ("phase", "spec", "takes_part"),
    [
        (TRAIN, site("weights"), True),
        (TRAIN, site("features"), False),
        (EXPORT, site("weights"), False),
        (EXPORT, site("weights", consents=True), True),
        (EXPORT, site("features", consents=True), False),
    ],
)
def test_may_take_part_requires_egress_and_consent(phase, spec, takes_part):
    assert may_take_part(phase, spec) is takes_part


def result(**uploads):
    return ClientResult({name: {"x": torch.ones(2)} for name in uploads}, 3.0, metrics={"loss": 0.5})


def test_let_out_withholds_groups_that_the_policy_does_not_allow():
    out = let_out(TRAIN, site("weights", "statistics"), result(weights=1, tokens=1))
    assert (set(out.uploads), out.withheld, out.metrics) == ({"weights"}, ("tokens",), {"loss": 0.5})
    out = let_out(TRAIN, site("weights", "features"), result(weights=1, tokens=1))
    assert (set(out.uploads), out.withheld, out.metrics) == ({"weights", "tokens"}, ("metrics",), {})


def test_let_out_rejects_missing_and_undeclared_uploads():
    for uploads in ({"weights": 1}, {"weights": 1, "tokens": 1, "images": 1}):
        with pytest.raises(AlgorithmError, match="declared the uploads"):
            let_out(TRAIN, site("weights", "features"), result(**uploads))


def test_let_out_rejects_a_site_that_does_not_take_part():
    with pytest.raises(EgressRefused, match="does not take part"):
        let_out(EXPORT, site("weights"), result(personal=1))
