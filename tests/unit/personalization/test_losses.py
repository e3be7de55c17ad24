from __future__ import annotations

import math

import pytest
import torch
from monai.losses import DiceLoss

from personalization.errors import LabelError
from personalization.losses import soft_dice_loss


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
