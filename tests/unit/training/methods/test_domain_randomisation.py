"""Domain randomisation in training: batches of one kind in every method, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model_store.store import Store
from model_store.task import Task
from personalization.domain_randomisation import randomise
from personalization.networks.capabilities import moving_norms
from tests.helpers.training.backbones import publish, unet, vit
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.sites import (
    EMPTY,
    TASK,
    client_step,
    context,
    phase_of,
    result_of,
    server_stage,
    server_step,
    site_data,
)
from training.algorithm import Algorithm, RoundResult
from training.choices.fedavg import FedAvgConfig
from training.data.federation import load_federation
from training.engine.history import Silent
from training.local.loop import scheduled_batches, train_locally
from training.local.networks import new_network, state_of
from training.local.schedule import Schedule
from training.local.scores import ValidationScore
from training.local.site import SiteData
from training.methods.fedavg import FedAvg
from training.methods.fedbn import FedBn
from training.methods.iop_fl import IopFlConfig
from training.methods.registry import method, methods
from training.parts.train import SCORES
from training.phantom import write_federation
from training.run import Run, execute

ROOT = Path(__file__).parents[4]
SITES: dict[str, tuple[Task, SiteData]] = {
    "segmentation": (TASK, site_data("A", 8, 4, 0)),
    "classification": (CORNERS, labelled_data("A", 8, 4, 0)),
}
# Enough batches that both kinds come.
SMALL: dict[str, Any] = {
    "rounds": 2,
    "width": 2,
    "batch_size": 4,
    "local_epochs": 5,
    "augment": False,
    "local_steps": None,
    "heads": 4,
    "probes": 8,
    "synthesis_batch": 6,
    "entries": 4,
    "top": 2,
}
ONE_ROUND = ("fedbicross", "dense", "dafl", "fedisca", "co-boosting")
CASES = [(name, kind) for name in methods() for kind in method(name).kinds]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("store")
    publish(root, TASK, unet(TASK), "discs")
    publish(root, CORNERS, vit(CORNERS), "corners")
    return Store(root)


def algorithm_of(name: str, task: Task, store: Store, **fields: Any) -> Algorithm:
    chosen = method(name)
    given = {**SMALL, **fields, "backbone": task.name}
    given |= {"rounds": 1} if name in ONE_ROUND else {}
    given |= {"local_steps": 16} if name in ("fedoap", "feddp") else {}
    config = chosen.config(**{n: v for n, v in given.items() if n in chosen.config.model_fields})
    return chosen.build(config.prepared(store, task, "trained"), task)


@contextmanager
def recorded(task: Task) -> Iterator[list[torch.Tensor]]:
    """Record every image batch that enters a module while gradients are on."""
    found: list[torch.Tensor] = []
    shape = (task.in_channels, *task.size)

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        first = inputs[0] if inputs else None
        if isinstance(first, torch.Tensor) and torch.is_grad_enabled() and first.shape[1:] == shape:
            found.append(first.detach().clone())

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def kinds_of(batches: list[torch.Tensor], data: SiteData) -> list[set[bool]]:
    """For each batch, whether its images are the site's as they are: {True}, {False} or both."""
    known = {image.tobytes() for image in data.train.images}
    return [{image.contiguous().numpy().tobytes() in known for image in batch} for batch in batches]


def train(algorithm: Algorithm, data: SiteData, round_: int) -> None:
    """One round of local training, or of the server's on the sites' images."""
    server = algorithm.initial(context("initial", 0))
    names = [step.name for step in algorithm.plan()]
    if "pool" in names:
        sent = {"A": client_step(algorithm, context("pool", 0, 1, "A"), {}, EMPTY, data)}
        pooled = result_of(sent, mean=None, collect=("images",))
        server = server_step(algorithm, context("pool", 0), server, pooled)
        server_stage(algorithm, context("train", round_), server)
        return
    name = "local" if "local" in names else "train"
    phase = phase_of(algorithm, name)
    received = phase.broadcast(server, "A") if phase.broadcast else {}
    client_step(algorithm, context(name, round_, phase.rounds, "A"), received, EMPTY, data)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_method_trains_with_batches_of_one_kind(name: str, kind: str, store: Store) -> None:
    task, data = SITES[kind]
    with recorded(task) as batches:
        train(algorithm_of(name, task, store, domain_randomisation="throughout"), data, 0)
    kinds = kinds_of(batches, data)
    assert {True} in kinds
    assert {False} in kinds
    assert {True, False} not in kinds


@pytest.mark.parametrize("name", [name for name in methods() if name not in ONE_ROUND])
def test_late_leaves_the_first_half_of_the_rounds_as_they_were(name: str, store: Store) -> None:
    kind = method(name).kinds[0]
    task, data = SITES[kind]
    late = algorithm_of(name, task, store, domain_randomisation="late", intensity=0.0)
    seen = []
    for round_ in (0, 1):
        with recorded(task) as batches:
            train(late, data, round_)
        seen.append(kinds_of(batches, data))
    assert all(kinds == {True} for kinds in seen[0])
    assert {False} in seen[1]


def test_the_same_recording_finds_mixed_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(images: torch.Tensor, _: torch.Generator) -> tuple[torch.Tensor, bool]:
        return torch.cat([randomise(images[:1], torch.Generator()), images[1:]]), True

    monkeypatch.setattr("training.local.data.randomise_half", mixed)
    data = SITES["segmentation"][1]
    with recorded(TASK) as batches:
        train(algorithm_of("fedavg", TASK, store, domain_randomisation="throughout"), data, 0)
    assert {True, False} in kinds_of(batches, data)


# The first half of `late` shows it of the others.
@pytest.mark.parametrize(
    ("name", "kind"), [case for case in CASES if case[0] in ONE_ROUND or case[1] != method(case[0]).kinds[0]]
)
def test_none_draws_nothing(name: str, kind: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a batch was randomised")

    for module in ("local.data", "local.classifier", "methods.fedins.client", "methods.fedoap.stages"):
        monkeypatch.setattr(f"training.{module}.randomise_half", never)
    task, data = SITES[kind]
    train(algorithm_of(name, task, store, domain_randomisation="none"), data, 1)


def test_running_statistics_are_of_images_as_they_are() -> None:
    """A plain loop: the running mean of the first batch norm moves with the unchanged batches alone."""
    data = SITES["segmentation"][1].train
    schedule = Schedule(
        epochs=6, batch_size=4, learning_rate=0.0, augment=False, randomise=True, optimiser="sgd"
    )
    network = new_network(unet(TASK), torch.Generator().manual_seed(0))
    first = next(iter(moving_norms(network).values()))
    expected, convolution = (
        first.running_mean.clone(),
        next(module for module in network.modules() if isinstance(module, nn.Conv2d)),
    )
    kinds = set()
    for batch in scheduled_batches(data, schedule, torch.Generator().manual_seed(3)):
        kinds.add(batch.randomised)
        if not batch.randomised:
            with torch.no_grad():
                expected = 0.9 * expected + 0.1 * convolution(batch.images).mean((0, 2, 3))
    assert kinds == {True, False}
    train_locally(network, data, schedule, torch.Generator().manual_seed(3))
    torch.testing.assert_close(first.running_mean, expected, rtol=1e-4, atol=1e-5)
    assert first.momentum == 0.1


def test_training_repeats_with_its_generator_and_not_with_another() -> None:
    states = []
    for seed in (1, 1, 2):
        network = new_network(unet(TASK), torch.Generator().manual_seed(0))
        schedule = Schedule(epochs=2, batch_size=4, randomise=True)
        train_locally(network, SITES["segmentation"][1].train, schedule, torch.Generator().manual_seed(seed))
        states.append(torch.cat([tensor.double().flatten() for tensor in state_of(network).values()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def scored_rounds(algorithm: FedAvg, dices: list[float]) -> int:
    """The round that is selected; the model before the first has the first Dice."""
    server = algorithm.initial(context("initial", 0))
    for done, dice in enumerate(dices):
        scores = {"A": ValidationScore(dice, 1).state()}
        weights = phase_of(algorithm, "train").broadcast(server, "A")["weights"]
        result = RoundResult({"weights": weights}, {SCORES.name: scores}, {"A": 1.0}, {})
        phase = phase_of(algorithm, "train" if done < len(dices) - 1 else "validate")
        server = phase.server_step(context(phase.name, done), server, result)
    return algorithm.train.slot.read(server).noted.round


@pytest.mark.parametrize(
    ("when", "dices", "selected"),
    [
        ("none", [0.1, 0.9, 0.8, 0.5, 0.6], 1),
        ("throughout", [0.1, 0.9, 0.8, 0.5, 0.6], 1),
        ("late", [0.1, 0.9, 0.8, 0.5, 0.6], 4),
        ("late", [0.1, 0.9, 0.8, 0.7, 0.6], 3),
    ],
)
def test_a_model_from_before_the_randomised_rounds_is_not_selected(
    when: Any, dices: list[float], selected: int
) -> None:
    config = FedAvgConfig(rounds=4, width=2, domain_randomisation=when)
    assert scored_rounds(FedAvg(config, TASK), dices) == selected


@pytest.mark.parametrize(("when", "chosen"), [("none", 2.0), ("late", 5.0)])
def test_a_personal_model_from_before_the_randomised_rounds_is_replaced(when: Any, chosen: float) -> None:
    algorithm = FedBn(FedAvgConfig(rounds=4, width=2, domain_randomisation=when), TASK)
    memory = EMPTY
    # The site takes no part in round 3.
    for done, dice in ((1, 0.9), (2, 0.95), (4, 0.4)):
        memory = algorithm.own.choose(
            memory, {"w": torch.full((1,), done + 1.0)}, ValidationScore(dice, 1), done
        )
    expected = 3.0 if when == "none" else chosen
    assert float(algorithm.own.slot.read(memory).model["w"]) == expected


def test_the_old_recipe_keeps_its_identity_and_a_new_one_has_another(tmp_path: Path) -> None:
    old = FedAvgConfig(domain_randomisation="none")
    assert "domain_randomisation" not in old.identity()
    # `foreground` came later, too.
    later = ("domain_randomisation", "foreground")
    assert old.identity() == {n: v for n, v in old.model_dump(mode="json").items() if n not in later}
    assert FedAvgConfig(domain_randomisation="late").identity()["domain_randomisation"] == "late"
    assert FedAvgConfig(recipe="paper").domain_randomisation == "none"
    # The whole configuration travels to hospitals and comes back the same.
    for when in ("none", "late", "throughout"):
        config = IopFlConfig(domain_randomisation=when)
        assert IopFlConfig.model_validate(config.model_dump(mode="json")) == config


class StoppedError(Exception):
    """The run was stopped by the test."""


class Stop(Silent):
    """Stops a run when its second round of training starts."""

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:
        if (phase, round) == ("train", 1):
            raise StoppedError


def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    data = write_federation(tmp_path / "data", ("aster", "birch"), patients_per_site=3, size=16)
    config = FedAvgConfig(rounds=3, width=2, batch_size=8, domain_randomisation="throughout")
    run = Run(load_federation(data), "fedavg", config)
    whole = execute(run, tmp_path / "whole", workers=0)
    with pytest.raises(StoppedError):
        execute(run, tmp_path / "stopped", workers=0, observer=Stop())
    resumed = execute(run, tmp_path / "stopped", workers=0, resume=True)
    (expected,), (found,) = whole.publication.models, resumed.publication.models
    assert all(torch.equal(tensor, found.weights[name]) for name, tensor in expected.weights.items())
    assert run.identity()["config"]["domain_randomisation"] == "throughout"
