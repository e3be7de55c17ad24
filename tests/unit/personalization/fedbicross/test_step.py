"""A step of Stage 2, compared with a naive second version of Alg. 1 with all derivatives by autograd."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from personalization.fedbicross.inversion import InversionWeights
from personalization.fedbicross.synthesis import SynthesisConfig, Trajectory
from personalization.networks import build, initialise

SHAPE, CLASSES, STEPS = (1, 8, 8), 3, 3
# Weights large enough that a missing term shows; 7 images for training and 5 for validation.
CONFIG = SynthesisConfig(
    steps=STEPS,
    batch_size=12,
    train_share=0.6,
    weights=InversionWeights(total_variation=0.05, batch_norm=0.5),
    temperature=4.0,
    inner_rate=0.05,
    outer_steps=STEPS,
)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Small(nn.Module):
    """Two batch norms; the input of the second depends on the mode of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.conv2, self.bn2 = nn.Conv2d(2, 4, 3, stride=2), nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.bn1(self.conv1(images)))
        return self.linear(torch.relu(self.bn2(self.conv2(features))).mean(dim=(2, 3)))


def resnet() -> nn.Module:
    return build("resnet18", in_channels=1, classes=CLASSES, width=1)


def network(make: Any, seed: int) -> nn.Module:
    """A network with running statistics of images that differ by seed."""
    draw = torch.Generator().manual_seed(seed)
    made = initialise(make(), draw).train()
    with torch.no_grad():
        for _ in range(5):
            made(2 * torch.randn(8, *SHAPE, generator=draw) + seed % 5)
    return made.eval()


def norm_inputs(model: nn.Module, images: Tensor) -> tuple[Tensor, list[tuple[nn.BatchNorm2d, Tensor]]]:
    """A forward pass: the logits, and the input of every batch norm."""
    seen: list[tuple[nn.BatchNorm2d, Tensor]] = []
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    handles = [n.register_forward_pre_hook(lambda m, inputs: seen.append((m, inputs[0]))) for n in norms]
    logits = model(images)
    for handle in handles:
        handle.remove()
    return logits, seen


def length(difference: Tensor) -> Tensor:
    return (difference * difference).sum().sqrt()


def variation(images: Tensor) -> Tensor:
    """Differences to the pixel on the right, below, and on both diagonals below."""
    total = torch.zeros(())
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        moved = torch.roll(images, (-down, -right), (2, 3))
        rows = slice(0, images.shape[2] - down)
        columns = slice(max(0, -right), images.shape[3] - max(0, right))
        total = total + length((moved - images)[:, :, rows, columns])
    return total


def distilled(logits: Tensor, plain: Tensor, adapted: Tensor, share: float, temperature: float) -> Tensor:
    def kl(teacher: Tensor) -> Tensor:
        p, q = (teacher / temperature).softmax(1), (logits / temperature).softmax(1)
        return (p * (p.log() - q.log())).sum(1).mean() * temperature**2

    return share * kl(adapted) + (1 - share) * kl(plain)


def onto_simplex(point: Tensor) -> Tensor:
    """max(point - c, 0) that sums to 1; c by bisection."""
    low, high = float(point.min()) - 1, float(point.max())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((point - middle).clamp(min=0).sum()) > 1 else (low, middle)
    return (point - low).clamp(min=0)


class ByHand:
    """The state of a trajectory, with its initial noise, its split and its drawn labels."""

    def __init__(self, made: Trajectory, members: Sequence[Sequence[nn.Module]]) -> None:
        self.made, self.config, self.members = made, made.config, members
        self.adapted = [[copy.deepcopy(member) for member in each] for each in members]
        self.students = [copy.deepcopy(student) for student in made.students]
        self.mixing = made.mixing.clone()
        self.images = [images.clone() for images in made.images()]
        self.moments = [(torch.zeros_like(images), torch.zeros_like(images)) for images in self.images]
        balanced = torch.tensor([number % CLASSES for number in range(CONFIG.batch_size)])
        uniform = self.config.labels == "uniform"
        self.labels = [made._labels[k] if uniform else balanced for k in range(len(members))]

    def step(self, t: int) -> dict[str, float]:
        notes = self.dream(t)
        if self.config.every_step or t in self.made.outer:
            outer = self.config.bilevel and len(self.students) > 1 and t in self.made.outer
            notes |= self.learn(1 - t / self.config.steps, outer)
        return notes

    def dream(self, t: int) -> dict[str, float]:
        draw, terms = self.made._generator(t), []
        for k, members in enumerate(self.members):
            images = self.images[k].requires_grad_()
            seen = images
            if self.config.jitter:
                seen = torch.roll(images, torch.randint(-2, 3, (2,), generator=draw).tolist(), (2, 3))
            logits, distance = torch.zeros(()), torch.zeros(())
            for member in members:
                said, inputs = norm_inputs(member.eval(), seen)
                logits = logits + said / len(members)
                for norm, found in inputs:
                    distance = distance + length(found.var((0, 2, 3), unbiased=False) - norm.running_var)
                    distance = distance + length(found.mean((0, 2, 3)) - norm.running_mean)
            if self.config.weights.per_member:
                distance = distance / len(members)
            entropy = -logits.log_softmax(1)[range(len(seen)), self.labels[k]].mean()
            terms.append((float(entropy.detach()), float(variation(seen).detach()), float(distance.detach())))
            weights = self.config.weights
            loss = entropy + weights.total_variation * variation(seen) + weights.batch_norm * distance
            (slope,) = torch.autograd.grad(loss, images)
            # Adam, Kingma and Ba (2015), Alg. 1.
            first, second = self.moments[k]
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
            self.moments[k] = first, second
            scale = (second / (1 - 0.999**t)).sqrt() + 1e-8
            self.images[k] = images.detach() - self.config.image_rate * first / (1 - 0.9**t) / scale
            for twin in self.adapted[k]:
                follow(twin, self.images[k])
        means = map(fmean, zip(*terms, strict=True))
        return dict(zip(("cross_entropy", "total_variation", "batch_norm"), means, strict=True))

    def learn(self, share: float, outer: bool) -> dict[str, float]:
        plain, adapted = (
            [
                sum(each(x) for each in models).detach() / len(models)
                for models, x in zip(all_, self.images, strict=True)
            ]
            for all_ in (self.members, self.adapted)
        )

        def loss(student: nn.Module, parameters: dict[str, Tensor], j: int, part: int) -> Tensor:
            index = self.made._parts[j][part]
            logits = functional_call(student, parameters, (self.images[j][index],))
            return distilled(logits, plain[j][index], adapted[j][index], share, self.config.temperature)

        learned, checked = [], []
        for k, student in enumerate(self.students):
            student.train()
            mixing = self.mixing[k].clone().requires_grad_()
            parameters = {name: p.detach() for name, p in student.named_parameters()}
            for left in reversed(range(self.config.inner_steps)):
                # With several steps only the last one counts for w.
                parameters = {name: p.detach().requires_grad_() for name, p in parameters.items()}
                asked = [j for j in range(len(mixing)) if mixing[j] > 0 or (outer and not left)]
                total = sum(mixing[j] * loss(student, parameters, j, 0) for j in asked)
                slopes = torch.autograd.grad(total, list(parameters.values()), create_graph=True)
                moved = zip(parameters.items(), slopes, strict=True)
                parameters = {name: p - self.config.inner_rate * slope for (name, p), slope in moved}
            learned.append(float(total.detach()))
            if outer:
                validation = loss(student, parameters, k, 1)
                checked.append(float(validation.detach()))
                (slope,) = torch.autograd.grad(validation, mixing)
                if self.config.outer_scaling == "normalised":
                    slope = slope - slope.mean()
                    slope = slope / slope.abs().max()
                self.mixing[k] = onto_simplex(mixing.detach() - self.config.outer_rate * slope)
            student.load_state_dict({n: p.detach() for n, p in parameters.items()}, strict=False)
        return {"distillation": fmean(learned)} | ({"validation": fmean(checked)} if outer else {})


@torch.no_grad()
def follow(twin: nn.Module, images: Tensor) -> None:
    """0.9 of the running statistics and 0.1 of the batch's, with the unbiased variance."""
    norms = [module for module in twin.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
    found = {id(norm): value for norm, value in norm_inputs(twin.train(), images)[1]}
    for norm, (mean, var) in zip(norms, before, strict=True):
        norm.running_mean = 0.9 * mean + 0.1 * found[id(norm)].mean((0, 2, 3))
        norm.running_var = 0.9 * var + 0.1 * found[id(norm)].var((0, 2, 3))
    twin.eval()


def begun(make: Any, sizes: Sequence[int], **options: Any) -> tuple[Trajectory, ByHand]:
    """A trajectory of clusters of these sizes, and its double. Student 1 has no use for source 0 yet."""
    members = [[network(make, 10 * k + i) for i in range(size)] for k, size in enumerate(sizes)]
    students = [network(make, 100 + k) for k in range(len(sizes))]
    mixing = torch.tensor([[0.5, 0.2, 0.3], [0.0, 0.35, 0.65], [0.25, 0.35, 0.4]])[: len(sizes), : len(sizes)]
    mixing = mixing / mixing.sum(1, keepdim=True)
    config = replace(CONFIG, **options)
    made = Trajectory(copy.deepcopy(members), students, mixing, SHAPE, CLASSES, config, seed=3)
    return made, ByHand(made, members)


def compare(made: Trajectory, double: ByHand, *steps: int) -> None:
    for step in steps:
        notes, expected = made.step(step), double.step(step)
        assert notes == pytest.approx(expected, rel=1e-9)
        same(made.images(), double.images)
        for teacher, twins in zip(made._teachers, double.adapted, strict=True):
            same([m.state_dict() for m in teacher.adapted], [twin.state_dict() for twin in twins])
        same([s.state_dict() for s in made.students], [s.state_dict() for s in double.students])
        same(made.mixing, double.mixing)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_outer_step_equals_the_naive_version() -> None:
    """Three clusters of one, three and two ResNets: images, statistics, students and w."""
    made, double = begun(resnet, (1, 3, 2))
    before = made.mixing.clone()
    compare(made, double, 1)
    assert float((made.mixing - before).abs().amax(1).min()) > 0.01


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"labels": "uniform"},
        {"jitter": False},
        {"weights": InversionWeights(total_variation=0.5, batch_norm=0.1, per_member=False)},
        {"train_share": 0.25},
        {"temperature": 1.0, "image_rate": 0.2, "inner_rate": 0.2, "outer_rate": 0.3},
        {"outer_steps": 1},
        {"outer_steps": 1, "every_step": False},
        {"inner_steps": 2},
        {"inner_steps": 2, "outer_steps": 1},
        {"outer_scaling": "plain", "outer_rate": 50.0},
        {"bilevel": False},
    ],
    ids=str,
)
def test_trajectory_equals_the_naive_version(options: dict[str, Any]) -> None:
    compare(*begun(Small, (2, 1), **options), *range(1, STEPS + 1))


def test_trajectory_of_one_cluster_equals_the_naive_version() -> None:
    compare(*begun(Small, (2,)), *range(1, STEPS + 1))
