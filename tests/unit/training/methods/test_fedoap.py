"""FedOAP's steps alone, without an engine."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from model_store.task import Task
from personalization.precision import Precision
from tests.helpers.training.fedoap_federation import CONFIG, DATA, Federation
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, noise, site_data
from training.algorithm import Group
from training.bounds import FeatureBounds, clipped
from training.config import parse
from training.errors import ConfigurationError
from training.methods.fedoap import models
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap
from training.methods.fedoap.stages import Personal
from training.methods.fedoap.tokens import mean_tokens


def test_what_is_declared():
    plan = FedOap(CONFIG, TASK).plan()
    assert [(phase.name, phase.rounds) for phase in plan] == [
        ("describe", 1),
        ("train", 2),
        ("validate", 1),
        ("finetune", 2),
        ("test", 1),
        ("export", 1),
    ]
    tokens = Group("tokens", "features", "collect", essential=False, bounded=True)
    assert tokens in plan[1].uploads
    assert plan[-1].consent
    for off in ({"kv": "averaged"}, {"kv": "own"}, {"attention": False}):
        kinds = {
            group.kind
            for phase in FedOap(CONFIG.model_copy(update=off), TASK).plan()
            for group in (*phase.uploads, *phase.downloads)
        }
        assert "features" not in kinds
    without = FedOap(CONFIG.model_copy(update={"fine_tune_rounds": 0}), TASK).plan()
    assert "finetune" not in [phase.name for phase in without]


def test_no_personal_tensor_is_among_the_uploads_and_each_site_keeps_its_own():
    federation = Federation().run("train")
    for result in federation.results.values():
        assert not any(
            name.startswith(("query_stage.", "to_query.", "adapter.")) for name in result.uploads["weights"]
        )
    personal = {site: federation.rho(site) for site in federation.memories}
    assert not torch.equal(personal["A"]["to_query.weight"], personal["B"]["to_query.weight"])
    assert not set(federation.gamma) & set(personal["A"])


def test_own_keys_and_values_stay_too():
    federation = Federation(CONFIG.model_copy(update={"kv": "own"})).run("train")
    sent = federation.results["A"].uploads["weights"]
    assert not any(name.startswith(("keyvalue_stage.", "to_key.", "to_value.")) for name in sent)
    assert "to_output.weight" in sent


def test_the_bank_is_one_round_stale_without_the_own_entry_and_without_absent_sites():
    federation = Federation()
    assert federation.bank("A") == {}
    federation.round("train", 0)
    first = {site: result.uploads["tokens"] for site, result in federation.results.items()}
    bank = federation.bank("A")
    assert set(bank) == {"B/key", "B/value", "C/key", "C/value"}
    assert torch.equal(bank["C/value"], first["C"]["value"])
    federation.round("train", 1, sites=("A", "C"))
    assert set(federation.bank("B")) == {"A/key", "A/value", "C/key", "C/value"}
    assert set(federation.bank("A")) == {"C/key", "C/value"}
    assert not torch.equal(federation.bank("A")["C/key"], first["C"]["key"])


def test_the_bank_changes_what_a_site_learns():
    with_bank, without = Federation(), Federation(CONFIG.model_copy(update={"kv": "averaged"}))
    for federation in (with_bank, without):
        federation.round("train", 0)
    sent = [federation.results["A"].uploads["weights"] for federation in (with_bank, without)]
    assert all(torch.equal(sent[0][name], tensor) for name, tensor in sent[1].items())  # round 0: own tokens
    for federation in (with_bank, without):
        federation.round("train", 1)
    sent = [federation.results["A"].uploads["weights"] for federation in (with_bank, without)]
    assert not torch.equal(sent[0]["to_output.weight"], sent[1]["to_output.weight"])


def test_a_site_that_keeps_its_tokens_in_takes_part_and_is_not_attended_to():
    federation = Federation()
    federation.round("train", 0, withheld=("tokens",))
    assert federation.bank("A") == {}
    assert set(federation.results["A"].uploads) == {"weights", "tokens"}
    assert float(federation.gamma["head.weight"].abs().sum()) > 0


def test_the_average_is_uniform_and_by_size_on_request():
    data = {"A": site_data("A", 5, 2, 0), "B": site_data("B", 9, 2, 1)}
    for aggregation, weights in (("uniform", (0.5, 0.5)), ("sample", (5 / 14, 9 / 14))):
        federation = Federation(CONFIG.model_copy(update={"aggregation": aggregation}), data)
        federation.round("train", 0)
        a, b = (federation.results[site].uploads["weights"]["head.weight"] for site in "AB")
        expected = weights[0] * a + weights[1] * b
        torch.testing.assert_close(federation.gamma["head.weight"], expected)


def test_two_rounds_of_a_lone_site_are_one_of_twice_the_steps():
    """Moments stay, the cosine goes on, nothing else happens between rounds (bank and batches aside)."""
    config = CONFIG.model_copy(update={"kv": "averaged", "augment": False, "batch_size": 5})
    data = {"A": site_data("A", 5, 2, 0)}  # one batch is the whole site, in some order
    twice = Federation(config, data).run("train")
    once = Federation(config.model_copy(update={"rounds": 1, "local_steps": 4}), data).run("train")
    weights = {n: t for n, t in twice.gamma.items() if t.ndim == 4}
    # Not the biases: before an instance norm their gradient is rounding, which Adam scales up.
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, once.gamma[name], rtol=1e-3, atol=1e-5)
    slot = twice.algorithm.first.own
    assert [slot.read(each.memories["A"]).taken for each in (twice, once)] == [4, 4]
    forgetful = Federation(config, data)
    forgetful.round("train", 0)
    forgetful.memories["A"] = slot.write(EMPTY, Personal(forgetful.rho("A")))
    forgetful.round("train", 1)
    moved = forgetful.gamma["head.weight"]
    assert not torch.allclose(moved, once.gamma["head.weight"], atol=1e-4)


def test_a_round_is_a_plain_loop_that_attends_to_the_others_tokens():
    """AdamW with a cosine, half the cross-entropy and Dice; a site that comes in round 1 has no moments."""
    config = CONFIG.model_copy(update={"augment": False, "batch_size": 5})
    federation = Federation(config)
    federation.round("train", 0, sites="BC")
    algorithm, data, where = federation.algorithm, DATA["A"], context("train", 1, 2, site="A")
    received = federation.phase("train").broadcast(federation.server, "A")
    bank = models.by_site(received["bank"])
    assert set(bank) == {"B", "C"}
    result = client_step(algorithm, where, received, EMPTY, data)
    start = algorithm.first.joined(where, received, EMPTY)
    network = models.on_device(algorithm.network, start, bank, torch.device("cpu")).train()
    adamw = torch.optim.AdamW(network.parameters(), weight_decay=config.weight_decay)
    draw = where.generator("train")
    for taken in (2, 3):  # of four steps
        order = torch.randperm(len(data.train), generator=draw)
        images, truth = (
            torch.from_numpy(data.train.images)[order],
            torch.from_numpy(data.train.targets)[order],
        )
        total = torch.zeros(())
        for logit, target in zip(network.segment(images)[0], truth[:, None].float(), strict=True):
            p = logit.sigmoid()
            entropy = -(target * p.log() + (1 - target) * (1 - p).log()).mean()
            total = total + entropy / 2 + 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)
        adamw.zero_grad()
        (total / len(images)).backward()
        swing = (1 + math.cos(math.pi * taken / 4)) / 2
        adamw.param_groups[0]["lr"] = config.least_rate + (config.learning_rate - config.least_rate) * swing
        adamw.step()
    for name, tensor in network.state_dict().items():
        found = result.uploads["weights"].get(name, algorithm.first.own.read(result.memory).rho.get(name))
        if tensor.ndim == 4:  # before an instance norm a bias has a gradient of rounding
            torch.testing.assert_close(found, tensor, rtol=1e-3, atol=1e-4)
            if name in received["weights"]:
                assert (tensor - received["weights"][name]).abs().max() > 3e-3


def test_bfloat16_is_for_the_products_of_training_only():
    states = {}
    for precision in get_args(Precision):
        config = CONFIG.model_copy(update={"precision": precision, "rounds": 1, "fine_tune_rounds": 1})
        found = Federation(config, {"A": DATA["A"]}).run("train", "validate", "finetune")
        states[precision] = found.own("A").model
        assert {tensor.dtype for tensor in found.memories["A"].tensors.values()} == {torch.float32}
    moved = {name: float((states["bfloat16"][name] - t).abs().max()) for name, t in states["float32"].items()}
    assert 0 < max(moved.values()) < 0.1


def test_the_cosine():
    config = CONFIG.model_copy(
        update={"rounds": 2, "local_steps": 2, "learning_rate": 1.0, "least_rate": 0.2}
    )
    algorithm = FedOap(config, TASK)
    # 0.2 + 0.8 (1 + cos(pi s / 4)) / 2 at s = 0, 1, 2, 3
    assert algorithm.first.rates(0) == pytest.approx([1.0, 0.2 + 0.4 * (1 + 2**-0.5)])
    assert algorithm.first.rates(1) == pytest.approx([0.6, 0.2 + 0.4 * (1 - 2**-0.5)])
    restarted = FedOap(config.model_copy(update={"cosine": "round"}), TASK)
    assert restarted.first.rates(0) == restarted.first.rates(1) == pytest.approx([1.0, 0.6])


def test_a_site_that_joins_late_starts_from_the_shared_part_it_receives():
    federation = Federation()
    federation.round("train", 0, sites=("A", "B"))
    shared = federation.gamma
    late = federation.algorithm.first.first_rho(context("train", 1, site="C"), shared)
    assert torch.equal(late["query_stage.0.weight"], shared["keyvalue_stage.0.weight"])
    drawn = Federation(CONFIG.model_copy(update={"personal_start": "drawn"})).algorithm
    other = drawn.first.first_rho(context("train", 1, site="C"), shared)
    assert not torch.equal(other["query_stage.0.weight"], shared["keyvalue_stage.0.weight"])
    assert not late["adapter.outer.weight"].any()
    assert not other["adapter.outer.weight"].any()


def network_of_a():
    federation = Federation()
    state = federation.algorithm.whole(federation.server)
    return federation.algorithm.first.network(context("train", 0, site="A"), state, {})


def test_tokens_are_those_of_what_the_site_has_after_its_steps():
    federation = Federation(CONFIG.model_copy(update={"learning_rate": 0.1}))
    federation.round("train", 0)
    sent = federation.results["A"].uploads
    after = {**sent["weights"], **federation.rho("A")}
    network = federation.algorithm.first.network(context("train", 0, site="A"), after, {})
    expected = mean_tokens(network, DATA["A"].train, 4, FeatureBounds(), noise)
    torch.testing.assert_close(sent["tokens"]["key"], expected["key"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sent["tokens"]["value"], expected["value"], rtol=1e-5, atol=1e-6)


def test_mean_tokens_are_means_and_bounded():
    network, slices = network_of_a(), DATA["A"].train
    found = mean_tokens(network, slices, 2, FeatureBounds(minimum_images=5), noise)
    with torch.no_grad():
        expected = [
            [network.keys_and_values(torch.tensor(image)[None])[i] for image in slices.images] for i in (0, 1)
        ]
    # One image at a time is convolved by other kernels than a batch.
    torch.testing.assert_close(found["key"], torch.stack(expected[0]).mean((0, 1)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["value"], torch.stack(expected[1]).mean((0, 1)), rtol=1e-4, atol=1e-5)
    assert mean_tokens(network, slices, 2, FeatureBounds(minimum_images=6), noise) == {}
    tight = mean_tokens(network, slices, 2, FeatureBounds(clip=0.01), noise)
    assert 0 < float(tight["key"].norm()) <= 0.01
    noisy = mean_tokens(network, slices, 2, FeatureBounds(clip=0.01, noise=3.0), noise)
    # 128 draws of standard deviation 3 x 0.01 / 5
    assert float((noisy["key"] - tight["key"]).std()) == pytest.approx(0.006, rel=0.3)


def test_clipping_shortens_the_long_and_leaves_the_short():
    tokens = torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]], [[0.0, 0.0]]])
    torch.testing.assert_close(clipped(tokens, 1.0), torch.tensor([[[0.6, 0.8]], [[0.3, 0.4]], [[0.0, 0.0]]]))
    assert clipped(tokens, None) is tokens


def test_too_few_images_send_nothing_and_are_no_entry():
    federation = Federation(data={"A": DATA["A"], "D": site_data("D", 3, 2, 7)})
    federation.round("train", 0)
    assert federation.results["D"].uploads["tokens"] == {}
    assert federation.bank("A") == {}
    assert set(federation.bank("D")) == {"A/key", "A/value"}


def test_tasks_that_are_not_binary_or_too_small_are_refused():
    several = Task(name="eye", labels={"disc": (1, 2), "cup": (2,)}, channels=1, size=(32, 16))
    with pytest.raises(ConfigurationError) as refused:
        FedOap(CONFIG, several)
    assert "expected one foreground class, found 2 (disc, cup)" in str(refused.value)
    assert "at least 32, found [32, 16]" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"width": 2, "heads": 5}, "divisor of 32"),
        ({"width": 1}, "divisor of 16"),
        ({"learning_rate": 1e-7}, "at most learning_rate, 1e-07"),
        ({"fine_tune_rate": 1e-7}, "at least least_rate, 1e-06"),
        ({"bank_noise": 1.0}, "set bank_clip too"),
        ({"kv": "theirs"}, "token-bank"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(content, said):
    with pytest.raises(ConfigurationError, match=said):
        parse(FedOapConfig, content, "a test")
