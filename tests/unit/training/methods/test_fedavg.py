"""FedAvg's steps alone, without an engine."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from personalization.losses import soft_dice_loss
from personalization.networks import build
from personalization.precision import Precision
from tests.helpers.training.sites import (
    EMPTY,
    TASK,
    client_step,
    context,
    result_of,
    server_step,
    site_data,
    slices,
)
from training.algorithm import RoundResult, SiteSize
from training.choices.fedavg import FedAvgConfig
from training.engine.reduction import Reducer
from training.local.loop import train_locally
from training.local.networks import network_of, state_of
from training.local.schedule import Schedule
from training.local.scores import ValidationScore, evaluate
from training.local.slices import batches
from training.methods.fedavg import FedAvg
from training.parts.describe import STATISTICS, _pack
from training.parts.train import SCORES, Noted, Shared
from training.state_tree import part

CONFIG = FedAvgConfig(recipe="paper", width=2, batch_size=4, rounds=3)
SITES = {"A": site_data("A", 6, 4, 0), "B": site_data("B", 3, 2, 10), "C": site_data("C", 1, 0, 20)}


def start(config=CONFIG):
    algorithm = FedAvg(config, TASK)
    return algorithm, algorithm.initial(context("initial", 0))


def steps(algorithm, server, round_=0, phase="train"):
    train = next(p for p in algorithm.plan() if p.name == phase)
    return {
        site: client_step(
            algorithm, context(phase, round_, site=site), train.broadcast(server, site), EMPTY, data
        )
        for site, data in SITES.items()
    }


def plain_training(state, data, generator, epochs=1, rate=1e-3, amsgrad=False):
    """The plain loop: a fresh Adam over shuffled, augmented batches."""
    network = build("unet", in_channels=1, classes=2, width=2)
    network.load_state_dict(state)
    # The memory layout decides in which order a convolution adds up.
    network.to(memory_format=torch.channels_last).train()
    optimiser = torch.optim.Adam(network.parameters(), lr=rate, amsgrad=amsgrad)
    for _ in range(epochs):
        for images, targets in batches(data.train, 4, generator, True):
            loss = soft_dice_loss(network(images), targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return network.state_dict()


@pytest.mark.parametrize("aggregation", ["sample", "uniform"])
def test_one_round_equals_the_naive_computation(aggregation):
    algorithm, server = start(CONFIG.model_copy(update={"aggregation": aggregation}))
    reducer = Reducer(algorithm.plan()[1])
    for site, result in steps(algorithm, server).items():
        reducer.add(site, result.uploads, result.weight, result.metrics)
    after = server_step(algorithm, context("train", 0), server, reducer.result())
    start_state = part(server.tensors, "train/w_g")
    local = {
        site: plain_training(start_state, data, context("train", 0, site=site).generator("train"))
        for site, data in SITES.items()
    }
    shares = {"A": 0.6, "B": 0.3, "C": 0.1} if aggregation == "sample" else dict.fromkeys("ABC", 1 / 3)
    for name, tensor in part(after.tensors, "train/w_g").items():
        if tensor.is_floating_point():
            expected = sum(shares[site] * local[site][name].double() for site in local)
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)
        else:
            assert tensor.item() == local["A"][name].item() == 2  # two batches at the first site


def test_amsgrad_is_amsgrad():
    algorithm, server = start(CONFIG.model_copy(update={"amsgrad": True, "local_epochs": 4}))
    before = part(server.tensors, "train/w_g")

    def draw():
        return context("train", 0, site="A").generator("train")

    network = network_of(algorithm.network, before, torch.device("cpu"))
    train_locally(network, SITES["A"].train, algorithm.schedule(0), draw())
    expected = plain_training(before, SITES["A"], draw(), epochs=4, amsgrad=True)
    torch.testing.assert_close(state_of(network), dict(expected), rtol=1e-6, atol=1e-7)
    plain = plain_training(before, SITES["A"], draw(), epochs=4)
    assert any(not torch.allclose(plain[name], expected[name], rtol=1e-6, atol=1e-7) for name in plain)


def test_a_step_leaves_what_it_received_alone():
    algorithm, server = start()
    before = {name: tensor.clone() for name, tensor in server.tensors.items()}
    steps(algorithm, server)
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in before.items())


def test_the_server_keeps_the_global_model_with_the_best_dice():
    algorithm, server = start()
    train = algorithm.plan()[1]
    sent, dice = [], []
    for round_ in range(3):
        results = steps(algorithm, server, round_)
        sent.append(part(server.tensors, "train/w_g"))
        scores = {site: r.uploads["scores"]["score"] for site, r in results.items()}
        # Planted: the second model that was sent is the best. C has no validation patient.
        planted = {"A": [[0.2, 2], [1.6, 2], [1.0, 2]][round_], "B": [[0.1, 1], [0.7, 1], [0.9, 1]][round_]}
        for site, score in planted.items():
            scores[site][:] = torch.tensor(score)
        assert scores["C"].tolist() == [0.0, 0.0]
        dice.append(sum(s[0] for s in planted.values()) / 3)
        result = result_of(results, mean="weights", collect=("scores",))
        server = server_step(algorithm, context("train", round_), server, result)
    assert algorithm.train.slot.read(server).chosen == Noted(1, {"val_dice": pytest.approx(dice[1])})
    (draft,) = algorithm.publication(server).models
    assert all(torch.equal(draft.weights[name], sent[1][name]) for name in sent[1])
    assert draft.metrics["val_dice"] == pytest.approx(dice[1])
    assert train.rounds == 3


def test_a_site_that_is_away_counts_with_its_last_score():
    algorithm, server = start()
    results = steps(algorithm, server)
    results["A"].uploads["scores"]["score"][:] = torch.tensor([1.0, 2.0])
    results["B"].uploads["scores"]["score"][:] = torch.tensor([0.5, 1.0])
    server = server_step(
        algorithm, context("train", 0), server, result_of(results, mean="weights", collect=("scores",))
    )
    only = {"B": results["B"]}
    only["B"].uploads["scores"]["score"][:] = torch.tensor([0.9, 1.0])
    server = server_step(
        algorithm, context("train", 1), server, result_of(only, mean="weights", collect=("scores",))
    )
    latest = algorithm.train.slot.read(server).latest
    assert latest.metrics["val_dice"] == pytest.approx((1.0 + 0.9) / 3)


def test_the_best_round_is_chosen_among_those_scored_on_the_same_patients():
    """B's patients are harder: a round before they count is not better for that."""
    shared, best = Shared(), []
    told = [("A", [1.8, 2.0]), ("B", [0.5, 1.0]), ("A", [1.6, 2.0]), ("B", [0.8, 1.0]), ("A", [1.6, 3.0])]
    for round_, (site, score) in enumerate(told):
        state = {"score": torch.tensor(score, dtype=torch.float64)}
        result = RoundResult({}, {"scores": {site: state}}, {site: 1.0}, {})
        shared = shared.noting(result, "val_dice", round_).choosing(shared, "val_dice")
        best.append((shared.chosen.round, pytest.approx(shared.chosen.metrics["val_dice"])))
    # A false alarm is one patient more at a site that counts already.
    assert best == [(0, 0.9), (1, 2.3 / 3), (1, 2.3 / 3), (3, 0.8), (3, 0.8)]


def test_a_late_site_without_a_scored_patient_changes_nothing():
    shared = Shared()
    for round_, told in enumerate([{"A": [1.8, 2.0]}, {"A": [1.0, 2.0]}, {"A": [1.0, 2.0], "B": [0.0, 0.0]}]):
        sent = {site: {"score": torch.tensor(score, dtype=torch.float64)} for site, score in told.items()}
        result = RoundResult({}, {"scores": sent}, dict.fromkeys(told, 1.0), {})
        shared = shared.noting(result, "val_dice", round_).choosing(shared, "val_dice")
    assert shared.chosen == Noted(0, {"val_dice": 0.9})


@pytest.mark.parametrize(
    ("score", "says"),
    [
        ([3.5, 3.0], "found 3.5 of 3"),
        ([-0.1, 3.0], "found -0.1 of 3"),
        ([1.0, 9.0], "8 at most, found 1 of 9"),
        ([1.0, 2.5], "found 1 of 2.5"),
        ([1.0], r"shape \[2\] and float64, found \[1\]"),
    ],
)
def test_a_score_that_no_site_can_have_is_refused(score, says):
    with pytest.raises(ValueError, match=says):
        SCORES.check({"score": torch.tensor(score, dtype=torch.float64)}, SiteSize(8, 8))
    SCORES.check(ValidationScore(2.5, 3).state(), SiteSize(8, 8))
    SCORES.check(ValidationScore(0.0, 0).state(), SiteSize())


def test_a_description_that_is_none_is_refused():
    with pytest.raises(ValueError, match="line 1"):
        STATISTICS.check({"json": torch.tensor([104, 105], dtype=torch.uint8)}, SiteSize())
    STATISTICS.check(_pack(None), SiteSize())


def test_without_any_score_the_last_model_is_published():
    algorithm, server = start()
    results = steps(algorithm, server)
    server = server_step(
        algorithm, context("train", 0), server, result_of(results, mean="weights", collect=())
    )
    (draft,) = algorithm.publication(server).models
    last = part(server.tensors, "train/w_g")
    assert all(torch.equal(draft.weights[name], last[name]) for name in last)
    assert draft.metrics == {}


def test_the_last_model_on_request():
    algorithm, server = start(CONFIG.model_copy(update={"selection": "last"}))
    result = result_of(steps(algorithm, server), mean="weights", collect=("scores",))
    server = server_step(algorithm, context("train", 0), server, result)
    validated = result_of(steps(algorithm, server, 0, "validate"), mean=None, collect=("scores",))
    after = server_step(algorithm, context("validate", 0), server, validated)
    (draft,) = algorithm.publication(after).models
    last = part(server.tensors, "train/w_g")
    assert all(torch.equal(draft.weights[name], last[name]) for name in last)
    assert draft.metrics["val_dice"] == algorithm.train.slot.read(after).latest.metrics["val_dice"]


@pytest.mark.parametrize("selection", ["best", "last"])
def test_the_global_model_takes_the_statistics_of_all_sites_slices(selection):
    """Of equal batches at both sites the pooled statistics are those of one pass over all slices."""
    sites = {"A": SITES["A"], "B": site_data("B", 6, 2, 10)}
    config = FedAvgConfig(width=2, batch_size=6, rounds=1, selection=selection)
    algorithm, server = start(config)
    weights = part(server.tensors, "train/w_g")
    noted = Noted(0, {"val_dice": 0.9})
    best = {"best": weights, "chosen": noted} if selection == "best" else {}
    server = algorithm.train.slot.write(server, Shared(weights, latest=noted, **best))

    def run(phase, server, **reduction):
        results = {
            site: client_step(
                algorithm, context(phase.name, 0, site=site), phase.broadcast(server, site), EMPTY, data
            )
            for site, data in sites.items()
        }
        return server_step(algorithm, context(phase.name, 0), server, result_of(results, **reduction))

    estimate, revalidate = algorithm.plan()[-3:-1]
    after = run(estimate, server, mean="moments", collect=())
    found = algorithm.train.slot.read(after).selected
    images = torch.from_numpy(np.concatenate([data.train.images for data in sites.values()]))
    inputs = {}
    network = network_of(algorithm.network, weights, torch.device("cpu"))
    network.train()
    first = next(path for path, module in network.named_modules() if isinstance(module, torch.nn.BatchNorm2d))
    network.get_submodule(first).register_forward_hook(lambda _m, x, _y: inputs.update(x=x[0]))
    with torch.no_grad():
        network(images)
    # The first norm has the same input in one pass; later ones follow norms of the batch.
    variance, mean = torch.var_mean(inputs["x"], dim=(0, 2, 3))
    torch.testing.assert_close(found[f"{first}.running_mean"], mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[f"{first}.running_var"], variance, rtol=1e-3, atol=1e-6)
    unchanged = [name for name in weights if not name.endswith(("running_mean", "running_var"))]
    assert all(torch.equal(found[name], weights[name]) for name in unchanged)
    # The score that is published is that of the model that is published.
    after = run(revalidate, after, mean=None, collect=("scores",))
    network = network_of(algorithm.network, found, torch.device("cpu"))
    scores = [evaluate(network, data.val, 2, 6) for data in sites.values()]
    expected = sum(score.total for score in scores) / sum(score.patients for score in scores)
    (draft,) = algorithm.publication(after).models
    assert draft.metrics["val_dice"] == pytest.approx(expected)
    assert all(torch.equal(draft.weights[name], found[name]) for name in found)


def test_without_statistics_from_any_site_the_running_ones_stay():
    algorithm, server = start(FedAvgConfig(width=2, rounds=1))
    after = server_step(algorithm, context("estimate", 0), server, RoundResult({}, {}, {"A": 1.0}, {}))
    before = part(server.tensors, "train/w_g")
    assert all(torch.equal(algorithm.train.slot.read(after).selected[name], before[name]) for name in before)


def test_the_learning_rate_falls_by_a_cosine_over_the_rounds():
    algorithm, _ = start(FedAvgConfig(rounds=9, learning_rate=0.2, final_rate=0.1))
    rates = [algorithm.schedule(round_).learning_rate for round_ in range(9)]
    # Constant for four rounds, then 0.02 + 0.18 (1 + cos(pi t / 4)) / 2, by hand
    cosine = [0.2, 0.02 + 0.18 * 0.853553, 0.11, 0.02 + 0.18 * 0.146447, 0.02]
    assert rates == pytest.approx([0.2] * 4 + cosine, abs=1e-6)
    assert start(FedAvgConfig(rounds=1))[0].schedule(0).learning_rate == 1e-3


def test_the_paper_s_recipe_fills_in_what_is_not_given():
    paper = FedAvgConfig(recipe="paper", final_rate=0.5)
    assert (paper.least_steps, paper.intensity, paper.final_rate) == (0, 0.0, 0.5)
    assert FedAvgConfig(recipe="paper").final_rate == 1.0
    assert FedAvgConfig().least_steps > 0


def test_a_small_site_takes_at_least_so_many_steps():
    """Six slices in batches of four are two batches an epoch: five steps are two epochs and a batch."""
    seen = []
    network = build("unet", in_channels=1, classes=2, width=2)
    network.register_forward_hook(lambda _network, inputs, _output: seen.append(len(inputs[0])))
    schedule = Schedule(epochs=1, batch_size=4, least_steps=5, optimiser="sgd")
    train_locally(network, SITES["A"].train, schedule, torch.Generator().manual_seed(0))
    assert seen == [4, 2, 4, 2, 4]


def test_sgd_with_momentum_and_a_falling_rate_is_the_plain_loop():
    """v <- 0.9 v + g, w <- w - rate v, with rate = 0.05 (1 + cos(pi i / 4))."""
    network = build("unet", in_channels=1, classes=2, width=2)
    expected = {name: p.detach().clone() for name, p in network.named_parameters()}
    copy = build("unet", in_channels=1, classes=2, width=2)
    copy.load_state_dict(network.state_dict())
    schedule = Schedule(epochs=2, batch_size=4, learning_rate=0.1, augment=False, optimiser="sgd", falls=True)
    train_locally(network, SITES["A"].train, schedule, torch.Generator().manual_seed(0))
    draw, velocity = torch.Generator().manual_seed(0), dict.fromkeys(expected, 0.0)
    copy.train()
    step = 0
    for _ in range(2):
        for images, targets in batches(SITES["A"].train, 4, draw, augment=False):
            copy.zero_grad()
            soft_dice_loss(copy(images), targets).backward()
            for name, parameter in copy.named_parameters():
                velocity[name] = 0.9 * velocity[name] + parameter.grad
                parameter.data -= 0.05 * (1 + math.cos(math.pi * step / 4)) * velocity[name]
            step += 1
    for name, parameter in copy.named_parameters():
        torch.testing.assert_close(network.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
        assert not torch.equal(parameter, expected[name])


def test_the_learning_rate_decays_by_round():
    algorithm, _ = start(CONFIG.model_copy(update={"learning_rate": 0.1, "learning_rate_decay": 0.5}))
    assert [algorithm.schedule(round_).learning_rate for round_ in range(3)] == [0.1, 0.05, 0.025]


def test_fixed_steps_run_over_epochs():
    """Seven batches of a site with two per epoch: batch norm counts them."""
    algorithm, server = start()
    network = network_of(algorithm.network, part(server.tensors, "train/w_g"), torch.device("cpu"))
    train_locally(network, SITES["A"].train, Schedule(steps=7, batch_size=4), torch.Generator())
    counters = {t.item() for name, t in state_of(network).items() if name.endswith("num_batches_tracked")}
    assert counters == {7}


def test_bfloat16_is_for_the_products_only():
    """Weights and their gradients stay float32; the step is about the same, and not quite."""
    algorithm, server = start()
    weights = {}
    for precision in get_args(Precision):
        network = network_of(algorithm.network, part(server.tensors, "train/w_g"), torch.device("cpu"))
        schedule = Schedule(steps=1, batch_size=4, precision=precision)
        loss = train_locally(network, SITES["A"].train, schedule, torch.Generator().manual_seed(1))
        weights[precision] = state_of(network), loss
    (single, loss), (half, near) = weights["float32"], weights["bfloat16"]
    assert near == pytest.approx(loss, rel=0.02)
    assert near != loss
    assert {tensor.dtype for tensor in half.values()} == {tensor.dtype for tensor in single.values()}


def test_one_image_and_empty_masks_train_to_finite_weights():
    algorithm, server = start()
    received = {"weights": part(server.tensors, "train/w_g")}
    for data in (site_data("one", 1, 1, 3), site_data("empty", 4, 2, 4, empty=True)):
        result = client_step(algorithm, context("train", 0, site=data.site), received, EMPTY, data)
        assert all(torch.isfinite(tensor).all() for tensor in result.uploads["weights"].values())
    assert result.weight == 4


def test_dice_of_a_patient_is_over_all_its_slices():
    """A network that says 'disc' everywhere: Dice = 2 * truth / (truth + everything), patient by patient."""
    algorithm, server = start()
    state = part(server.tensors, "train/w_g")
    state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    state["conv.bias"] = torch.tensor([0.0, 1.0])
    network = network_of(algorithm.network, state, torch.device("cpu"))
    data = slices(5, 7)
    score = evaluate(network, data, 2, batch_size=2)
    sizes = {
        patient: data.targets[np.array(data.patients) == patient].astype(int)
        for patient in ("p0", "p1", "p2")
    }
    expected = [2 * truth.sum() / (truth.sum() + truth.size) for truth in sizes.values()]
    assert score.patients == 3
    assert score.mean == pytest.approx(np.mean(expected))


def test_an_empty_patient_that_is_left_empty_has_no_dice():
    algorithm, server = start()
    state = {name: torch.zeros_like(tensor) for name, tensor in part(server.tensors, "train/w_g").items()}
    state["conv.bias"] = torch.tensor([1.0, 0.0])
    network = network_of(algorithm.network, state, torch.device("cpu"))
    score = evaluate(network, slices(4, 1, empty=True), 2)
    assert score.patients == 0
    assert np.isnan(score.mean)
