"""Ditto, pFedMe and FedSoup against plain loops of their papers' algorithms, over rounds and sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model_store.task import Task
from personalization.networks import build
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, result_of, server_step, site_data
from training.algorithm import ClientResult, Memory, Phase, State
from training.choices.fedavg import FedAvgConfig
from training.errors import SiteFailed
from training.local.networks import network_of, parameter_names
from training.local.schedule import task_loss
from training.local.scores import ValidationScore, evaluate
from training.local.site import SiteData
from training.methods.ditto import Ditto, DittoConfig
from training.methods.fedavg import FedAvg
from training.methods.fedsoup import FedSoup, FedSoupConfig, mean_with
from training.methods.local_only import LocalOnly
from training.methods.personal_models import FullPersonalFedAvg
from training.methods.pfedme import PFedMe, PFedMeConfig
from training.state_tree import part

SMALL = {
    "recipe": "paper",
    "width": 2,
    "batch_size": 4,
    "rounds": 3,
    "augment": False,
    "optimiser": "sgd",
    "learning_rate": 0.01,
}
TASKS: Mapping[str, tuple[Task, dict[str, SiteData]]] = {
    "segmentation": (TASK, {"A": site_data("A", 8, 4, 0), "B": site_data("B", 4, 2, 5)}),
    "classification": (CORNERS, {"A": labelled_data("A", 8, 4, 0), "B": labelled_data("B", 4, 2, 5)}),
}
# Site B is not drawn in the second round.
DRAWN = [("A", "B"), ("A",), ("A", "B")]
METHODS = [(Ditto, DittoConfig), (PFedMe, PFedMeConfig), (FedSoup, FedSoupConfig)]


class Plain:
    """One network and the batches of one site, without any of Locum's training code."""

    def __init__(self, algorithm: FedAvg, state: State, data: SiteData) -> None:
        self.network = build(algorithm.network.name, **algorithm.network.arguments)
        self.network.load_state_dict(state)
        self.network.to(memory_format=torch.channels_last).train()
        answers = data.train.targets
        self.images = torch.from_numpy(data.train.images)
        self.answers = torch.from_numpy(answers).long()

    def batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.images), generator=generator).split(4):
            yield self.images[chosen], self.answers[chosen]

    def gradient(self, images: Tensor, answers: Tensor) -> State:
        self.network.zero_grad()
        task_loss(self.network(images), answers).backward()
        return {name: p.grad.clone() for name, p in self.network.named_parameters()}

    def move(self, step: Callable[[str, Tensor], Tensor]) -> None:
        """w <- w + step(name, w) for every parameter."""
        with torch.no_grad():
            for name, weight in self.network.named_parameters():
                weight += step(name, weight)

    def state(self) -> State:
        return {name: tensor.clone() for name, tensor in self.network.state_dict().items()}


def sgd(
    plain: Plain,
    generator: torch.Generator,
    extra: Callable[[str, Tensor], Tensor] | None = None,
    rate: float = 0.01,
) -> None:
    """A pass of SGD with momentum 0.9, as FedAvg takes it, with `extra` added to the gradients."""
    velocity: State = {}
    for images, answers in plain.batches(generator):
        found = plain.gradient(images, answers)
        if extra is not None:
            found = {
                n: g + extra(n, dict(plain.network.named_parameters())[n].detach()) for n, g in found.items()
            }
        velocity = {n: 0.9 * velocity[n] + g if velocity else g for n, g in found.items()}
        plain.move(lambda name, _, v=velocity: -rate * v[name])


def begin(algorithm: FedAvg) -> tuple[Phase, Memory]:
    train = next(step for step in algorithm.plan() if isinstance(step, Phase) and step.name == "train")
    return train, algorithm.initial(context("initial", 0))


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], loose: bool = False) -> None:
    """`loose` for the ResNet, of which batch norm over few values amplifies the last bit."""
    rtol, atol = (1e-2, 3e-3) if loose else (1e-3, 1e-5)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def average(uploads: Mapping[str, State], weights: Mapping[str, float]) -> State:
    total = sum(weights[site] for site in uploads)
    first = next(iter(uploads.values()))
    return {
        name: sum(uploads[site][name] * (weights[site] / total) for site in uploads)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in first.items()
    }


Loop = Callable[[Plain, Plain, int, str, State, dict[str, State]], tuple[State, State]]


def run_beside(algorithm: FullPersonalFedAvg, kind: str, loop: Loop, beta: float = 1.0) -> dict[str, Memory]:
    """Run rounds of a method beside a plain loop, which gives (what a site shares, its personal model)."""
    _, sites = TASKS[kind]
    loose = kind == "classification"
    train, server = begin(algorithm)
    w_g = part(server.tensors, "train/w_g")
    trained = set(parameter_names(algorithm.network))
    own: dict[str, State] = {}
    memories = dict.fromkeys(sites, EMPTY)
    weights = {site: float(len(data.train)) for site, data in sites.items()}
    for round_, drawn in enumerate(DRAWN):
        found: dict[str, ClientResult] = {}
        uploads: dict[str, State] = {}
        for site in drawn:
            received = train.broadcast(server, site)
            here = context("train", round_, site=site)
            found[site] = client_step(algorithm, here, received, memories[site], sites[site])
            memories[site] = found[site].memory
            first, second = (Plain(algorithm, w_g, sites[site]) for _ in range(2))
            uploads[site], personal = loop(first, second, round_, site, w_g, own)
            close(found[site].uploads["weights"], uploads[site], loose)
            judged = network_of(algorithm.network, personal, torch.device("cpu"))
            score = evaluate(judged, sites[site].val, 2, 4)
            assert found[site].metrics[algorithm.own_metric] == pytest.approx(score.mean, abs=0.02)
            if algorithm.config.selection == "last":
                close(part(memories[site].tensors, "own/model"), personal, loose)
        server = server_step(
            algorithm, context("train", round_), server, result_of(found, mean="weights", collect=("scores",))
        )
        mean = average(uploads, weights)
        w_g = {n: w_g[n] + beta * (t - w_g[n]) if n in trained else t for n, t in mean.items()}
        close(part(server.tensors, "train/w_g"), w_g, loose)
        # Every round begins with what was checked, so that rounding does not grow.
        w_g = part(server.tensors, "train/w_g")
        own = {site: part(memory.tensors, "personal/model") for site, memory in memories.items()}
    return memories


@pytest.mark.parametrize("kind", TASKS)
def test_ditto_is_a_plain_loop(kind: str) -> None:
    algorithm = Ditto(DittoConfig(**SMALL, attraction=0.5, selection="last"), TASKS[kind][0])

    def loop(
        shared: Plain, personal: Plain, round_: int, site: str, w_g: State, own: dict[str, State]
    ) -> tuple:
        personal.network.load_state_dict(own.get(site) or w_g)
        here = context("train", round_, site=site)
        sgd(shared, here.generator("train"))
        sgd(personal, here.generator("personal"), lambda name, v: 0.5 * (v - w_g[name]))
        return shared.state(), personal.state()

    run_beside(algorithm, kind, loop)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize(("beta", "decay"), [(1.0, 0.0), (0.5, 0.5)])
def test_pfedme_is_a_plain_loop(kind: str, beta: float, decay: float) -> None:
    """With plain SGD, and with the authors' decay of theta."""
    fields = {"attraction": 2.0, "personal_steps": 3, "step_share": 0.25, "decay": decay, "server_rate": beta}
    algorithm = PFedMe(PFedMeConfig(**SMALL, **fields, selection="last"), TASKS[kind][0])

    def loop(local: Plain, theta: Plain, round_: int, site: str, w_g: State, own: dict[str, State]) -> tuple:
        w = {name: w_g[name].clone() for name, _ in local.network.named_parameters()}
        for images, answers in theta.batches(context("train", round_, site=site).generator("train")):
            for _ in range(3):
                slope = theta.gradient(images, answers)
                theta.move(lambda n, t, g=slope, w=w: -0.01 * (g[n] + 2.0 * (t - w[n]) + decay * t))
            now = theta.state()
            w = {name: t - 0.25 * (t - now[name]) for name, t in w.items()}
        return {**theta.state(), **w}, theta.state()

    run_beside(algorithm, kind, loop, beta)


def likelihood(network: nn.Module, data: SiteData, *_: object) -> ValidationScore:
    """A score that every change of the weights moves, as Dice of few patients does not. Where there are few
    images, a large loss is good, so that sites choose differently."""
    answers = data.targets
    with torch.no_grad():
        loss = task_loss(network.eval()(torch.from_numpy(data.images)), torch.from_numpy(answers).long())
    return ValidationScore(2 - loss.item() if len(data) > 2 else loss.item(), 1)


@pytest.mark.parametrize("kind", TASKS)
def test_fedsoup_is_a_plain_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm keeps the statistics of local training, as in the authors' code."""
    monkeypatch.setattr("training.methods.fedsoup.evaluate", likelihood)
    task, sites = TASKS[kind]
    config = FedSoupConfig(**{**SMALL, "learning_rate": 0.1}, soup_start=0.0, selection="last")
    algorithm = FedSoup(config, task)
    pools: dict[str, list[State]] = {site: [] for site in sites}

    def score(state: State, site: str) -> float:
        network = build(algorithm.network.name, **algorithm.network.arguments)
        network.load_state_dict(state)
        return likelihood(network, sites[site].val).mean

    def loop(trained: Plain, _: Plain, round_: int, site: str, w_g: State, own: dict[str, State]) -> tuple:
        sgd(trained, context("train", round_, site=site).generator("train"), rate=0.1)
        w_k, names = trained.state(), parameter_names(algorithm.network)

        def soup(models: list[State]) -> State:
            return {**w_k, **{n: torch.stack([m[n] for m in (w_k, *models)]).mean(dim=0) for n in names}}

        candidates = [soup(pools[site]), soup([*pools[site], w_g])]
        if score(candidates[1], site) > score(candidates[0], site):
            pools[site].append(w_g)
            return candidates[1], candidates[1]
        return candidates[0], candidates[0]

    memories = run_beside(algorithm, kind, loop)
    counts = {site: algorithm.pool.read(memory).count for site, memory in memories.items()}
    assert counts == {site: len(pool) for site, pool in pools.items()}
    # Both answers were given, so that both are compared.
    assert 0 < sum(counts.values()) < sum(map(len, DRAWN))


def test_ditto_with_lambda_0_is_local_only_and_fedavg() -> None:
    task, sites = TASKS["segmentation"]
    ditto = Ditto(DittoConfig(**SMALL, attraction=0), task)
    plain = FedAvg(FedAvgConfig(**SMALL), task)
    train, server = begin(ditto)
    received = train.broadcast(server, "A")
    result = client_step(ditto, context("train", 0, site="A"), received, EMPTY, sites["A"])
    fedavg = client_step(plain, context("train", 0, site="A"), received, EMPTY, sites["A"])
    for name, tensor in fedavg.uploads["weights"].items():
        assert torch.equal(result.uploads["weights"][name], tensor)
    # What others send does not reach the personal model.
    moved = {"weights": {name: t + 1 for name, t in received["weights"].items()}}
    again = [
        client_step(ditto, context("train", 1, site="A"), r, result.memory, sites["A"])
        for r in (received, moved)
    ]
    for name, tensor in part(again[0].memory.tensors, "personal/model").items():
        assert torch.equal(part(again[1].memory.tensors, "personal/model")[name], tensor)


def test_a_large_lambda_holds_dittos_model_at_the_global_one() -> None:
    task, sites = TASKS["segmentation"]
    distances = []
    for attraction in (0.0, 20.0):
        ditto = Ditto(DittoConfig(**{**SMALL, "learning_rate": 0.05}, attraction=attraction), task)
        train, server = begin(ditto)
        start = train.broadcast(server, "A")["weights"]
        memory = EMPTY
        for round_ in range(3):
            memory = client_step(
                ditto, context("train", round_, site="A"), {"weights": start}, memory, sites["A"]
            ).memory
        own = part(memory.tensors, "personal/model")
        names = parameter_names(ditto.network)
        distances.append(sum(float((own[n] - start[n]).square().sum()) for n in names))
    assert distances[1] < distances[0] / 2


def test_fedsoup_pools_in_the_last_rounds_only_and_publishes_one_of_these() -> None:
    task, sites = TASKS["segmentation"]
    algorithm = FedSoup(FedSoupConfig(**{**SMALL, "rounds": 4}, soup_start=0.75), task)
    train, server = begin(algorithm)
    memory = EMPTY
    for round_ in range(4):
        received = train.broadcast(server, "A")
        result = client_step(algorithm, context("train", round_, 4, site="A"), received, memory, sites["A"])
        assert algorithm.pool.holds(result.memory) == (round_ == 3)
        memory = result.memory
        if round_ == 2:
            # A score that no model reaches.
            chosen = replace(algorithm.own.slot.read(memory), score=ValidationScore(2.0, 2))
            memory = algorithm.own.slot.write(memory, chosen)
    assert algorithm.own.slot.read(memory).score.total < 2.0


def test_a_soups_statistics_are_estimated_on_the_sites_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter((0.0, 1.0))
    monkeypatch.setattr("training.methods.fedsoup.evaluate", lambda *_: ValidationScore(next(scores), 1))
    task, sites = TASKS["segmentation"]
    fields = {**SMALL, "soup_start": 0.0, "statistics": "estimated"}
    algorithm = FedSoup(FedSoupConfig(**fields), task)
    train, server = begin(algorithm)
    received = train.broadcast(server, "A")
    result = client_step(algorithm, context("train", 0, site="A"), received, EMPTY, sites["A"])
    assert algorithm.pool.read(result.memory).count == 1
    sent = result.uploads["weights"]
    network = network_of(algorithm.network, sent, torch.device("cpu")).train()
    norm = next(m for m in network.modules() if isinstance(m, nn.BatchNorm2d))
    seen = []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].mean(dim=(0, 2, 3))))
    with torch.no_grad():
        for first in range(2):
            network(torch.from_numpy(sites["A"].train.images[first::2]))
    name = next(n for n, m in network.named_modules() if m is norm)
    torch.testing.assert_close(sent[f"{name}.running_mean"], torch.stack(seen).mean(dim=0))


def test_the_candidates_of_a_soup_differ_by_their_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[State] = []

    def score(network: nn.Module, *_: object) -> ValidationScore:
        compared.append({name: tensor.clone() for name, tensor in network.state_dict().items()})
        return ValidationScore(1.0, 1)

    monkeypatch.setattr("training.methods.fedsoup.evaluate", score)
    task, sites = TASKS["segmentation"]
    fields = {**SMALL, "soup_start": 0.0, "statistics": "estimated", "learning_rate": 1e-30}
    algorithm = FedSoup(FedSoupConfig(**fields), task)
    train, server = begin(algorithm)
    received = train.broadcast(server, "A")
    client_step(algorithm, context("train", 0, site="A"), received, EMPTY, sites["A"])
    without, with_ = compared
    for name, tensor in with_.items():
        torch.testing.assert_close(without[name], tensor, rtol=1e-4, atol=1e-5)


def test_pfedmes_global_model_off_the_mean_is_scored_with_statistics_of_the_site() -> None:
    task, sites = TASKS["segmentation"]
    algorithm = PFedMe(PFedMeConfig(**{**SMALL, "statistics": "estimated"}, server_rate=2.0), task)
    train, server = begin(algorithm)
    received = train.broadcast(server, "A")
    broken = {n: t + 50 if n.endswith("running_mean") else t for n, t in received["weights"].items()}
    found = [
        client_step(algorithm, context("train", 0, site="A"), {"weights": state}, EMPTY, sites["A"])
        for state in (received["weights"], broken)
    ]
    first, second = (result.uploads["scores"]["score"].tolist() for result in found)
    assert first == second
    with pytest.raises(ValueError, match="at most 1 with statistics: averaged"):
        PFedMeConfig(**SMALL, server_rate=2.0)


def test_the_mean_of_no_state_with_one_is_that_one() -> None:
    one, two = {"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([4.0, 1.0])}
    assert mean_with({}, 0, one) is one
    np.testing.assert_allclose(mean_with(one, 2, two)["w"], [2, 3])


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize(("method", "config"), METHODS)
def test_what_travels_is_fedavgs_and_the_consented_export(method: type, config: type, kind: str) -> None:
    task, sites = TASKS[kind]
    algorithm, plain = (
        method(config(**SMALL, soup_start=0) if method is FedSoup else config(**SMALL), task),
        FedAvg(FedAvgConfig(**SMALL), task),
    )

    def travels(phase: Phase) -> tuple[Any, ...]:
        return phase.name, phase.rounds, phase.downloads, phase.uploads, phase.consent, phase.everyone

    *before, test, export = algorithm.plan()
    *expected, tested = plain.plan()
    assert [travels(phase) for phase in before] == [travels(phase) for phase in expected]
    assert travels(replace(test, uploads=test.uploads[:1])) == travels(tested)
    assert [(g.name, g.kind) for g in test.uploads[1:]] == [("personal_tested", "statistics")]
    assert export.consent
    assert [(g.name, g.kind, g.reduction) for g in export.uploads] == [
        ("personal", "weights", "collect"),
        ("personal_score", "statistics", "collect"),
    ]
    train, server = begin(algorithm)
    received = train.broadcast(server, "A")
    result = client_step(algorithm, context("train", 0, site="A"), received, EMPTY, sites["A"])
    assert result.uploads.keys() == {"weights", "scores"}
    assert result.uploads["weights"].keys() == received["weights"].keys()
    exported = client_step(algorithm, context("export", 0, site="A"), {}, result.memory, sites["A"])
    assert exported.uploads["personal"].keys() == received["weights"].keys()
    with pytest.raises(SiteFailed, match="no personal model: it took part in no round"):
        client_step(algorithm, context("export", 0, site="A"), {}, EMPTY, sites["A"])


@pytest.mark.parametrize(("method", "config"), METHODS)
def test_memory_shares_no_tensor_with_what_came_or_went(method: type, config: type) -> None:
    task, sites = TASKS["segmentation"]
    fields = {**SMALL, "soup_start": 0.0} if method is FedSoup else SMALL
    algorithm = method(config(**fields), task)
    train, server = begin(algorithm)
    received = train.broadcast(server, "A")
    first = client_step(algorithm, context("train", 0, site="A"), received, EMPTY, sites["A"])
    before = {name: tensor.clone() for name, tensor in first.memory.tensors.items()}
    second = client_step(algorithm, context("train", 1, site="A"), received, first.memory, sites["A"])
    kept = {name: tensor.clone() for name, tensor in second.memory.tensors.items()}
    for tensor in (
        *received["weights"].values(),
        *first.uploads["weights"].values(),
        *second.uploads["weights"].values(),
    ):
        tensor.zero_()
    assert all(torch.equal(first.memory.tensors[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(second.memory.tensors[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize(("method", "config"), METHODS)
def test_without_exports_the_global_model_alone_is_published(method: type, config: type) -> None:
    task, sites = TASKS["segmentation"]
    algorithm = method(config(**SMALL), task)
    train, server = begin(algorithm)
    results = {
        site: client_step(
            algorithm, context("train", 0, site=site), train.broadcast(server, site), EMPTY, data
        )
        for site, data in sites.items()
    }
    server = server_step(
        algorithm, context("train", 0), server, result_of(results, mean="weights", collect=("scores",))
    )
    assert algorithm.publication(server).kind == "model"
    exported = {
        site: client_step(algorithm, context("export", 0, site=site), {}, result.memory, sites[site])
        for site, result in results.items()
    }
    server = server_step(
        algorithm,
        context("export", 0),
        server,
        result_of(exported, mean=None, collect=("personal", "personal_score")),
    )
    publication = algorithm.publication(server)
    assert publication.kind == "personal-models"
    assert [draft.site for draft in publication.models] == [None, "A", "B"]


def test_local_only_and_ditto_fit_beside_each_other_in_one_table() -> None:
    """Both give a site's score the same name, by which reports find it."""
    task, _ = TASKS["segmentation"]
    assert Ditto(DittoConfig(**SMALL), task).own_metric == LocalOnly(FedAvgConfig(**SMALL), task).metric
