"""IOP-FL's steps alone, without an engine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.training.sites import EMPTY, TASK, client_step, context, result_of, server_step, site_data
from training.algorithm import Memory, RoundResult, SiteSize
from training.errors import SiteFailed
from training.local.networks import network_of
from training.local.scores import evaluate
from training.methods import iop_fl
from training.methods.fedavg import FedAvg
from training.methods.iop_fl import CHANGES, COMPARISON, IopFl, IopFlConfig, changes_of, chosen
from training.parts.train import Noted, Shared
from training.state_tree import join, part

CONFIG = IopFlConfig(recipe="paper", width=2, batch_size=4, rounds=3, tau=0.75)
DATA = site_data("A", 5, 4, 0)


def personalise(algorithm, state, memory=EMPTY, data=DATA):
    return client_step(algorithm, context("personalise", 0, site="A"), {"weights": state}, memory, data)


def export(algorithm, memory, share=0.0):
    received = {"share": {"share": torch.tensor(share)}}
    return client_step(algorithm, context("export", 0, site="A"), received, memory, DATA)


def start(config=CONFIG):
    algorithm = IopFl(config, TASK)
    return algorithm, algorithm.initial(context("initial", 0))


def train(algorithm, state, memory, round_):
    return client_step(algorithm, context("train", round_, site="A"), {"weights": state}, memory, DATA)


def test_the_personal_model_is_the_moving_average_of_the_local_ones():
    """Three rounds, unrolled by hand: P3 = (1-tau)^3 w_g + tau sum_i (1-tau)^(2-i) w_i."""
    algorithm, server = start()
    first = part(server.tensors, "train/w_g")
    state, memory, local = first, EMPTY, []
    for round_ in range(3):
        result = train(algorithm, state, memory, round_)
        state, memory = result.uploads["weights"], result.memory
        local.append(state)
    personal = part(memory.tensors, "moving_average/personal")
    for name, tensor in personal.items():
        if tensor.is_floating_point():
            expected = (
                0.25**3 * first[name].double()
                + 0.75 * 0.25**2 * local[0][name].double()
                + 0.75 * 0.25 * local[1][name].double()
                + 0.75 * local[2][name].double()
            )
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-7)
        else:
            assert tensor.item() == local[2][name].item()


def test_the_federation_is_fedavg():
    """P_k never feeds back: what a site uploads is bit for bit what FedAvg's does."""
    algorithm, server = start()
    received = {"weights": part(server.tensors, "train/w_g")}
    plain = client_step(FedAvg(CONFIG, TASK), context("train", 0, site="A"), received, EMPTY, DATA)
    personal = client_step(algorithm, context("train", 0, site="A"), received, EMPTY, DATA)
    assert plain.uploads.keys() == personal.uploads.keys()
    for name, tensor in plain.uploads["weights"].items():
        assert torch.equal(tensor, personal.uploads["weights"][name])


def test_memory_is_not_shared_with_what_is_uploaded_or_received():
    algorithm, server = start(CONFIG.model_copy(update={"tau": 1.0}))
    received = part(server.tensors, "train/w_g")
    result = train(algorithm, received, EMPTY, 0)
    kept = {name: tensor.clone() for name, tensor in result.memory.tensors.items()}
    for tensor in (*received.values(), *result.uploads["weights"].values()):
        tensor.zero_()
    assert all(torch.equal(result.memory.tensors[name], tensor) for name, tensor in kept.items())


def remember(algorithm, dices):
    """The memory after rounds with these Dice of the personal models; P of round t is all t + 1."""
    from training.local.scores import ValidationScore

    memory = EMPTY
    for round_, dice in enumerate(dices):
        state = {"w": torch.full((2,), round_ + 1.0)}
        score = ValidationScore() if dice is None else ValidationScore(2 * dice, 2)
        memory = algorithm.personalise.remember(memory, state, score, round_ + 1)
    return memory


@pytest.mark.parametrize(
    ("selection", "dices", "chosen"),
    [
        ("best", [0.2, 0.6, 0.5], 2),
        ("best", [0.6, 0.6, 0.5], 1),  # the earlier of equals
        ("best", [None, None, None], 3),  # nothing to choose by: the last
        ("best", [None, 0.1, None], 2),
        # Patients without a target: nothing is found in the last two rounds.
        ("best", [0.0, 0.0, None, None], 4),
        ("best", [None, None, 0.0], 2),
        ("last", [0.2, 0.6, 0.5], 3),
    ],
)
def test_the_moving_average_with_the_best_dice_is_kept(selection, dices, chosen):
    algorithm, _ = start(CONFIG.model_copy(update={"selection": selection}))
    memory = remember(algorithm, dices)
    kept = part(memory.tensors, "moving_average/best") or part(memory.tensors, "moving_average/personal")
    assert kept["w"].tolist() == [chosen, chosen]


def test_a_site_that_was_in_no_round_has_the_global_model():
    algorithm, server = start()
    state = part(server.tensors, "train/w_g")
    exported = export(algorithm, personalise(algorithm, state).memory)
    assert all(torch.equal(exported.uploads["personal"][name], tensor) for name, tensor in state.items())


def test_what_a_site_has_is_compared_with_the_global_model_on_its_validation_patients():
    algorithm, server = start()
    state = part(server.tensors, "train/w_g")
    memory = train(algorithm, state, EMPTY, 0).memory
    found = personalise(algorithm, state, memory)
    sent = export(algorithm, found.memory).uploads["comparison"]
    for name, weights in (("before", state), ("after", part(memory.tensors, "moving_average/personal"))):
        network = network_of(algorithm.network, weights, torch.device("cpu"))
        score = evaluate(network, DATA.val, 2)
        assert sent[name].tolist() == [score.total, score.patients]
    assert sent["share"].tolist() == [1.0, 0.0]


def interpolating(monkeypatch, share, least=0):
    monkeypatch.setattr(iop_fl, "LEAST_PATIENTS", least)
    monkeypatch.setattr(iop_fl, "chosen", lambda _changes: iop_fl.LAMBDAS.index(share))
    algorithm, server = start(IopFlConfig(width=2, batch_size=4, rounds=3, personal_epochs=2))
    return algorithm, part(server.tensors, "train/w_g")


def test_a_site_publishes_a_point_between_the_global_model_and_one_tuned_from_it(monkeypatch):
    algorithm, state = interpolating(monkeypatch, 0.25)
    published = export(algorithm, personalise(algorithm, state).memory).uploads["personal"]
    tuned = algorithm.personalise.tuned(context("personalise", 0, site="A"), state, DATA)
    assert any(not torch.equal(tuned[name], tensor) for name, tensor in state.items())
    for name, tensor in state.items():
        if tensor.is_floating_point():
            expected = 0.75 * tensor + 0.25 * tuned[name]
            torch.testing.assert_close(published[name], expected, rtol=1e-5, atol=1e-6)


def test_a_site_that_gains_nothing_publishes_no_model_and_says_so(monkeypatch):
    algorithm, state = interpolating(monkeypatch, 0.0)
    found = personalise(algorithm, state)
    exported = export(algorithm, found.memory)
    assert exported.metrics["personal_share"] == 0.0
    uploads = exported.uploads
    assert uploads["personal"] == {}
    server = algorithm.train.slot.write(Memory(), Shared(state, latest=Noted(3, {"val_dice": 0.5})))
    groups = {"comparison": {"A": uploads["comparison"]}}
    after = server_step(algorithm, context("export", 0), server, RoundResult({}, groups, {"A": 1.0}, {}))
    publication = algorithm.publication(after)
    assert [draft.role for draft in publication.models] == ["global"]
    assert publication.details["personal"]["A"]["share"] == 0.0


def test_the_published_global_model_is_where_personal_ones_start():
    algorithm, server = start(IopFlConfig(width=2, batch_size=4, rounds=3))
    best = {name: tensor + 1 for name, tensor in part(server.tensors, "train/w_g").items()}
    shared = replace(algorithm.train.slot.read(server), best=best, chosen=Noted(2, {"val_dice": 0.5}))
    server = algorithm.train.slot.write(server, shared)
    phases = {phase.name: phase for phase in algorithm.plan()}
    sent = phases["personalise"].broadcast(server, "A")["weights"]
    assert all(torch.equal(sent[name], tensor) for name, tensor in best.items())


@pytest.mark.parametrize(
    ("dice", "expected"),
    [
        # Differences 0.1 and 0.2 everywhere: no spread, so the best wins.
        ({0.0: [0.5, 0.5, 0.5], 0.5: [0.6, 0.6, 0.6], 1.0: [0.7, 0.7, 0.7]}, 1.0),
        # The best is 0.1 (0, 0.1, 0.2), its standard error 0.0577; 0.25 gains 0.05: within one.
        ({0.0: [0.5, 0.5, 0.5], 0.25: [0.55, 0.55, 0.55], 1.0: [0.5, 0.6, 0.7]}, 0.25),
        # The best gains 0.02 with a standard error of 0.04: 0 is within one.
        ({0.0: [0.5, 0.5, 0.5], 1.0: [0.6, 0.48, 0.48]}, 0.0),
        ({0.0: [0.5, 0.5, 0.5], 1.0: [0.4, 0.4, 0.4]}, 0.0),
        # Two patients are too few, however much they gain.
        ({0.0: [0.5, 0.5], 1.0: [0.9, 0.9]}, 0.0),
        # Nothing is there and nothing was found; then something is found: from 1 to 0.
        ({0.0: [math.nan, 0.5, 0.5], 1.0: [0.0, 0.8, 0.8]}, 0.0),
    ],
)
def test_the_share_is_the_smallest_within_one_standard_error_of_the_best(dice, expected):
    found = [{f"p{i}": value for i, value in enumerate(values)} for values in dice.values()]
    assert [*dice][chosen(changes_of(found))] == expected


def test_the_patients_of_several_sites_add_up():
    """Two patients at one site and one at another choose as three at one would."""
    together = [{"a": 0.5, "b": 0.5, "c": 0.5}, {"a": 0.5, "b": 0.6, "c": 0.7}]
    here, there = ([{p: each[p] for p in names} for each in together] for names in ("ab", "c"))
    total = changes_of(here) + changes_of(there)
    torch.testing.assert_close(total, changes_of(together))
    assert (chosen(changes_of(here)), chosen(changes_of(there)), chosen(total)) == (0, 0, 1)


def test_a_site_with_few_patients_takes_the_federation_s_share(monkeypatch):
    algorithm, state = interpolating(monkeypatch, 0.0, least=3)
    memory = personalise(algorithm, state).memory
    assert algorithm.personalise.own.read(memory).changes[0][2] == 2
    uploads = export(algorithm, memory, share=0.5).uploads
    assert uploads["comparison"]["share"].tolist() == [0.5, 1.0]
    tuned = part(memory.tensors, "personalise/tuned")
    for name, tensor in uploads["personal"].items():
        if tensor.is_floating_point():
            expected = (state[name] + tuned[name]) / 2
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)


def test_a_patient_that_was_trained_on_neither_chooses_the_share_nor_compares(monkeypatch):
    algorithm, state = interpolating(monkeypatch, 0.0, least=3)
    found = personalise(algorithm, state, data=replace(DATA, val=DATA.train))
    changes = found.uploads["changes"]
    assert changes["changes"].tolist() == [[0.0, 0.0, 0.0]] * len(iop_fl.LAMBDAS)
    CHANGES.check(changes, SiteSize(1, 1))
    exported = export(algorithm, found.memory, share=0.5)
    comparison = exported.uploads["comparison"]
    assert comparison["before"].tolist() == comparison["after"].tolist() == [0.0, 0.0]
    COMPARISON.check(comparison, SiteSize(1, 1))
    # The site takes the federation's share, and the service has no gain by which to serve it.
    assert comparison["share"].tolist() == [0.5, 1.0]
    server = algorithm.train.slot.write(Memory(), Shared(state, latest=Noted(3, {"val_dice": 0.5})))
    groups = {name: {"A": exported.uploads[name]} for name in ("personal", "comparison")}
    after = server_step(algorithm, context("export", 0), server, RoundResult({}, groups, {"A": 1.0}, {}))
    publication = algorithm.publication(after)
    assert publication.details["personal"]["A"]["val_dice"] is None
    assert [draft.metrics for draft in publication.models if draft.site == "A"] == [{}]


def test_the_federation_s_share_is_that_of_all_patients(monkeypatch):
    algorithm, state = interpolating(monkeypatch, 0.75)
    server = algorithm.train.slot.write(Memory(), Shared(state, latest=Noted(3, {"val_dice": 0.5})))
    result = RoundResult({"changes": {"changes": torch.zeros(5, 3)}}, {}, {"A": 1.0}, {})
    after = server_step(algorithm, context("personalise", 0), server, result)
    phases = {phase.name: phase for phase in algorithm.plan()}
    assert phases["export"].broadcast(after, "A")["share"]["share"].item() == 0.75


def test_own_statistics_are_those_of_the_sites_slices_and_leave_the_average_alone():
    config = CONFIG.model_copy(update={"personal_statistics": "own", "selection": "last"})
    algorithm, server = start(config)
    plain, _ = start(CONFIG.model_copy(update={"selection": "last"}))
    state = part(server.tensors, "train/w_g")
    memories = [train(each, state, EMPTY, 0).memory for each in (algorithm, plain)]
    personal, averaged = (part(memory.tensors, "moving_average/personal") for memory in memories)
    assert all(torch.equal(personal[name], tensor) for name, tensor in averaged.items())
    exported = export(algorithm, personalise(algorithm, state, memories[0]).memory).uploads["personal"]
    # By hand for the first layer: 5 slices in batches of 4 are every other slice, 3 and 2 of them.
    images = torch.tensor(DATA.train.images)
    weight = personal["encoder1.enc1_conv1.weight"]
    features = [torch.conv2d(images[first::2], weight, padding=1) for first in (0, 1)]
    mean = sum(each.mean((0, 2, 3)) for each in features) / 2
    variance = sum(each.var((0, 2, 3)) for each in features) / 2
    torch.testing.assert_close(exported["encoder1.enc1_bn1.running_mean"], mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exported["encoder1.enc1_bn1.running_var"], variance, rtol=1e-5, atol=1e-6)
    for name, tensor in personal.items():
        assert "running" in name or "num_batches" in name or torch.equal(exported[name], tensor)


def test_a_site_without_a_personal_model_says_so():
    algorithm, _ = start()
    with pytest.raises(SiteFailed, match="no personal model"):
        export(algorithm, EMPTY)


def trained(algorithm, server):
    results = {"A": train(algorithm, part(server.tensors, "train/w_g"), EMPTY, 0)}
    result = result_of(results, mean="weights", collect=("scores",))
    return results["A"].memory, server_step(algorithm, context("train", 0), server, result)


def test_what_is_published_with_and_without_consent():
    algorithm, server = start()
    memory, server = trained(algorithm, server)
    alone = algorithm.publication(server)
    assert alone.kind == "model"
    assert [draft.role for draft in alone.models] == ["global"]
    found = personalise(algorithm, part(server.tensors, "train/w_g"), memory)
    exported = export(algorithm, found.memory)
    groups = {name: {"A": state} for name, state in exported.uploads.items()}
    server = server_step(algorithm, context("export", 0), server, RoundResult({}, groups, {"A": 1.0}, {}))
    space = algorithm.publication(server)
    assert space.kind == "routing-space"
    assert [(draft.role, draft.site) for draft in space.models] == [("global", None), ("inside", "A")]
    inside = space.models[1]
    assert all(
        torch.equal(inside.weights[n], t) for n, t in part(memory.tensors, "moving_average/personal").items()
    )
    assert inside.metrics["val_dice"] == pytest.approx(exported.metrics["personal_val_dice"])
    assert set(inside.metrics) == {"val_dice", "val_dice_global"}


def test_trees_are_taken_apart_as_they_were_joined():
    states = {"global": {"a.b": torch.ones(1)}, "inside/CS": {"a.b": torch.zeros(1)}}
    joined = join(states)
    assert set(joined) == {"global/a.b", "inside/CS/a.b"}
    assert part(joined, "inside/CS")["a.b"] is states["inside/CS"]["a.b"]
    assert part(joined, "inside/C") == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (torch.zeros(2, 3), r"shape \[5, 3\], found \[2, 3\]"),
        (torch.tensor([[0.0, 0.0, 9.0]] * 5), "at most 8 cases"),
        (torch.tensor([[4.0, 1.0, 3.0]] * 5), "at most 8 cases"),
        (torch.tensor([[1.0, -1.0, 3.0]] * 5), "at most 8 cases"),
    ],
)
def test_changes_that_no_site_can_have_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        CHANGES.check({"changes": changes}, SiteSize(8, 8))
    CHANGES.check({"changes": torch.tensor([[-1.5, 1.2, 3.0]] * 5)}, SiteSize(8, 8))


@pytest.mark.parametrize(
    "sent",
    [
        {"before": [2.0, 3.0], "after": [4.0, 3.0], "share": [0.5, 0.0]},
        {"before": [2.0, 3.0], "after": [2.0, 3.0], "share": [0.3, 0.0]},
        {"before": [2.0, 3.0], "after": [2.0, 3.0]},
    ],
)
def test_a_comparison_that_no_site_can_have_is_refused(sent):
    state = {name: torch.tensor(values, dtype=torch.float64) for name, values in sent.items()}
    with pytest.raises(ValueError, match="expected"):
        COMPARISON.check(state, SiteSize(8, 8))
