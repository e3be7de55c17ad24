"""FedBN, FedPer and FedRep: what travels, what stays, which model is published."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from model_store.task import Task
from personalization.networks import build
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, result_of, server_step, site_data
from training.algorithm import ClientResult, Memory, RoundResult, State
from training.choices.fedavg import FedAvgConfig
from training.errors import SiteFailed
from training.local.networks import network_of, state_of
from training.local.schedule import task_loss
from training.local.scores import ValidationScore, evaluate
from training.local.site import SiteData
from training.local.slices import batches
from training.methods.fedavg import FedAvg
from training.methods.fedbn import FedBn
from training.methods.fedper import FedPer
from training.methods.fedrep import FedRep, FedRepConfig
from training.methods.partly_shared import PersonalFedAvg
from training.parts.train import Shared
from training.state_tree import part

SMALL = {"recipe": "paper", "width": 2, "batch_size": 4, "rounds": 3, "learning_rate": 0.01}
CONFIG = FedRepConfig(**SMALL, head_epochs=2)
METHODS = [FedBn, FedPer, FedRep]
TASKS: Mapping[str, tuple[Task, SiteData]] = {
    "segmentation": (TASK, site_data("A", 6, 4, 0)),
    "classification": (CORNERS, labelled_data("A", 6, 4, 0)),
}
DATA = TASKS["segmentation"][1]


def expected_own(method: type[PersonalFedAvg], kind: str) -> set[str]:
    """Names by the network's own structure."""
    spec = FedAvg(CONFIG, TASKS[kind][0]).network
    network = build(spec.name, **spec.arguments)
    if method is FedBn:
        norms = [path for path, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)]
        return {name for name in network.state_dict() if name.rpartition(".")[0] in norms}
    if kind == "classification":
        return {"linear.weight", "linear.bias"}
    return {n for n in network.state_dict() if not n.startswith(("encoder", "bottleneck"))}


def begin(method: type[PersonalFedAvg], config: FedAvgConfig = CONFIG, kind: str = "segmentation"):
    algorithm = method(config, TASKS[kind][0])
    return algorithm, part(algorithm.initial(context("initial", 0)).tensors, "train/w_g")


def train(
    algorithm: PersonalFedAvg, shared: State, memory: Memory, round_: int = 0, data: SiteData = DATA
) -> ClientResult:
    where = context("train", round_, site="A")
    return client_step(algorithm, where, {"weights": shared}, memory, data)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_only_what_is_shared_travels_and_only_the_rest_stays(method: type[PersonalFedAvg], kind: str) -> None:
    algorithm, shared = begin(method, kind=kind)
    own = expected_own(method, kind)
    everything = set(FedAvg(CONFIG, TASKS[kind][0]).initial(context("initial", 0)).tensors)
    everything = {name.removeprefix("train/w_g/") for name in everything}
    assert own
    assert set(shared) == everything - own
    result = train(algorithm, shared, EMPTY, data=TASKS[kind][1])
    assert result.uploads.keys() == {"weights"}
    assert set(result.uploads["weights"]) == everything - own
    assert result.memory.tensors.keys() == {f"stays/tensors/{name}" for name in own}
    declared = {phase.name: {g.name for g in phase.uploads} for phase in algorithm.plan()}
    assert declared == {
        "describe": {"statistics", "fingerprint"},
        "train": {"weights"},
        "validate": set(),
        "test": {"personal_tested"},
        "export": {"personal", "personal_score"},
    }


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_a_site_goes_on_with_its_own_part_and_the_others_average(
    method: type[PersonalFedAvg], kind: str
) -> None:
    algorithm, shared = begin(method, kind=kind)
    data = TASKS[kind][1]
    first = train(algorithm, shared, EMPTY, data=data)
    # Others sent something else.
    average = {name: tensor + 0.125 for name, tensor in first.uploads["weights"].items()}
    joined = {**average, **part(first.memory.tensors, "stays/tensors")}
    where = context("validate", 0, site="A")
    validated = client_step(algorithm, where, {"weights": average}, first.memory, data)
    chosen = part(validated.memory.tensors, "own/model")
    assert chosen.keys() == joined.keys()
    assert all(torch.equal(chosen[name], tensor) for name, tensor in joined.items())
    score = evaluate(network_of(algorithm.network, joined, torch.device("cpu")), data.val, 2, 4)
    metric = "personal_val_dice" if kind == "segmentation" else "personal_val_accuracy"
    assert validated.metrics == pytest.approx(score.metrics(metric), nan_ok=True)
    assert validated.metrics[metric] == pytest.approx(score.mean)
    assert validated.uploads == {}
    # Training goes on from it: what FedAvg makes of the joined weights.
    if method is not FedRep:
        second = train(algorithm, average, first.memory, 1, data)
        plain = FedAvg(CONFIG, TASKS[kind][0])
        fedavg = client_step(plain, context("train", 1, site="A"), {"weights": joined}, EMPTY, data)
        after = {**second.uploads["weights"], **part(second.memory.tensors, "stays/tensors")}
        for name, tensor in fedavg.uploads["weights"].items():
            assert torch.equal(after[name], tensor), name


def test_first_heads_are_drawn_by_each_site_and_first_norms_are_fresh() -> None:
    algorithm, _ = begin(FedPer)
    heads = [algorithm.train.first(context("train", 0, site=site)) for site in "AAB"]
    name = "decoder1.dec1_conv1.weight"
    assert torch.equal(heads[0][name], heads[1][name])
    assert not torch.equal(heads[0][name], heads[2][name])
    fresh, _ = begin(FedBn)
    for name, tensor in fresh.train.first(context("train", 0, site="A")).items():
        one = name.endswith(("weight", "running_var"))
        assert torch.equal(tensor, torch.ones_like(tensor) if one else torch.zeros_like(tensor)), name


def test_fedrep_trains_the_head_alone_and_then_the_body_alone() -> None:
    algorithm, shared = begin(FedRep)
    result = train(algorithm, shared, EMPTY)
    head = algorithm.train.first(context("train", 0, site="A"))
    network = build("unet", **algorithm.network.arguments)
    network.load_state_dict({**shared, **head})
    network.to(memory_format=torch.channels_last).train()
    for purpose, epochs, moves in (("head", 2, True), ("train", 1, False)):
        trained = [p for name, p in network.named_parameters() if (name in head) == moves]
        before = {name: p.detach().clone() for name, p in network.named_parameters()}
        optimiser = torch.optim.Adam(trained, lr=0.01)
        draw = context("train", 0, site="A").generator(purpose)
        for _ in range(epochs):
            for images, targets in batches(DATA.train, 4, draw, True):
                network.zero_grad()
                task_loss(network(images), targets).backward()
                optimiser.step()
        stayed = {name for name, p in network.named_parameters() if torch.equal(before[name], p)}
        assert stayed >= {name for name in before if (name in head) != moves}
    expected = state_of(network)
    for name, tensor in {**result.uploads["weights"], **part(result.memory.tensors, "stays/tensors")}.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def after_rounds(algorithm: PersonalFedAvg, dices: list[float | None]) -> Memory:
    """A memory after validations with these Dice; the model of round t is all t + 1."""
    memory = EMPTY
    for round_, dice in enumerate(dices):
        score = ValidationScore() if dice is None else ValidationScore(2 * dice, 2)
        memory = algorithm.own.choose(memory, {"w": torch.full((2,), round_ + 1.0)}, score, round_)
    return memory


@pytest.mark.parametrize(
    ("selection", "dices", "chosen"),
    [
        ("best", [0.2, 0.6, 0.5], 2),
        ("best", [0.6, 0.6, 0.5], 1),  # the earlier of equals
        ("best", [None, None, None], 3),  # nothing to choose by: the last
        ("best", [None, 0.1, None], 2),
        ("last", [0.2, 0.6, 0.5], 3),
    ],
)
def test_the_published_model_is_the_best_of_its_site(selection: str, dices: list, chosen: int) -> None:
    algorithm, _ = begin(FedPer, CONFIG.model_copy(update={"selection": selection}))
    memory = after_rounds(algorithm, dices)
    result = client_step(algorithm, context("export", 0, site="A"), {}, memory, DATA)
    assert result.uploads["personal"]["w"].tolist() == [chosen, chosen]
    dice = dices[chosen - 1]
    score = (0.0, 0.0) if dice is None else (pytest.approx(2 * dice), 2.0)
    assert tuple(result.uploads["personal_score"]["score"].tolist()) == score


def test_a_model_with_an_untrained_part_is_not_published() -> None:
    algorithm, shared = begin(FedPer)
    where = context("validate", 0, site="A")
    idle = client_step(algorithm, where, {"weights": shared}, EMPTY, DATA).memory or EMPTY
    assert idle == EMPTY
    first = train(algorithm, shared, EMPTY)
    assert not algorithm.own.slot.holds(first.memory)
    with pytest.raises(SiteFailed, match="no personal model: it took part in no round"):
        client_step(algorithm, context("export", 0, site="A"), {}, idle, DATA)


@pytest.mark.parametrize("method", METHODS)
def test_memory_shares_no_tensor_with_what_came_or_went(method: type[PersonalFedAvg]) -> None:
    algorithm, shared = begin(method)
    memory = train(algorithm, shared, EMPTY).memory
    before = {name: tensor.clone() for name, tensor in memory.tensors.items()}
    result = train(algorithm, shared, memory, 1)
    kept = {name: tensor.clone() for name, tensor in result.memory.tensors.items()}
    for tensor in (*shared.values(), *result.uploads["weights"].values()):
        tensor.zero_()
    assert all(torch.equal(result.memory.tensors[name], tensor) for name, tensor in kept.items())
    assert all(torch.equal(memory.tensors[name], tensor) for name, tensor in before.items())


def test_the_server_averages_what_is_shared_and_publishes_what_was_exported() -> None:
    algorithm, shared = begin(FedPer)
    sites = {"A": DATA, "B": site_data("B", 2, 2, 10)}
    results = {
        site: client_step(algorithm, context("train", 0, site=site), {"weights": shared}, EMPTY, data)
        for site, data in sites.items()
    }
    server = algorithm.train.slot.write(Memory(), Shared(shared))
    server = server_step(
        algorithm, context("train", 0), server, result_of(results, mean="weights", collect=())
    )
    after = part(server.tensors, "train/w_g")
    sent = {site: result.uploads["weights"] for site, result in results.items()}
    for name, tensor in after.items():
        if tensor.is_floating_point():
            expected = 0.75 * sent["A"][name].double() + 0.25 * sent["B"][name].double()
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)
    assert algorithm.publication(server).models == ()
    validated = client_step(
        algorithm, context("validate", 0, site="A"), {"weights": after}, results["A"].memory, DATA
    )
    exported = client_step(algorithm, context("export", 0, site="A"), {}, validated.memory, DATA)
    groups = {name: {"A": state} for name, state in exported.uploads.items()}
    server = server_step(algorithm, context("export", 0), server, RoundResult({}, groups, {"A": 1.0}, {}))
    publication = algorithm.publication(server)
    assert publication.kind == "personal-models"
    (draft,) = publication.models
    assert (draft.role, draft.site) == ("inside", "A")
    measured = {name.removeprefix("personal_"): value for name, value in validated.metrics.items()}
    assert draft.metrics == pytest.approx(measured)
    assert "val_dice" in measured
    assert all(torch.equal(draft.weights[name], tensor) for name, tensor in after.items())
