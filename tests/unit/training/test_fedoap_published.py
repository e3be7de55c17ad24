"""What a site makes of FedOAP's shared part, and what is published of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from personalization.personal import split
from tests.unit.training.fedoap_federation import ALONE, CONFIG, DATA, Federation, export
from tests.unit.training.sites import context
from training.errors import SiteFailed
from training.methods.trees import part


def test_fine_tuning_keeps_the_best_of_its_rounds_and_the_start():
    federation = Federation(CONFIG.model_copy(update={"fine_tune_rate": 0.05}), ALONE).run(
        "train", "validate"
    )
    start = part(federation.memories["A"].tensors, "model")
    federation.run("finetune")
    facts = federation.memories["A"].facts
    assert facts["latest"]["round"] == 2
    assert facts["best"]["total"] >= facts["latest"]["total"]
    # A first round after which nothing is better: what is exported is the start.
    phase, memory = (
        federation.phase("finetune"),
        Federation(data=ALONE).run("train", "validate").memories["A"],
    )
    unbeaten = {**memory.facts["best"], "total": 99.0}
    memory = replace(memory, facts={"latest": unbeaten, "best": unbeaten})
    for round_ in range(phase.rounds):
        step = federation.algorithm.client_step(
            context("finetune", round_, 2, site="A"), {}, memory, DATA["A"]
        )
        memory = step.memory
    exported = federation.algorithm.client_step(context("export", 0, 1, site="A"), {}, memory, DATA["A"])
    assert exported.uploads["personal"].keys() == start.keys()
    assert all(torch.equal(exported.uploads["personal"][name], tensor) for name, tensor in start.items())
    assert memory.facts["best"]["round"] == 0


def test_fine_tuning_trains_every_weight_and_the_loss_is_an_option():
    tuned = {}
    for loss in ("perturbed", "plain"):
        config = CONFIG.model_copy(update={"fine_tune_loss": loss, "selection": "last", "pbl_threshold": 0.3})
        federation = Federation(config, ALONE).run("train", "validate")
        before = part(federation.memories["A"].tensors, "model")
        tuned[loss] = part(federation.run("finetune").memories["A"].tensors, "model")
        still = {name for name, tensor in before.items() if torch.equal(tensor, tuned[loss][name])}
        assert not still, still
    assert not torch.equal(tuned["plain"]["head.weight"], tuned["perturbed"]["head.weight"])


def test_a_site_without_a_model_says_so():
    for phase in ("finetune", "export"):
        with pytest.raises(SiteFailed, match="dropped out of the phase 'validate'"):
            Federation().round(phase)


def test_what_is_published():
    federation = Federation().run("train", "validate", "finetune")
    export(federation, "B")
    publication = federation.algorithm.publication(federation.server)
    assert publication.kind == "cross-attention"
    outside, member = publication.models
    assert [(m.role, m.site) for m in publication.models] == [("global", None), ("inside", "B")]
    assert outside.sources == member.sources == ("own", "A", "B", "C")
    assert outside.network == member.network
    assert outside.weights["bank_present"].tolist() == [True, True, True]
    assert member.weights["bank_present"].tolist() == [True, False, True]
    gamma = part(federation.server.tensors, "global")
    assert all(torch.equal(outside.weights[name], tensor) for name, tensor in gamma.items())
    assert torch.equal(outside.weights["query_stage.3.bias"], gamma["keyvalue_stage.3.bias"])
    assert not outside.weights["adapter.outer.weight"].any()
    assert publication.details == {"zero_shot": "shared"}
    chosen = federation.memories["B"].tensors
    own = part(chosen, "best") or part(chosen, "model")
    assert all(torch.equal(member.weights[name], tensor) for name, tensor in own.items())


def test_zero_shot_from_the_mean_of_the_exported_parts():
    federation = Federation(CONFIG.model_copy(update={"zero_shot": "mean"})).run("train", "validate")
    assert federation.algorithm.publication(federation.server).details == {"zero_shot": "shared"}
    export(federation, "A", "B")
    publication = federation.algorithm.publication(federation.server)
    outside, a, b = (model.weights for model in publication.models)
    for name in split(outside)[1]:
        if name.startswith(("query_stage.", "to_query.")):
            torch.testing.assert_close(outside[name], (a[name] + b[name]) / 2)
    assert not outside["adapter.outer.weight"].any()
    assert publication.details == {"zero_shot": "mean"}


@pytest.mark.parametrize(
    "options", [{"attention": False}, {"adapter": False}, {"kv": "own"}, {"kv": "averaged"}]
)
def test_every_arm_runs_to_a_publication(options):
    federation = Federation(CONFIG.model_copy(update=options)).run("train", "validate", "finetune")
    export(federation, "A")
    publication = federation.algorithm.publication(federation.server)
    expected = None if options == {"attention": False} else ("own",)
    if options == {"adapter": False}:
        expected = ("own", "A", "B", "C")
    assert {model.sources for model in publication.models} == {expected}
