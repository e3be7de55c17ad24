"""w and its outer gradient, compared with a solver, autograd and numerical differentiation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.func import functional_call

from personalization.fedbicross.bilevel import (
    gradient_of,
    inner_step,
    outer_gradient,
    outer_step,
    project_onto_simplex,
    stratified_steps,
)
from personalization.fedbicross.distillation import distillation_loss
from personalization.networks import build, initialise

SOURCES, RATE = 3, 0.05


@pytest.mark.parametrize("seed", range(5))
def test_projection_onto_simplex_equals_the_solver_minimum(seed: int) -> None:
    point = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = project_onto_simplex(point)
    solved = minimize(
        lambda w: ((w - point.numpy()) ** 2).sum(),
        np.full(5, 0.2),
        method="SLSQP",
        bounds=[(0, None)] * 5,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(found.numpy(), solved.x, atol=1e-6)


@pytest.mark.parametrize(
    ("point", "nearest"),
    [
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
        ([5.0, 0.0, 0.0], [1, 0, 0]),
        ([-3.0, -3.0], [0.5, 0.5]),
        ([7.0], [1]),
        ([0.9, 0.9, -1.0], [0.5, 0.5, 0]),
    ],
)
def test_projection_onto_simplex_matches_hand_computed_points(
    point: list[float], nearest: list[float]
) -> None:
    found = project_onto_simplex(torch.tensor(point, dtype=torch.float64))
    assert found.tolist() == pytest.approx(nearest)


class World:
    """A float64 student with batch norm in training mode, and lessons from three sources."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.student = initialise(build("resnet18", in_channels=1, classes=3, width=1), draw).double().train()
        self.lessons = [
            torch.randn(6, 1, 8, 8, generator=draw, dtype=torch.float64) for _ in range(SOURCES + 1)
        ]
        self.answers = [
            (torch.randn(2, 6, 3, generator=draw, dtype=torch.float64) * 5).unbind() for _ in self.lessons
        ]
        self.mixing = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

    def loss(self, network: object, index: int) -> torch.Tensor:
        return distillation_loss(network(self.lessons[index]), *self.answers[index], 0.4)  # type: ignore[operator]

    def validation_after(self, mixing: torch.Tensor) -> torch.Tensor:
        """L_val(G^t(w)) as a differentiable function of w: second-order autograd through the inner step."""
        parameters = dict(self.student.named_parameters())
        total = sum(mixing[j] * self.loss(self.student, j) for j in range(SOURCES))
        slopes = torch.autograd.grad(total, list(parameters.values()), create_graph=True)
        moved = {n: p - RATE * s for (n, p), s in zip(parameters.items(), slopes, strict=True)}
        return self.loss(lambda x: functional_call(self.student, moved, (x,)), SOURCES)


def ours(world: World) -> torch.Tensor:
    gradients = [gradient_of(world.loss(world.student, j), world.student) for j in range(SOURCES)]
    inner_step(world.student, gradients, world.mixing, RATE)
    validation = gradient_of(world.loss(world.student, SOURCES), world.student)
    return outer_gradient(validation, gradients, RATE)


def test_outer_gradient_equals_autograd_through_the_inner_step() -> None:
    world = World()
    mixing = world.mixing.clone().requires_grad_()
    (expected,) = torch.autograd.grad(world.validation_after(mixing), mixing)
    found = ours(world)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    assert float(found.abs().min()) > 1e-6


def test_outer_gradient_equals_finite_differences() -> None:
    world, step = World(), 1e-4
    numerical = []
    for j in range(SOURCES):
        shift = torch.zeros(SOURCES, dtype=torch.float64)
        shift[j] = step
        up, down = (world.validation_after(world.mixing + sign * shift).detach() for sign in (1, -1))
        numerical.append(float(up - down) / (2 * step))
    assert ours(world).tolist() == pytest.approx(numerical, rel=1e-5)


def test_inner_step_equals_plain_gradient_descent() -> None:
    world, other = World(), World()
    gradients = [gradient_of(world.loss(world.student, j), world.student) for j in range(SOURCES)]
    inner_step(world.student, gradients, world.mixing, RATE)
    optimiser = torch.optim.SGD(other.student.parameters(), lr=RATE)
    total = sum(float(other.mixing[j]) * other.loss(other.student, j) for j in range(SOURCES))
    torch.autograd.backward(total)
    optimiser.step()
    for a, b in zip(world.student.parameters(), other.student.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_outer_step_ignores_a_common_slope() -> None:
    mixing = torch.full((3,), 1 / 3, dtype=torch.float64)
    slope = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    moved = outer_step(mixing, slope * 1e-6, 0.1)
    assert moved.tolist() == pytest.approx([1 / 3 + 0.1, 1 / 3, 1 / 3 - 0.1])
    torch.testing.assert_close(outer_step(mixing, slope * 1e-6 - 50.0, 0.1), moved, rtol=1e-6, atol=1e-6)
    assert torch.equal(outer_step(mixing, torch.full((3,), 4.2, dtype=torch.float64), 0.1), mixing)
    plain = outer_step(mixing, slope * 1e-6, 0.1, "plain")
    torch.testing.assert_close(plain, mixing - 1e-7 * slope)


def test_outer_step_keeps_w_a_distribution() -> None:
    mixing = torch.tensor([0.05, 0.95], dtype=torch.float64)
    assert outer_step(mixing, torch.tensor([1.0, -1.0]).double(), 0.1).tolist() == [0, 1]


@pytest.mark.parametrize(("steps", "strata"), [(500, 6), (7, 3), (6, 6), (1, 1)])
def test_stratified_steps_draws_one_step_per_stratum(steps: int, strata: int) -> None:
    draw = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        found = sorted(stratified_steps(steps, strata, draw))
        assert len(found) == strata
        for s, step in enumerate(found):
            assert s * steps // strata < step <= (s + 1) * steps // strata
        seen.update(found)
    assert len(seen) > 0.8 * min(steps, 200)
    with pytest.raises(ValueError, match="strata"):
        stratified_steps(strata - 1, strata, draw)


def test_gradient_of_an_unused_parameter_is_zero() -> None:
    pair = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    first, _, third, fourth = gradient_of(pair[0](torch.ones(1, 1)).sum(), pair)
    assert first.item() == 1
    assert third.item() == fourth.item() == 0
