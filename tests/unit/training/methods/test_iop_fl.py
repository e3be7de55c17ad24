"""IOP-FL's steps alone, without an engine."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.training.sites import EMPTY, TASK, context, result_of, site_data
from training.algorithm import RoundResult
from training.errors import SiteFailed
from training.methods.common.state_tree import join, part
from training.methods.fedavg import FedAvg
from training.methods.iop_fl import IopFl, IopFlConfig

CONFIG = IopFlConfig(width=2, batch_size=4, rounds=3, tau=0.75)
DATA = site_data("A", 5, 4, 0)


def start(config=CONFIG):
    algorithm = IopFl(config, TASK)
    return algorithm, algorithm.initial(context("initial", 0))


def train(algorithm, state, memory, round_):
    return algorithm.client_step(context("train", round_, site="A"), {"weights": state}, memory, DATA)


def test_the_personal_model_is_the_moving_average_of_the_local_ones():
    """Three rounds, unrolled by hand: P3 = (1-tau)^3 w_g + tau sum_i (1-tau)^(2-i) w_i."""
    algorithm, server = start()
    first = part(server.tensors, "global")
    state, memory, local = first, EMPTY, []
    for round_ in range(3):
        result = train(algorithm, state, memory, round_)
        state, memory = result.uploads["weights"], result.memory
        local.append(state)
    personal = part(memory.tensors, "personal")
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
    received = {"weights": part(server.tensors, "global")}
    plain = FedAvg(CONFIG, TASK).client_step(context("train", 0, site="A"), received, EMPTY, DATA)
    personal = algorithm.client_step(context("train", 0, site="A"), received, EMPTY, DATA)
    assert plain.uploads.keys() == personal.uploads.keys()
    for name, tensor in plain.uploads["weights"].items():
        assert torch.equal(tensor, personal.uploads["weights"][name])


def test_memory_is_not_shared_with_what_is_uploaded_or_received():
    algorithm, server = start(CONFIG.model_copy(update={"tau": 1.0}))
    received = part(server.tensors, "global")
    result = train(algorithm, received, EMPTY, 0)
    kept = {name: tensor.clone() for name, tensor in result.memory.tensors.items()}
    for tensor in (*received.values(), *result.uploads["weights"].values()):
        tensor.zero_()
    assert all(torch.equal(result.memory.tensors[name], tensor) for name, tensor in kept.items())


def remember(algorithm, dices):
    """The memory after rounds with these Dice of the personal models; P of round t is all t + 1."""
    from training.methods.common.local_training import ValidationScore

    memory = EMPTY
    for round_, dice in enumerate(dices):
        state = {"w": torch.full((2,), round_ + 1.0)}
        score = ValidationScore() if dice is None else ValidationScore(2 * dice, 2)
        memory = algorithm._remember(round_ + 1, memory, state, score)
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
def test_the_exported_model_is_the_best_of_its_site(selection, dices, chosen):
    algorithm, _ = start(CONFIG.model_copy(update={"selection": selection}))
    result = algorithm.client_step(context("export", 0, site="A"), {}, remember(algorithm, dices), DATA)
    assert result.uploads["personal"]["w"].tolist() == [chosen, chosen]
    total, patients = result.uploads["personal_score"]["score"].tolist()
    dice = dices[chosen - 1]
    assert (total, patients) == ((0.0, 0.0) if dice is None else (pytest.approx(2 * dice), 2.0))


def test_a_site_that_was_in_no_round_has_the_global_model():
    algorithm, server = start()
    state = part(server.tensors, "global")
    result = algorithm.client_step(context("validate", 0, site="A"), {"weights": state}, EMPTY, DATA)
    exported = algorithm.client_step(context("export", 0, site="A"), {}, result.memory, DATA)
    assert all(torch.equal(exported.uploads["personal"][name], tensor) for name, tensor in state.items())


def test_own_statistics_are_those_of_the_sites_slices_and_leave_the_average_alone():
    config = CONFIG.model_copy(update={"personal_statistics": "own", "selection": "last"})
    algorithm, server = start(config)
    plain, _ = start(CONFIG.model_copy(update={"selection": "last"}))
    state = part(server.tensors, "global")
    memories = [train(each, state, EMPTY, 0).memory for each in (algorithm, plain)]
    personal, averaged = (part(memory.tensors, "personal") for memory in memories)
    assert all(torch.equal(personal[name], tensor) for name, tensor in averaged.items())
    exported = algorithm.client_step(context("export", 0, site="A"), {}, memories[0], DATA).uploads[
        "personal"
    ]
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
        algorithm.client_step(context("export", 0, site="A"), {}, EMPTY, DATA)


def trained(algorithm, server):
    results = {"A": train(algorithm, part(server.tensors, "global"), EMPTY, 0)}
    result = result_of(results, mean="weights", collect=("scores",))
    return results["A"].memory, algorithm.server_step(context("train", 0), server, result)


def test_what_is_published_with_and_without_consent():
    algorithm, server = start()
    memory, server = trained(algorithm, server)
    alone = algorithm.publication(server)
    assert alone.kind == "model"
    assert [draft.role for draft in alone.models] == ["global"]
    exported = algorithm.client_step(context("export", 0, site="A"), {}, memory, DATA)
    groups = {name: {"A": state} for name, state in exported.uploads.items()}
    server = algorithm.server_step(context("export", 0), server, RoundResult({}, groups, {"A": 1.0}, {}))
    space = algorithm.publication(server)
    assert space.kind == "routing-space"
    assert [(draft.role, draft.site) for draft in space.models] == [("global", None), ("inside", "A")]
    inside = space.models[1]
    assert all(torch.equal(inside.weights[n], t) for n, t in part(memory.tensors, "personal").items())
    assert inside.metrics["val_dice"] == pytest.approx(exported.metrics["personal_val_dice"])


def test_trees_are_taken_apart_as_they_were_joined():
    states = {"global": {"a.b": torch.ones(1)}, "inside/CS": {"a.b": torch.zeros(1)}}
    joined = join(states)
    assert set(joined) == {"global/a.b", "inside/CS/a.b"}
    assert part(joined, "inside/CS")["a.b"] is states["inside/CS"]["a.b"]
    assert part(joined, "inside/C") == {}
