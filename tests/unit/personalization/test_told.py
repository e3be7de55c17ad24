"""What partly annotated masks can tell: losses and scores without labels that are not told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_store.task import IGNORED as OF_TASKS
from model_store.task import Task
from personalization.losses import LOSSES, Loss
from personalization.metrics import dice_by_label, foreground_dice
from personalization.told import IGNORED
from training.local.masks import told_by
from training.methods.registry import method

SEGMENTING = [name for name, loss in LOSSES.items() if "segmentation" in loss.kinds]
THREE = Task(name="three", labels={"a": (1,), "b": (2,), "c": (3,)}, size=(16, 16))
NESTED = Task(name="nested", labels={"disc": (1, 2), "cup": (2,)}, size=(16, 16))
REGIONS = Task.model_validate(
    {
        "name": "regions",
        "labels": {"whole": [1, 2], "core": [2], "apart": [3]},
        "regions": ["whole", "core", "apart"],
        "geometry": {"spacing": [1, 1, 1], "patch": [8, 8, 8]},
    }
)


def batch(channels: int, most: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, channels, 6, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    return logits, torch.randint(0, most + 1, (2, 6, 5), generator=draw).to(torch.uint8)


def loss_of(name: str, task: Task) -> Loss:
    """A loss as methods take it."""
    config = method("fedavg").config
    found: Loss = config(loss=name).loss_for(task)
    return found


def test_the_mark_of_a_place_without_truth_is_the_tasks() -> None:
    assert IGNORED == OF_TASKS


@pytest.mark.parametrize("name", SEGMENTING)
@pytest.mark.parametrize("task", [THREE, REGIONS], ids=["classes", "regions"])
def test_loss_with_ignored_pixels_is_that_of_the_other_pixels(name: str, task: Task) -> None:
    ignoring = task.model_copy(update={"ignore": (255,)})
    told, loss = told_by(ignoring), loss_of(name, task)
    assert told is not None
    logits, targets = batch(task.out_channels, 3)
    targets[:, :2] = IGNORED
    found = told.loss(loss)(logits, targets)
    (slope,) = torch.autograd.grad(found, logits)
    assert not slope[:, :, :2].any()
    assert slope[:, :, 2:].any()
    assert found.item() == pytest.approx(loss(logits[:, :, 2:], targets[:, 2:]).item(), rel=1e-6)
    assert told.loss(loss)(logits, torch.full_like(targets, IGNORED)).item() == 0
    # Where all is known, the loss is the same.
    known = batch(task.out_channels, 3)[1]
    assert told.loss(loss)(logits, known).item() == loss(logits, known).item()


def test_background_of_a_site_that_does_not_draw_a_label_may_be_it() -> None:
    told = told_by(THREE, ["b"])
    assert told is not None
    logits, _ = batch(4, 0)
    targets = torch.tensor([0, 1, 3], dtype=torch.uint8).repeat(20).reshape(2, 6, 5)
    found = told.loss(loss_of("cross-entropy", THREE))(logits, targets).item()
    p = torch.softmax(logits.detach(), dim=1).movedim(1, -1).reshape(-1, 4)
    # On background, b is out of the softmax; on a and c it is wrong.
    there = targets.flatten() == 0
    p[there, 2] = 0
    p[there] /= p[there].sum(dim=1, keepdim=True)
    right = p[range(len(p)), targets.flatten().tolist()]
    assert found == pytest.approx(-right.log().mean().item())
    # Of Dice, the classes are {background, b}, a and c.
    dice = told.loss(loss_of("dice", THREE))(logits, targets).item()
    three = torch.stack([p[:, 0] + p[:, 2], p[:, 1], p[:, 3]], dim=1)
    truth = torch.stack([targets.flatten() == value for value in (0, 1, 3)], dim=1).double()
    terms = (2 * (three * truth).sum(0) + 1e-5) / (three.sum(0) + truth.sum(0) + 1e-5)
    assert dice == pytest.approx(1 - terms.mean().item())
    (slope,) = torch.autograd.grad(told.loss(loss_of("dice_ce", THREE))(logits, targets), logits)
    assert not slope.movedim(1, -1)[targets == 0][:, 2].any()


def test_a_nested_label_that_is_not_drawn_is_part_of_the_other() -> None:
    told = told_by(NESTED, ["cup"])
    assert told is not None
    assert told.groups == (0, 1, 1)
    found, truth = told.compared(torch.tensor([[0, 1, 2, 2]]), torch.tensor([[0, 1, 1, 0]]))
    assert (found.tolist(), truth.tolist()) == ([[0, 1, 1, 1]], [[0, 1, 1, 0]])


@pytest.mark.parametrize("name", SEGMENTING)
def test_a_region_that_is_not_drawn_adds_nothing(name: str) -> None:
    told, loss = told_by(REGIONS, ["core"]), LOSSES[name].function
    assert told is not None
    logits, targets = batch(3, 0)
    targets = torch.tensor([0, 1, 3], dtype=torch.uint8).repeat(20).reshape(2, 6, 5)
    found = told.loss(loss_of(name, REGIONS))(logits, targets)
    (slope,) = torch.autograd.grad(found, logits)
    assert not slope[:, 1].any()
    wanted = torch.stack([targets == 1, targets == 3], dim=1).double()
    assert found.item() == pytest.approx(loss(logits[:, [0, 2]], wanted).item(), rel=1e-6)


def test_scores_leave_out_what_masks_cannot_tell() -> None:
    told = told_by(THREE.model_copy(update={"ignore": (255,)}), ["b"])
    assert told is not None
    answer = torch.tensor([[1, 1, 2, 2, 3, 3]], dtype=torch.uint8)
    truth = torch.tensor([[1, 0, 0, 0, 3, IGNORED]], dtype=torch.uint8)
    seen = told.compared(answer, truth)
    (labels,) = dice_by_label(*seen, ["p"], [[1], [2], [3]]).values()
    assert labels[0] == pytest.approx(2 / 3)
    assert labels[1].isnan()
    assert labels[2] == 1
    assert foreground_dice(*seen, ["p"], 4)["p"] == pytest.approx(5 / 6)


def test_masks_that_tell_everything_need_nothing() -> None:
    assert told_by(THREE) is None
