"""What a site makes of FedOAP's shared part, and what is published of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from personalization.fedoap.parts import split
from tests.helpers.training.fedoap_federation import ALONE, CONFIG, Federation, export
from training.errors import PublishError, SiteFailed
from training.local.scores import ValidationScore
from training.methods.fedoap import stages


@pytest.mark.parametrize(
    ("found", "selection", "kept"),
    [
        ((0.2, 0.9, 0.5), "best", 1),  # the first round: neither the start nor what came last
        ((0.9, 0.2, 0.5), "best", 0),
        ((0.2, 0.5, 0.9), "best", 2),
        ((0.5, 0.5, 0.5), "best", 0),  # of equals the earliest
        ((0.9, 0.5, 0.2), "last", 2),
    ],
)
def test_fine_tuning_keeps_the_best_of_its_rounds_and_the_start(found, selection, kept, monkeypatch):
    """Scores are put in the mouth of the validation, so that any of the three can be the best."""
    monkeypatch.setattr(stages, "evaluate", lambda *_: ValidationScore(next(scores), 2))
    scores = iter([0.0, 0.0, found[0]])  # two rounds of stage 1, and its end
    federation = Federation(CONFIG.model_copy(update={"selection": selection}), ALONE)
    federation.run("train", "validate")
    models = [federation.own("A").model]
    for round_ in range(2):
        scores = iter([found[round_ + 1]])
        federation.round("finetune", round_)
        models.append(federation.own("A").model)
    assert not torch.equal(models[0]["head.weight"], models[1]["head.weight"])
    assert not torch.equal(models[1]["head.weight"], models[2]["head.weight"])
    assert federation.own("A").chosen.keys() == models[kept].keys()
    assert all(torch.equal(tensor, models[kept][n]) for n, tensor in federation.own("A").chosen.items())
    assert federation.own("A").score == ValidationScore(found[kept], 2)
    assert bool(federation.own("A").best) == (kept != 2)  # the last model is kept once
    federation.round("export")
    uploads = federation.results["A"].uploads
    assert uploads["personal"].keys() == models[kept].keys()
    assert all(torch.equal(uploads["personal"][name], tensor) for name, tensor in models[kept].items())
    assert uploads["personal_score"]["score"].tolist() == [found[kept], 2]


@pytest.mark.parametrize(
    ("start", "round_", "kept"),
    [
        (
            ValidationScore(0.8, 1),
            ValidationScore(0.81, 5),
            0,
        ),  # a point more at the one who is ill, false alarms at four who are not
        (ValidationScore(0.8, 5), ValidationScore(0.79, 1), 1),
        (ValidationScore(0.0, 0), ValidationScore(0.0, 2), 0),  # no patient is ill
        (ValidationScore(0.0, 2), ValidationScore(0.0, 0), 1),
    ],
)
def test_false_alarms_count_against_a_round(start, round_, kept, monkeypatch):
    """Who has no tumour counts where one is found, and not otherwise: sums over patients do not compare."""
    monkeypatch.setattr(stages, "evaluate", lambda *_: next(scores))
    scores = iter([ValidationScore(), ValidationScore(), start])
    federation = Federation(CONFIG, ALONE).run("train", "validate")
    scores = iter([round_])
    federation.round("finetune", 0)
    assert federation.own("A").score == (round_ if kept else start)
    assert bool(federation.own("A").best) == (kept == 0)


def test_fine_tuning_attends_to_the_bank():
    tuned = []
    for far in (0.0, 3.0):
        federation = Federation().run("train", "validate")
        slot, memory = federation.algorithm.second.slot, federation.memories["A"]
        own = slot.read(memory)
        moved = {site: {n: t + far for n, t in entry.items()} for site, entry in own.bank.items()}
        federation.memories["A"] = slot.write(memory, replace(own, bank=moved))
        federation.round("finetune", 0, sites=("A",))
        tuned.append(federation.own("A").model)
    assert not torch.equal(tuned[0]["to_output.weight"], tuned[1]["to_output.weight"])


def test_fine_tuning_takes_its_own_steps_rate_and_loss(monkeypatch):
    """The cosine runs over both rounds: 0.2 + 0.8 (1 + cos(pi s / 4)) / 2 at s = 0, 1, 2, 3."""
    rates, losses = [], []
    monkeypatch.setattr(stages, "train_adamw", _noting(stages.train_adamw, rates, 3))
    monkeypatch.setattr(stages, "second_stage_loss", _noting(stages.second_stage_loss, losses))
    options = {"fine_tune_rate": 1.0, "least_rate": 0.2, "pbl_threshold": 0.3, "pbl_variance": 0.7}
    config = CONFIG.model_copy(update={**options, "pbl_trade_off": 0.4, "fine_tune_steps": 2})
    federation = Federation(config, ALONE).run("train", "validate")
    rates.clear()
    federation.run("finetune")
    assert rates[0] == pytest.approx([1.0, 0.2 + 0.4 * (1 + 2**-0.5)])
    assert rates[1] == pytest.approx([0.6, 0.2 + 0.4 * (1 - 2**-0.5)])
    said = {"perturbed": True, "variance": 0.7, "threshold": 0.3, "trade_off": 0.4}
    assert losses == [said] * 4


def _noting(function, seen, position=None):
    """The function; `seen` gets its argument at a position, or its named arguments."""

    def noted(*arguments, **named):
        seen.append(named if position is None else arguments[position])
        return function(*arguments, **named)

    return noted


def test_fine_tuning_trains_every_weight_and_the_loss_is_an_option():
    tuned = {}
    for loss in ("perturbed", "plain"):
        config = CONFIG.model_copy(update={"fine_tune_loss": loss, "selection": "last", "pbl_threshold": 0.3})
        federation = Federation(config, ALONE).run("train", "validate")
        before = federation.own("A").model
        tuned[loss] = federation.run("finetune").own("A").model
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
    # What members validated is joined to their own parts, and says nothing of the global model.
    assert (outside.metrics, set(member.metrics)) == ({}, {"val_dice"})
    assert outside.weights["bank_present"].tolist() == [True, True, True]
    assert member.weights["bank_present"].tolist() == [True, False, True]
    gamma = federation.gamma
    assert all(torch.equal(outside.weights[name], tensor) for name, tensor in gamma.items())
    assert torch.equal(outside.weights["query_stage.3.bias"], gamma["keyvalue_stage.3.bias"])
    assert not outside.weights["adapter.outer.weight"].any()
    assert publication.details == {"zero_shot": "shared"}
    own = federation.own("B").chosen
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


def test_no_untrained_query_stage_is_published():
    """With keys and values of their own, what no site exported was never trained by the federation."""
    federation = Federation(CONFIG.model_copy(update={"kv": "own"})).run("train", "validate", "finetune")
    with pytest.raises(PublishError, match=r"no site exported its model.*--resume and --consent"):
        federation.algorithm.publication(federation.server)
    export(federation, "A", "C")
    publication = federation.algorithm.publication(federation.server)
    outside, a, c = (model.weights for model in publication.models)
    assert publication.details == {"zero_shot": "mean"}
    drawn = federation.algorithm.first.slot.read(federation.server).drawn
    for name in ("query_stage.0.weight", "keyvalue_stage.0.weight", "to_key.weight", "to_value.bias"):
        torch.testing.assert_close(outside[name], (a[name] + c[name]) / 2)
        assert not torch.allclose(outside[name], drawn[name], atol=1e-4)


def test_without_attention_there_is_no_query_stage_to_ask_for():
    config = CONFIG.model_copy(update={"attention": False, "kv": "own"})
    federation = Federation(config).run("train", "validate", "finetune")
    (outside,) = federation.algorithm.publication(federation.server).models
    assert not any(name.startswith("query_stage.") for name in outside.weights)


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
