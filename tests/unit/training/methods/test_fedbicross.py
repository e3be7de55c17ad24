"""FedBiCross at the hospital: Stage 3 against the plain loop; and what becomes of the options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
import torch

from model_store.task import Task
from personalization.fedbicross.inversion import InversionWeights
from personalization.fedbicross.synthesis import SynthesisConfig
from personalization.networks import build, initialise
from tests.helpers.training.sites import client_step, context
from training.algorithm import Memory, State
from training.errors import ConfigurationError
from training.local.images import Images
from training.local.site import SiteData
from training.methods.fedbicross import method
from training.methods.fedbicross.config import LITERAL_READING, PAPER_SIZES, FedBiCrossConfig
from training.methods.fedbicross.method import FedBiCross
from training.methods.fedbicross.timing import time_steps
from training.methods.one_shot import Own

CLASSES, IMAGES = 3, 10


def task(classes: int = CLASSES) -> Task:
    names = tuple(f"kind {number}" for number in range(classes))
    return Task(name="toy", kind="classification", class_names=names, size=(8, 8))


def hospital() -> SiteData[Images]:
    """In float64, so that the two ways to the same numbers agree closely."""
    draw = np.random.default_rng(0)
    names = tuple(map(str, range(IMAGES)))
    labels = draw.integers(CLASSES, size=IMAGES)
    images = Images(draw.normal(size=(IMAGES, 1, 8, 8)), labels, names, names, (0,) * IMAGES)
    return SiteData("elm", images, images, images, None)


def opinionated(seed: int) -> State:
    """A network with answers far from even, which differ from image to image."""
    draw = torch.Generator().manual_seed(seed)
    network = initialise(build("resnet18", in_channels=1, classes=CLASSES, width=1), draw).double().train()
    with torch.no_grad():
        network.linear.weight.mul_(3)
        network.linear.bias.copy_(2 * torch.randn(CLASSES, generator=draw))
        for _ in range(5):
            network(torch.randn(8, 1, 8, 8, generator=draw).double())
    return network.state_dict()


def loaded(state: State) -> torch.nn.Module:
    network = build("resnet18", in_channels=1, classes=CLASSES, width=1).double().eval()
    network.load_state_dict(state)
    return network


def stage_3(cluster: State, own: State, data: Images, config: FedBiCrossConfig) -> State:
    """Both teachers run on every batch; SGD with momentum and weight decay by hand."""
    network, teachers = loaded(cluster).train(), (loaded(cluster), loaded(own))
    velocity = [torch.zeros_like(parameter) for parameter in network.parameters()]
    draw = context("personalise", 0, 1, "elm").generator("train")
    temperature = config.personal_temperature
    for _ in range(config.personal_epochs):
        for index in torch.randperm(len(data), generator=draw).split(config.batch_size):
            images = torch.from_numpy(data.images)[index]
            logits = network(images)
            loss = -logits.log_softmax(1)[range(len(index)), torch.from_numpy(data.targets)[index]].mean()
            for teacher, weight in zip(teachers, (config.cluster_weight, config.own_weight), strict=True):
                said, found = (teacher(images) / temperature).softmax(1), (logits / temperature).softmax(1)
                kl = (said * (said.log() - found.log())).sum(1).mean()
                loss = loss + weight * kl * temperature**2
            slopes = torch.autograd.grad(loss, list(network.parameters()))
            with torch.no_grad():
                for parameter, speed, slope in zip(network.parameters(), velocity, slopes, strict=True):
                    speed.mul_(config.momentum).add_(slope + config.weight_decay * parameter)
                    parameter.sub_(config.personal_rate * speed)
    return network.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cluster_weight": 2.0, "own_weight": 0.0},
        {"cluster_weight": 0.0, "own_weight": 2.0},
        {"personal_temperature": 3.0},
    ],
    ids=str,
)
def test_stage_3_is_the_plain_loop(options: dict[str, float]) -> None:
    config = FedBiCrossConfig(width=1, batch_size=4, personal_epochs=2, personal_rate=0.02, **options)
    cluster, own, data = opinionated(1), opinionated(2), hospital()
    algorithm = FedBiCross(config, task())
    uploaded = algorithm.upload.own.write(Memory(), Own(own))
    result = client_step(algorithm, context("personalise", 0, 1, "elm"), {"cluster": cluster}, uploaded, data)
    assert result.memory is not None
    expected = stage_3(cluster, own, data.train, config)
    personal = algorithm.personalise.own.read(result.memory).model
    torch.testing.assert_close(personal, expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(algorithm.upload.uploaded(result.memory), own, rtol=0, atol=0)
    assert set(result.uploads) == {"counts"}


def test_the_weights_are_the_papers_unless_told_otherwise() -> None:
    config = FedBiCrossConfig()
    assert (config.cluster_weight, config.own_weight, config.personal_temperature) == (0.5, 0.3, 1.0)
    assert config.synthesis().weights == InversionWeights(total_variation=2.5e-5, batch_norm=10.0)
    assert config.synthesis().temperature == 20


def test_paper_recipe_takes_the_papers_values_where_none_is_given() -> None:
    given = {**PAPER_SIZES, **LITERAL_READING, "width": 8, "jitter": True}
    found = FedBiCrossConfig(recipe="paper", width=8, jitter=True)
    assert found.model_dump() == FedBiCrossConfig(**given).model_dump()
    assert "recipe" not in found.model_dump()
    assert FedBiCrossConfig(recipe="locum") == FedBiCrossConfig()


def test_forecast_counts_passes_over_images_and_synthesis_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = FedBiCrossConfig(
        local_epochs=7, personal_epochs=3, epochs=2, steps=25, checkpoint_every=10, outer_steps=1
    )
    timed = []

    def time_steps(*arguments: object) -> tuple[float, float]:
        timed.append(arguments[-3:])
        return 0.5, 6.0

    monkeypatch.setattr(method, "time_steps", time_steps)
    algorithm = FedBiCross(config, task())
    found = algorithm.forecast(images=40, sites=5, threads=2)
    lengths = {step.name: getattr(step, "rounds", None) or step.steps for step in algorithm.plan()}
    assert timed == [(5, 2, 2)]  # sites, clusters, threads
    assert {name: seconds * lengths[name] for name, seconds in found.items()} == {
        "local": 7 * 40 * 0.5,
        "cluster": 0,
        method.SYNTHESIS: 2 * 25 * 6.0,
        "personalise": 3 * 40 * 0.5,
        "test": 0,
        "export": 0,
    }


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("sites", "clusters"), [(1, 1), (3, 2)])
def test_timing_steps_leaves_the_number_of_threads_as_it_was(sites: int, clusters: int) -> None:
    # On one thread: two that wait for each other on busy cores take many times as long.
    config = FedBiCrossConfig(width=1, batch_size=4, synthesis_batch=4, outer_steps=1)
    found = time_steps(FedBiCross(config, task()), config, sites, clusters, 1)
    assert all(seconds > 0 for seconds in found)
    assert torch.get_num_threads() == 2


def test_every_option_of_stage_2_arrives() -> None:
    given = {
        "steps": 9,
        "image_rate": 0.3,
        "jitter": False,
        "labels": "uniform",
        "temperature": 7.0,
        "every_step": False,
        "inner_steps": 3,
        "inner_rate": 0.4,
        "bilevel": False,
        "outer_steps": 2,
        "outer_rate": 0.6,
        "outer_scaling": "plain",
        "train_share": 0.7,
        "precision": "bfloat16",
    }
    renamed = {"synthesis_batch": 17, "tv_weight": 0.1, "bn_weight": 0.2, "bn_per_member": False}
    found = FedBiCrossConfig(**given, **renamed).synthesis()
    assert found == SynthesisConfig(**given, batch_size=17, weights=InversionWeights(0.1, 0.2, False))
    default = SynthesisConfig()
    assert all(getattr(found, field.name) != getattr(default, field.name) for field in fields(found))


def test_the_rate_of_local_training_can_be_constant_and_is_in_the_papers_recipe() -> None:
    assert FedBiCrossConfig().local().milestones == (0.5, 0.75)
    assert FedBiCrossConfig(milestones=()).local().milestones == ()
    paper = FedBiCrossConfig(recipe="paper").local()
    assert (paper.epochs, paper.batch_size, paper.learning_rate, paper.milestones) == (100, 128, 0.001, ())


def test_every_class_needs_an_image_to_be_dreamt_up() -> None:
    config = FedBiCrossConfig(synthesis_batch=5)
    FedBiCross(config, task(5))
    with pytest.raises(ConfigurationError, match=r"(?s)'toy'.*synthesis_batch: expected at least 6.*found 5"):
        FedBiCross(config, task(6))
