"""DENSE's generator and its loss, against hand-computed cases and the formulas of the authors' code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from personalization.dense import Generator, disagreement, ensemble_logits, generator_loss
from personalization.networks import build, initialise

CLASSES = 3


def classifier(seed: int) -> nn.Module:
    """In float64, with running statistics that no fresh network has."""
    draw = torch.Generator().manual_seed(seed)
    network = initialise(build("resnet18", in_channels=1, classes=CLASSES, width=1), draw).double().train()
    with torch.no_grad():
        network.linear.weight.mul_(20)
        for _ in range(5):
            network(torch.randn(8, 1, 8, 8, generator=draw).double())
    return network.eval()


def test_disagreement_of_two_classes_by_hand() -> None:
    """The first image is predicted alike and counts 0; the second has p = (3/4, 1/4), q = (1/4, 3/4)."""
    teacher = torch.tensor([[5.0, 0.0], [math.log(3), 0.0]])
    student = torch.tensor([[1.0, 0.0], [0.0, math.log(3)]])
    divergence = 0.75 * math.log(3) + 0.25 * math.log(1 / 3)
    assert disagreement(teacher, student).item() == pytest.approx(-divergence / 2)
    assert disagreement(teacher, teacher).item() == 0


def test_the_loss_is_that_of_plain_formulas() -> None:
    """Cross-entropy of the mean logits, per-layer norms divided by the members, masked divergence."""
    members, student = [classifier(4), classifier(7)], classifier(5)
    images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(3)).double()
    labels = torch.arange(16) % CLASSES
    inputs: list[tuple[nn.BatchNorm2d, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda m, taken, _: inputs.append((m, taken[0])))
        for member in members
        for module in member.modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    with torch.no_grad():
        logits = (members[0](images) + members[1](images)) / 2
        answers = student(images)
    for handle in handles:
        handle.remove()
    expected = -torch.log_softmax(logits, 1)[range(16), labels].mean()
    norms = sum(
        torch.linalg.vector_norm(m.running_var - x.transpose(0, 1).flatten(1).var(1, unbiased=False))
        + torch.linalg.vector_norm(m.running_mean - x.transpose(0, 1).flatten(1).mean(1))
        for m, x in inputs
    )
    p, q = torch.softmax(logits, 1), torch.softmax(answers, 1)
    differ = (logits.argmax(1) != answers.argmax(1)).double()
    assert 0 < differ.sum() < 16
    adversarial = -((p * (p / q).log()).sum(1) * differ).mean()
    found = generator_loss(members, student, images, labels, 0.3, 0.7)
    torch.testing.assert_close(found.total, expected + 0.3 * norms / 2 + 0.7 * adversarial)
    torch.testing.assert_close(found.disagreement, adversarial)
    torch.testing.assert_close(ensemble_logits(members, images), logits)


def test_the_loss_changes_no_statistics_of_members_and_student() -> None:
    networks = [classifier(seed) for seed in range(3)]
    before = [{name: t.clone() for name, t in network.state_dict().items()} for network in networks]
    images = torch.randn(4, 1, 8, 8).double().requires_grad_()
    loss = generator_loss(networks[:2], networks[2].train(), images, torch.tensor([0, 1, 2, 0]), 1.0, 1.0)
    torch.autograd.backward(loss.total, inputs=[images])
    assert images.grad is not None
    for network, state in zip(networks, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 30, 17)])
def test_generated_images_have_the_shape_of_the_task_and_are_standardised(
    shape: tuple[int, int, int],
) -> None:
    draw = torch.Generator().manual_seed(0)
    generator = initialise(Generator(16, 4, shape), draw)
    images = generator(torch.randn(8, 16, generator=draw))
    assert images.shape == (8, *shape)
    whole = (0, 2, 3)
    # The cut rows of an image are normalised with it.
    atol = 0.01 if shape == (1, 28, 28) else 0.3
    torch.testing.assert_close(images.mean(whole), torch.zeros(shape[0]), atol=atol, rtol=0)
    torch.testing.assert_close(images.std(whole), torch.ones(shape[0]), atol=atol, rtol=0)
    again = initialise(Generator(16, 4, shape), torch.Generator().manual_seed(0))
    assert all(
        torch.equal(t, again.state_dict()[n]) for n, t in generator.state_dict().items() if "weight" in n
    )
