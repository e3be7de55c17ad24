"""DENSE on the server against a plain loop; what it keeps, drops, sends and publishes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from personalization.dense import Generator, generator_loss
from personalization.networks import build, initialise
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.sites import (
    EMPTY,
    client_step,
    context,
    phase_of,
    result_of,
    server_stage,
    server_step,
)
from training.algorithm import Memory, Phase, ServerStage, State
from training.errors import TrainingError
from training.methods.dense import Dense, DenseConfig
from training.methods.one_student import Distilled

SMALL = {
    "width": 1,
    "local_epochs": 1,
    "batch_size": 4,
    "epochs": 3,
    "generator_steps": 2,
    "synthesis_batch": 6,
    "noise_size": 5,
    "generator_width": 2,
    "pool": 2,
}
SITES = {"A": labelled_data("A", 8, 4, 0), "B": labelled_data("B", 4, 2, 5)}


def uploads(algorithm: Dense) -> Memory:
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


def loaded(algorithm: Dense, state: State) -> nn.Module:
    network = build("resnet18", **algorithm.network.arguments)
    network.load_state_dict(state)
    return network.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_is_a_plain_loop(epoch: int) -> None:
    """Each of three epochs from the same memory: the pool grows to two epochs, and then moves on."""
    algorithm = Dense(DenseConfig(**SMALL), CORNERS)
    server = uploads(algorithm)
    for earlier in range(epoch):
        server = server_stage(algorithm, context("distil", earlier, 4), server)
    here = context("distil", epoch, 4)
    after = server_stage(algorithm, here, server)

    models = list(algorithm.upload.slot.read(server).models.values())
    members = [loaded(algorithm, model).eval() for model in models]
    before, left = algorithm.stage.read(server), algorithm.stage.read(after)
    begun = algorithm.distil.slot.read(server).student or {
        n: (t + models[1][n]) / 2 if t.is_floating_point() else t for n, t in models[0].items()
    }
    student, generator = loaded(algorithm, begun), Generator(5, 2, (1, 16, 16))
    if epoch:
        generator.load_state_dict(before.generator)
    else:
        initialise(generator, here.generator("generator"))
    draw = here.generator("noise")
    noise = torch.randn(6, 5, generator=draw)
    labels = torch.randint(2, (6,), generator=draw)
    adam = torch.optim.Adam(generator.parameters(), lr=0.001)
    for _ in range(2):
        adam.zero_grad()
        generator_loss(members, student, generator(noise), labels, 1.0, 0.5).total.backward()
        adam.step()
    student.zero_grad()
    with torch.no_grad():
        new = generator(noise)
    pool = [*before.pool.get("images", torch.empty(0)).split(6)][-1:]
    images = torch.cat([*(old for old in pool if len(old)), new])
    assert len(images) == (6 if epoch == 0 else 12)
    torch.testing.assert_close(left.pool["images"], images, rtol=1e-3, atol=1e-4)
    # From the pool that was checked, so that rounding does not grow.
    images = left.pool["images"]
    with torch.no_grad():
        answers = (members[0](images) + members[1](images)) / 2
    velocity: State = {}
    student.train()
    for chosen in torch.randperm(len(images), generator=here.generator("order")).split(6):
        student.zero_grad()
        teacher = functional.softmax(answers[chosen] / 20, dim=1)
        logs = functional.log_softmax(student(images[chosen]) / 20, dim=1)
        (400 * (teacher * (teacher.log() - logs)).sum(dim=1).mean()).backward()
        with torch.no_grad():
            for name, weight in student.named_parameters():
                velocity[name] = 0.9 * velocity.get(name, 0) + weight.grad
                weight -= 0.01 * velocity[name]
    found = algorithm.distil.slot.read(after).student
    for name, tensor in student.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-3, msg=name)


def test_after_the_last_epoch_the_server_keeps_the_student_alone() -> None:
    algorithm = Dense(DenseConfig(**{**SMALL, "epochs": 2}), CORNERS)
    server = server_stage(algorithm, context("distil", 0, 2), uploads(algorithm))
    assert set(algorithm.upload.slot.read(server).models) == {"A", "B"}
    assert algorithm.stage.holds(server)
    server = server_stage(algorithm, context("distil", 1, 2), server)
    assert not algorithm.upload.slot.holds(server)
    assert not algorithm.stage.holds(server)
    found = algorithm.distil.slot.read(server)
    assert len(server.tensors) == len(found.student)
    assert [set(entry) for entry in found.log] == [
        {"cross_entropy", "batch_norm", "disagreement", "distillation"}
    ] * 2


@pytest.mark.parametrize(("pool", "kept"), [(1, 1), (2, 2), (9, 3)])
def test_the_student_sees_the_images_of_so_many_epochs(pool: int, kept: int) -> None:
    algorithm = Dense(DenseConfig(**{**SMALL, "pool": pool}), CORNERS)
    server, newest = uploads(algorithm), []
    for epoch in range(3):
        server = server_stage(algorithm, context("distil", epoch, 4), server)
        newest.append(algorithm.stage.read(server).pool["images"][-6:])
    assert torch.equal(algorithm.stage.read(server).pool["images"], torch.cat(newest[-kept:]))


def test_a_site_validates_the_student_and_the_counts_add_up() -> None:
    algorithm = Dense(DenseConfig(**SMALL), CORNERS)
    student = algorithm.upload.slot.read(uploads(algorithm)).models["A"]
    server = algorithm.distil.slot.write(Memory(), Distilled(student))
    validate = phase_of(algorithm, "validate")
    found = {
        site: client_step(
            algorithm, context("validate", 0, 1, site), validate.broadcast(server, site), EMPTY, data
        )
        for site, data in SITES.items()
    }
    network = loaded(algorithm, student).eval()
    right = 0
    for data in SITES.values():
        with torch.no_grad():
            answers = network(torch.from_numpy(data.val.images)).argmax(1).numpy()
        right += int((answers == data.val.targets).sum())
    reduced = result_of(found, mean=None, collect=("counts",))
    publication = algorithm.publication(server_step(algorithm, context("validate", 0, 1), server, reduced))
    (draft,) = publication.models
    assert (publication.kind, draft.role, draft.site) == ("model", "global", None)
    assert draft.metrics["val_accuracy"] == pytest.approx(right / 6)
    assert all(torch.equal(draft.weights[name], tensor) for name, tensor in student.items())


def test_what_travels_is_declared_by_group_kind_and_reduction() -> None:
    plan = Dense(DenseConfig(**SMALL), CORNERS).plan()
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
    assert not any(step.consent for step in plan if isinstance(step, Phase))


def test_a_student_that_diverges_is_named() -> None:
    algorithm = Dense(DenseConfig(**SMALL), CORNERS)
    server = uploads(algorithm)
    for model in algorithm.upload.slot.read(server).models.values():
        model["linear.weight"].mul_(1e38)
    with pytest.raises(TrainingError, match=r"the student diverged .*lower student_rate"):
        server_stage(algorithm, context("distil", 0, 3), server)


def test_recipe_paper_has_the_papers_sizes() -> None:
    config = DenseConfig(recipe="paper", epochs=7)
    assert (config.epochs, config.generator_steps, config.init, config.milestones) == (7, 30, "random", ())
    assert config.temperature == 1
    assert "recipe" not in config.model_dump()
