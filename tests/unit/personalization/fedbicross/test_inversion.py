"""Losses of synthesis on cases small enough to compute by hand; teachers and distillation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from torch import nn

from personalization.fedbicross.distillation import distillation_loss, divergence
from personalization.fedbicross.inversion import (
    InversionWeights,
    balanced_labels,
    inversion_loss,
    jitter,
    norm_distance,
    total_variation,
)
from personalization.fedbicross.personal import personal_loss
from personalization.fedbicross.teachers import Teacher
from personalization.networks import build, initialise


def model(seed: int) -> nn.Module:
    made = initialise(
        build("resnet18", in_channels=1, classes=3, width=2), torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        # As after training: with initial running statistics all answers would be nearly equal.
        for batch in range(20):
            made.train()(2 * images(16, 100 * seed + batch) + seed)
    return made.eval()


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_total_variation_matches_hand_computed_values() -> None:
    # 1 2    horizontal 1, 0;  vertical 2, 1;  diagonal 3 - 1 = 2;  the other 3 - 2 = 1
    # 3 3
    batch = torch.tensor([[[[1.0, 2.0], [3.0, 3.0]]]])
    assert float(total_variation(batch)) == pytest.approx(1 + math.sqrt(5) + 2 + 1)
    # The norm is over the whole batch, not summed per image.
    assert float(total_variation(batch.repeat(4, 1, 1, 1))) == pytest.approx(2 * (4 + math.sqrt(5)))
    assert float(total_variation(torch.full((2, 3, 5, 5), 7.0))) == 0


def test_norm_distance_matches_the_hand_computed_value() -> None:
    norm = nn.BatchNorm2d(2).eval()
    norm.running_mean.copy_(torch.tensor([1.0, 0.0]))
    norm.running_var.copy_(torch.tensor([4.0, 1.0]))
    # Channel 0: mean 2, biased variance 1; channel 1: mean 0, variance 9.
    batch = torch.tensor([[[[1.0, 3.0]], [[-3.0, 3.0]]]])
    with norm_distance([norm]) as distance:
        norm(batch)
        norm(batch)
    one = math.hypot(1 - 4, 9 - 1) + math.hypot(2 - 1, 0)
    assert float(distance.total()) == pytest.approx(2 * one)
    norm(batch)  # the hooks are gone
    assert len(distance.terms) == 2


def test_inversion_loss_is_the_weighted_sum_of_its_terms() -> None:
    members, batch, labels = [model(1), model(2)], images(6), balanced_labels(6, 3)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    weights = InversionWeights(total_variation=0.5, batch_norm=2.0, per_member=False)
    loss = inversion_loss(members, batch, labels, weights)
    mean = ((members[0](batch) + members[1](batch)) / 2).detach().double().numpy()
    entropy = -np.log(softmax(mean, axis=1)[range(6), labels.numpy()]).mean()
    assert float(loss.cross_entropy) == pytest.approx(entropy, rel=1e-5)
    total = loss.cross_entropy + 0.5 * loss.total_variation + 2 * loss.batch_norm
    assert float(loss.total.detach()) == pytest.approx(float(total), rel=1e-6)
    shared = inversion_loss(members, batch, labels, InversionWeights(per_member=True))
    assert float(shared.batch_norm) == pytest.approx(float(loss.batch_norm) / 2)
    layers = [m for member in members for m in member.modules() if isinstance(m, nn.BatchNorm2d)]
    with norm_distance(members) as distance:
        for member in members:
            member(batch)
    assert len(distance.terms) == len(layers) == 2 * 20


def test_jitter_rolls_by_at_most_two_pixels() -> None:
    batch = torch.zeros(1, 1, 9, 9)
    batch[..., 4, 4] = 1
    draw = torch.Generator().manual_seed(0)
    places = {tuple(jitter(batch, draw)[0, 0].nonzero()[0].tolist()) for _ in range(300)}
    assert places == {(row, column) for row in range(2, 7) for column in range(2, 7)}


def test_teacher_adapt_updates_only_the_adapted_statistics() -> None:
    member, batch = model(1), images(16, 5) * 3 + 1
    teacher = Teacher([member])
    plain, adapted = teacher.logits(batch)
    assert torch.equal(plain, adapted)
    first = member.conv1(batch)
    before, spread = member.bn1.running_mean.clone(), member.bn1.running_var.clone()
    teacher.adapt(batch)
    moved = teacher.adapted[0].bn1
    # torch's momentum: 0.9 of the old and 0.1 of the batch's statistics, with the unbiased variance
    torch.testing.assert_close(moved.running_mean, 0.9 * before + 0.1 * first.mean((0, 2, 3)))
    torch.testing.assert_close(moved.running_var, 0.9 * spread + 0.1 * first.var((0, 2, 3)))
    assert torch.equal(member.bn1.running_mean, before)
    again, after = teacher.logits(batch)
    assert torch.equal(again, plain)
    assert not torch.allclose(after, adapted)
    assert teacher.adapted[0].conv1.weight is member.conv1.weight


def test_teacher_logits_are_the_mean_over_members() -> None:
    batch = images(3)
    plain, _ = Teacher([model(1), model(2)]).logits(batch)
    torch.testing.assert_close(plain, (model(1)(batch) + model(2)(batch)).detach() / 2)


def kl(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> float:
    p, q = (softmax(x.double().numpy() / temperature, axis=1) for x in (teacher, student))
    return float(rel_entr(p, q).sum(axis=1).mean()) * temperature**2


def test_distillation_loss_equals_scipy() -> None:
    student, plain, adapted = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(3))
    assert float(divergence(student, plain, 20.0)) == pytest.approx(kl(plain, student, 20), rel=1e-3)
    found = distillation_loss(student, plain, adapted, 0.25, temperature=4.0)
    assert float(found) == pytest.approx(
        0.25 * kl(adapted, student, 4) + 0.75 * kl(plain, student, 4), rel=1e-4
    )
    assert float(divergence(plain, plain, 20.0)) == pytest.approx(0, abs=1e-6)


def test_personal_loss_is_the_sum_of_its_three_terms() -> None:
    logits, cluster, own = torch.randn(3, 6, 3, generator=torch.Generator().manual_seed(4))
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    entropy = -np.log(softmax(logits.double().numpy(), axis=1)[range(6), labels.numpy()]).mean()
    expected = entropy + 0.5 * kl(cluster, logits, 1) + 0.3 * kl(own, logits, 1)
    assert float(personal_loss(logits, labels, cluster, own)) == pytest.approx(expected, rel=1e-5)
