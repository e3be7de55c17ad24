"""DAFL, FedISCA and Co-Boosting on the server against plain loops; what they keep, drop, send and publish."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from model_store.task import Task
from personalization.co_boosting import diversified
from personalization.co_boosting import generator_loss as hard_loss
from personalization.dafl import generator_loss
from personalization.dense import Generator
from personalization.fedbicross.inversion import InversionWeights, inversion_loss, jitter
from personalization.networks import build, initialise
from personalization.networks.capabilities import batch_norms
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.sites import EMPTY, client_step, context, result_of, server_stage, server_step
from training.algorithm import Memory, Phase, ServerStage, State, StepContext
from training.errors import ConfigurationError, TrainingError
from training.methods.one_student import OneStudent, fallen
from training.methods.registry import method

LOCAL = {"width": 1, "local_epochs": 1, "batch_size": 4}
SMALL: dict[str, Any] = {**LOCAL, "epochs": 3, "synthesis_batch": 6, "student_rate": 0.02}
GENERATED = {"generator_steps": 2, "noise_size": 5, "generator_width": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "dafl": {**SMALL, **GENERATED, "student_milestones": (0.5,)},
    "fedisca": {**SMALL, "steps": 4},
    "co-boosting": {**SMALL, **GENERATED, "pool": 2, "ensemble_rate": 0.1},
}
METHODS = tuple(CONFIGS)
SITES = {"A": labelled_data("A", 8, 4, 0), "B": labelled_data("B", 4, 2, 5)}
LOSSES = {
    "dafl": {"one_hot", "activation", "entropy", "distillation"},
    "fedisca": {"cross_entropy", "total_variation", "batch_norm", "distillation"},
    "co-boosting": {"generator", "distillation", "ensemble"},
}


def algorithm_of(name: str, **fields: Any) -> OneStudent[Any]:
    chosen = method(name)
    built = chosen.build(chosen.config(**{**CONFIGS[name], **fields}), CORNERS)
    assert isinstance(built, OneStudent)
    return built


def uploads(algorithm: OneStudent[Any]) -> Memory:
    """The server's memory after the phase `local`."""
    server = algorithm.initial(context("initial", 0))
    local = algorithm.plan()[0]
    found = {
        site: client_step(algorithm, context("local", 0, 1, site), local.broadcast(server, site), EMPTY, data)
        for site, data in SITES.items()
    }
    assert all(result.memory is None for result in found.values())
    reduced = result_of(found, mean=None, collect=("model", "statistics"))
    return server_step(algorithm, context("local", 0, 1), server, reduced)


def loaded(algorithm: OneStudent[Any], state: State) -> nn.Module:
    network = build("resnet18", **algorithm.network.arguments)
    network.load_state_dict(state)
    return network.to(memory_format=torch.channels_last)


def begun(algorithm: OneStudent[Any], epoch: int) -> tuple[Memory, StepContext, list[nn.Module], nn.Module]:
    """The memory before an epoch, its context, the members and the student."""
    server = uploads(algorithm)
    for before in range(epoch):
        server = server_stage(algorithm, context("distil", before, 4), server)
    models = list(algorithm.upload.slot.read(server).models.values())
    members = [loaded(algorithm, model).eval() for model in models]
    for member in members:
        member.requires_grad_(False)
    first = {n: (t + models[1][n]) / 2 if t.is_floating_point() else t for n, t in models[0].items()}
    student = loaded(algorithm, algorithm.distil.slot.read(server).student or first)
    return server, context("distil", epoch, 4), members, student


class Sgd:
    """SGD with momentum 0.9 and weight decay 5e-4, written out."""

    def __init__(self, student: nn.Module, moments: State, rate: float) -> None:
        self.student, self.rate = student, rate
        self.velocity = {
            name: moments[f"{index}/momentum_buffer"].clone() if moments else None
            for index, (name, _) in enumerate(student.named_parameters())
        }

    def step(self, loss: Tensor) -> None:
        self.student.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, weight in self.student.named_parameters():
                gradient = weight.grad + 5e-4 * weight
                old = self.velocity[name]
                self.velocity[name] = gradient if old is None else 0.9 * old + gradient
                weight -= self.rate * self.velocity[name]


def kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    p = functional.softmax(teacher / temperature, dim=1)
    q = functional.log_softmax(student / temperature, dim=1)
    return temperature**2 * (p * (p.log() - q)).sum(dim=1).mean()


def check(student: nn.Module, sgd: Sgd, found: State, moments: State) -> None:
    for name, tensor in student.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-3, msg=name)
    for index, (name, _) in enumerate(student.named_parameters()):
        torch.testing.assert_close(
            moments[f"{index}/momentum_buffer"], sgd.velocity[name], rtol=2e-2, atol=2e-3, msg=name
        )


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_dafl_trains_both_on_the_same_images(epoch: int) -> None:
    algorithm = algorithm_of("dafl")
    server, here, members, student = begun(algorithm, epoch)
    after = server_stage(algorithm, here, server)
    before, left = algorithm.stage.read(server), algorithm.stage.read(after)
    generator = Generator(5, 2, (1, 16, 16))
    if epoch:
        generator.load_state_dict(before.generator)
    else:
        initialise(generator, here.generator("generator"))
    adam = torch.optim.Adam(generator.parameters(), lr=0.001)
    kept = before.generator_moments
    for index, weight in enumerate(generator.parameters()):
        if kept:
            names = ("step", "exp_avg", "exp_avg_sq")
            adam.state[weight] = {name: kept[f"{index}/{name}"].clone() for name in names}
    # Half of the four epochs at the whole rate.
    sgd = Sgd(student, before.student_moments, 0.02 if epoch < 2 else 0.002)
    draw = here.generator("noise")
    student.train()
    for _ in range(2):
        images = generator(torch.randn(6, 5, generator=draw))
        adam.zero_grad()
        generator_loss(members, images, 0.1, 5.0).total.backward()
        with torch.no_grad():
            answers = (members[0](images) + members[1](images)) / 2
        adam.step()
        sgd.step(kl(answers, student(images.detach()), 1.0))
    check(student, sgd, algorithm.distil.slot.read(after).student, left.student_moments)
    for name, tensor in generator.state_dict().items():
        torch.testing.assert_close(left.generator[name], tensor, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("reading", ["paper", "code"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_fedisca_learns_from_noise_to_images(epoch: int, reading: str) -> None:
    """The adapted teacher's statistics by hand, of the first batch norm; torch's in the others."""
    algorithm = algorithm_of("fedisca", reading=reading)
    server, here, members, student = begun(algorithm, epoch)
    after = server_stage(algorithm, here, server)
    draw = here.generator("noise")
    x = torch.randn(6, 1, 16, 16, generator=draw).requires_grad_()
    adam, labels, trajectory = torch.optim.Adam([x], lr=0.05), torch.arange(6) % 2, []
    for _ in range(4):
        adam.zero_grad()
        inversion_loss(members, jitter(x, draw), labels, InversionWeights()).total.backward()
        adam.step()
        trajectory.append(x.detach().clone())
    adapted = [loaded(algorithm, model) for model in algorithm.upload.slot.read(server).models.values()]
    first = next(iter(batch_norms(adapted[0]).values()))
    mean = first.running_mean.clone()

    def pass_in_training(images: Tensor) -> Tensor:
        nonlocal mean
        with torch.no_grad():
            mean = 0.9 * mean + 0.1 * adapted[0].conv1(images).mean((0, 2, 3))
            return torch.stack([network.train()(images) for network in adapted]).mean(0)

    for images in reversed(trajectory):
        pass_in_training(images)
    sgd = Sgd(student, algorithm.stage.read(server).moments, 0.02)
    student.train()
    for number, images in enumerate(trajectory):
        of_batch = pass_in_training(images)
        torch.testing.assert_close(first.running_mean, mean)
        with torch.no_grad():
            running = torch.stack([network.eval()(images) for network in adapted]).mean(0)
            plain = torch.stack([member(images) for member in members]).mean(0)
        assert not torch.allclose(of_batch, running, atol=1e-3)
        alpha, answers = number / 4, student(images)
        from_noise = kl(of_batch if reading == "code" else running, answers, 20)
        sgd.step(alpha * kl(plain, answers, 20) + (1 - alpha) * from_noise)
    check(student, sgd, algorithm.distil.slot.read(after).student, algorithm.stage.read(after).moments)


@pytest.mark.parametrize("reading", ["paper", "code"])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_co_boosting_improves_weights_and_student_on_the_pool(epoch: int, reading: str) -> None:
    """w by finite differences of the loss; the pool of two epochs."""
    algorithm = algorithm_of("co-boosting", reading=reading)
    server, here, members, student = begun(algorithm, epoch)
    after = server_stage(algorithm, here, server)
    before, left = algorithm.stage.read(server), algorithm.stage.read(after)
    w = torch.tensor(before.w or (0.5, 0.5), dtype=torch.float64)
    divided = reading == "code"

    def ensemble(logits: Tensor, weights: Tensor) -> Tensor:
        total = sum(weights[k].float() * logits[:, k] for k in range(2))
        return total / weights.sum().float() if divided else total

    def each(images: Tensor) -> Tensor:
        return torch.stack([member(images) for member in members], dim=1)

    generator = Generator(5, 2, (1, 16, 16))
    initialise(generator, here.generator("generator"))
    draw = here.generator("noise")
    noise = torch.randn(6, 5, generator=draw)
    labels = torch.randint(2, (6,), generator=draw)
    adam = torch.optim.Adam(generator.parameters(), lr=0.001, betas=(0.5, 0.999))
    student.eval()
    for _ in range(2):
        adam.zero_grad()
        images = generator(noise)
        hard_loss(ensemble(each(images), w), student(images), labels, 1.0).backward()
        adam.step()
    with torch.no_grad():
        newest = generator(noise)
    old, pool = before.pool, left.pool
    assert len(pool["labels"]) == (6 if epoch == 0 else 12)
    torch.testing.assert_close(pool["images"][-6:], newest, rtol=1e-3, atol=1e-4)
    assert torch.equal(pool["labels"][-6:], labels)
    assert not old or torch.equal(pool["images"][:-6], old["images"][-6:])
    with torch.no_grad():
        torch.testing.assert_close(pool["logits"], each(pool["images"]), rtol=1e-3, atol=1e-3)

    fitted = old if divided else pool
    if fitted:
        order = torch.randperm(len(fitted["labels"]), generator=here.generator("ensemble"))
        for chosen in order.split(6):
            slopes = []
            for k in range(2):
                losses = []
                for sign in (1, -1):
                    moved = w.clone()
                    moved[k] += sign * 1e-3
                    logits = ensemble(fitted["logits"][chosen].double(), moved.double()).double()
                    losses.append(functional.cross_entropy(logits, fitted["labels"][chosen]).item())
                slopes.append(losses[0] - losses[1])
            w = (w - 0.1 * 0.99**epoch * torch.tensor(slopes, dtype=torch.float64).sign()).clamp(0, 1)
    assert left.w == pytest.approx(w.tolist())
    found = algorithm.distil.slot.read(after)
    assert found.log[-1]["ensemble"] == w.tolist()

    sgd = Sgd(student, before.moments, 0.02)
    student.zero_grad()
    student.train()
    draw = here.generator("directions")
    for chosen in torch.randperm(len(pool["labels"]), generator=here.generator("order")).split(6):
        u = 2 * torch.rand(6, 2, generator=draw) - 1
        images = diversified(members, pool["images"][chosen], w, u, 8 / 255, divided)
        with torch.no_grad():
            taught = ensemble(each(images), w)
        sgd.step(kl(taught, student(images), 4.0))
    check(student, sgd, found.student, left.moments)


@pytest.mark.parametrize("name", METHODS)
def test_after_the_last_epoch_the_server_keeps_the_student_alone(name: str) -> None:
    algorithm = algorithm_of(name, epochs=2)
    server = server_stage(algorithm, context("distil", 0, 2), uploads(algorithm))
    assert set(algorithm.upload.slot.read(server).models) == {"A", "B"}
    assert algorithm.stage.holds(server)
    server = server_stage(algorithm, context("distil", 1, 2), server)
    assert not algorithm.upload.slot.holds(server)
    assert not algorithm.stage.holds(server)
    found = algorithm.distil.slot.read(server)
    assert len(server.tensors) == len(found.student)
    assert [set(entry) for entry in found.log] == [LOSSES[name]] * 2
    (draft,) = algorithm.publication(server).models
    assert (draft.role, draft.site) == ("global", None)
    assert all(torch.equal(t, found.student[n]) for n, t in draft.weights.items())


@pytest.mark.parametrize("name", METHODS)
def test_a_step_from_the_same_memory_has_the_same_bits(name: str) -> None:
    algorithm = algorithm_of(name)
    server = server_stage(algorithm, context("distil", 0, 3), uploads(algorithm))
    before = {key: tensor.clone() for key, tensor in server.tensors.items()}
    one, two = (server_stage(algorithm, context("distil", 1, 3), server) for _ in range(2))
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(tensor, two.tensors[key]) for key, tensor in one.tensors.items())
    assert one.facts == two.facts
    # Steps are pure.
    assert all(torch.equal(tensor, server.tensors[key]) for key, tensor in before.items())


@pytest.mark.parametrize("name", METHODS)
def test_what_travels_is_declared_by_group_kind_and_reduction(name: str) -> None:
    plan = algorithm_of(name).plan()
    assert isinstance(plan[1], ServerStage)
    described = [
        (step.name, [(g.name, g.kind, g.reduction) for g in step.uploads])
        for step in plan
        if isinstance(step, Phase)
    ]
    assert described == [
        (
            "local",
            [
                ("model", "weights", "collect"),
                ("statistics", "statistics", "collect"),
                ("fingerprint", "statistics", "collect"),
            ],
        ),
        ("validate", [("counts", "statistics", "collect")]),
        ("test", [("tested", "statistics", "collect")]),
    ]


@pytest.mark.parametrize("name", METHODS)
def test_a_student_that_diverges_is_named(name: str) -> None:
    algorithm = algorithm_of(name)
    server = uploads(algorithm)
    for model in algorithm.upload.slot.read(server).models.values():
        model["linear.weight"].mul_(1e38)
    with pytest.raises(TrainingError, match=r"the student diverged .*lower student_rate"):
        server_stage(algorithm, context("distil", 0, 3), server)


def test_a_batch_without_an_image_of_every_class_is_rejected() -> None:
    chosen = method("fedisca")
    task = Task(name="many", kind="classification", class_names=tuple("abcdef"), size=(16, 16))
    with pytest.raises(ConfigurationError, match=r"synthesis_batch: expected at least 6, .* found 5"):
        chosen.build(chosen.config(synthesis_batch=5), task)


def test_the_rate_falls_to_a_tenth_at_each_milestone() -> None:
    rates = [fallen(1.0, (0.5, 0.75), context("distil", epoch, 8)) for epoch in range(8)]
    assert rates == pytest.approx([1] * 4 + [0.1] * 2 + [0.01] * 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dafl", {"epochs": 200, "noise_size": 1000, "generator_rate": 0.02, "student_rate": 0.1}),
        ("fedisca", {"epochs": 100, "steps": 500, "synthesis_batch": 256, "student_rate": 0.001}),
        ("co-boosting", {"epochs": 200, "generator_steps": 30, "pool": 200, "student_rate": 0.01}),
    ],
)
def test_recipe_paper_has_the_papers_sizes(name: str, expected: dict[str, Any]) -> None:
    config = method(name).config(recipe="paper", width=3)
    assert {field: getattr(config, field) for field in expected} == expected
    assert (config.width, config.init, "recipe" in config.model_dump()) == (3, "random", False)
