from __future__ import annotations

import math

import pytest
import torch
from monai.losses import DiceLoss

from personalization.errors import LabelError
from personalization.losses import LOSSES, cross_entropy, soft_dice_loss


def test_soft_dice_loss_over_the_batch_matches_hand_computed_value() -> None:
    # Two images of two pixels. p(class 1): 1/2, 3/4 | 1/4, 1/2; truth: 1, 1 | 0, 0.
    half, three = 0.0, math.log(3)
    logits = torch.tensor([[[[0.0, 0.0]], [[half, three]]], [[[0.0, 0.0]], [[-three, half]]]])
    target = torch.tensor([[[1, 1]], [[0, 0]]])
    eps = 1e-5
    # Class 1: overlap 1/2 + 3/4, sum p = 2, sum g = 2. Class 0: overlap 3/4 + 1/2, sum p = 2, sum g = 2.
    expected = 1 - (2 * 1.25 + eps) / (4 + eps)
    assert float(soft_dice_loss(logits, target)) == pytest.approx(expected, abs=1e-6)


def test_soft_dice_loss_of_a_batch_differs_from_the_mean_of_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 4, 4, generator=generator)
    target = torch.zeros(3, 4, 4, dtype=torch.uint8)
    target[0, :2] = 1
    single = torch.stack([soft_dice_loss(logits[i : i + 1], target[i : i + 1]) for i in range(3)]).mean()
    assert abs(float(soft_dice_loss(logits, target) - single)) > 0.01


def test_soft_dice_loss_equals_monai() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 8, 8, generator=generator)
    target = torch.randint(0, 3, (2, 8, 8), generator=generator)
    reference = DiceLoss(
        softmax=True, to_onehot_y=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5, include_background=True
    )
    assert float(soft_dice_loss(logits, target)) == pytest.approx(
        float(reference(logits, target[:, None])), abs=1e-6
    )


def test_soft_dice_loss_gradient_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 3, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 3, (2, 2, 3), generator=generator)
    assert torch.autograd.gradcheck(lambda x: soft_dice_loss(x, target), (logits,))


def test_soft_dice_loss_of_a_correct_all_background_prediction_is_zero() -> None:
    target = torch.zeros(2, 4, 4, dtype=torch.uint8)
    confident = torch.stack([torch.full((2, 4, 4), 50.0), torch.full((2, 4, 4), -50.0)], dim=1)
    assert float(soft_dice_loss(confident, target)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("value", [2, -1])
def test_soft_dice_loss_rejects_a_label_outside_the_classes(value: int) -> None:
    target = torch.zeros(1, 4, 4, dtype=torch.int64)
    target[0, 0, 0] = value
    with pytest.raises(LabelError, match=r"expected classes 0\.\.1"):
        soft_dice_loss(torch.zeros(1, 2, 4, 4), target)


def test_soft_dice_loss_rejects_a_shape_mismatch() -> None:
    with pytest.raises(LabelError, match=r"expected shape \[1, 4, 4\], found \[1, 1, 4, 4\]"):
        soft_dice_loss(torch.zeros(1, 2, 4, 4), torch.zeros(1, 1, 4, 4, dtype=torch.int64))


def by_pixels(name: str, p: torch.Tensor, g: torch.Tensor) -> float:
    """A loss from probabilities and truths [B, K, pixels], term by term."""
    classes = p.shape[1]
    eps = 1e-5
    ratios, logs = [], []
    for c in range(classes):
        tp, fp, fn = (
            float(x) for x in ((p * g)[:, c].sum(), (p * (1 - g))[:, c].sum(), ((1 - p) * g)[:, c].sum())
        )
        if name == "tversky":
            ratios.append(1 - (tp + eps) / (tp + 0.3 * fp + 0.7 * fn + eps))
        else:
            ratios.append(1 - (2 * tp + eps) / (2 * tp + fp + fn + eps))
    found = sum(ratios) / classes
    for b, c, at in ((b, c, at) for b in range(len(p)) for c in range(classes) for at in range(p.shape[2])):
        hit = float(p[b, c, at])
        one = float(g[b, c, at])
        right = hit if one else 1 - hit
        logs.append((one, right))
    if name == "dice_ce":
        found += -sum(math.log(right) for one, right in logs if one) / (len(p) * p.shape[2])
    if name == "dice_focal":
        found += -sum((1 - right) ** 2 * math.log(right) for one, right in logs if one) / len(logs)
    return found


@pytest.mark.parametrize("name", ["dice_ce", "dice_focal", "tversky"])
@pytest.mark.parametrize("sides", [(4, 3), (2, 3, 2)])
def test_loss_of_monai_is_a_sum_over_pixels(name: str, sides: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, *sides, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 3, (2, *sides), generator=generator, dtype=torch.uint8)
    truth = torch.nn.functional.one_hot(target.long(), 3).movedim(-1, 1).flatten(2).double()
    expected = by_pixels(name, logits.softmax(1).flatten(2), truth)
    assert float(LOSSES[name].function(logits, target)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_equals_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 3, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 3, (2, 2, 3), generator=generator)
    # MONAI's focal loss computes in float32.
    how = {"eps": 1e-3, "atol": 2e-3} if name == "dice_focal" else {}
    assert torch.autograd.gradcheck(lambda x: LOSSES[name].function(x, target), (logits,), **how)
    regions = torch.randint(0, 2, (2, 3, 2, 3), generator=generator)
    assert torch.autograd.gradcheck(lambda x: LOSSES[name].function(x, regions), (logits,), **how)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.kinds == ("segmentation",)])
def test_batch_without_foreground_has_a_small_loss_where_none_is_found(name: str) -> None:
    target = torch.zeros(2, 4, 4, dtype=torch.uint8)
    confident = torch.stack([torch.full((2, 4, 4), 50.0), torch.full((2, 4, 4), -50.0)], dim=1)
    assert float(LOSSES[name].function(confident, target)) == pytest.approx(0, abs=1e-6)
    assert float(LOSSES[name].function(-confident, target)) > 0.5
    with pytest.raises(LabelError, match=r"expected shape \[2, 4, 4\], found \[2, 1, 4, 4\]"):
        LOSSES[name].function(confident, target[:, None])
    with pytest.raises(LabelError, match=r"expected classes 0\.\.1, found 2\.\.2"):
        LOSSES[name].function(confident, target + 2)


@pytest.mark.parametrize("name", LOSSES)
def test_regions_are_labels_that_may_overlap(name: str) -> None:
    """Two labels, of which the second is inside the first: each by a sigmoid."""
    outer = torch.tensor([[[1, 1, 1, 0]]])
    inner = torch.tensor([[[0, 1, 0, 0]]])
    target = torch.stack([outer, inner], dim=1)
    right = torch.where(target > 0, 30.0, -30.0)
    loss = LOSSES[name].function
    assert float(loss(right, target)) == pytest.approx(0, abs=1e-4)
    # Every logit moves its own label alone.
    logits = torch.zeros(1, 2, 1, 4, requires_grad=True)
    loss(logits, target).backward()
    assert bool(((logits.grad < 0) == (target > 0)).all())


def test_cross_entropy_of_regions_is_the_binary_one() -> None:
    logits, target = torch.tensor([[[0.0], [math.log(3)]]]), torch.tensor([[[1], [0]]])
    expected = (math.log(2) + math.log(4)) / 2
    assert float(cross_entropy(logits, target)) == pytest.approx(expected)
