from __future__ import annotations

import math

import pytest
import torch
from monai.metrics import compute_dice
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from torch.nn.functional import one_hot

from personalization.errors import LabelError
from personalization.metrics import (
    accuracy,
    balanced_accuracy,
    dice,
    dice_by_label,
    dice_by_patient,
    foreground_dice,
)

# Pixels of two images, two classes. First: 1 of 2 and 3 foreground pixels shared. Second: empty twice.
PRED = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.uint8)
TRUE = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.uint8)


def test_dice_matches_hand_computed_values() -> None:
    value = dice(PRED, TRUE, classes=2)
    assert value.dtype == torch.float64
    assert value[0].tolist() == pytest.approx([2 * 1 / (3 + 2), 2 * 1 / (2 + 3)])
    assert float(value[1, 0]) == 1.0
    assert math.isnan(float(value[1, 1]))


@pytest.mark.parametrize(("empty", "expected"), [("one", 1.0), ("zero", 0.0)])
def test_dice_of_an_empty_class_follows_the_empty_option(empty: str, expected: float) -> None:
    assert float(dice(PRED, TRUE, 2, empty=empty)[1, 1]) == expected  # type: ignore[arg-type]
    assert float(dice(PRED, TRUE, 2, empty=empty)[0, 1]) == pytest.approx(0.4)  # type: ignore[arg-type]


def test_dice_equals_monai_on_random_volumes() -> None:
    generator = torch.Generator().manual_seed(3)
    pred = torch.randint(0, 4, (5, 6, 7, 3), generator=generator)
    true = torch.randint(0, 3, (5, 6, 7, 3), generator=generator)
    reference = compute_dice(
        one_hot(pred, 4).movedim(-1, 1), one_hot(true, 4).movedim(-1, 1), include_background=True
    )
    # MONAI gives NaN for a class absent from the truth even when it was predicted; Dice is 0 there
    ours = dice(pred, true, classes=4)
    assert torch.allclose(ours[:, :3], reference[:, :3].double(), atol=1e-6)
    assert bool((ours[:, 3] == 0).all())


def test_dice_by_label_is_that_of_the_union_of_its_classes() -> None:
    """Disc is classes 1 and 2, cup is 2; the second patient has neither in mask and prediction."""
    gt = torch.tensor([[[1, 1, 2, 2]], [[0, 0, 0, 0]]])
    pred = torch.tensor([[[1, 2, 2, 0]], [[0, 0, 0, 0]]])
    found = dice_by_label(pred, gt, ("a", "b"), ((1, 2), (2,)))
    assert found["a"].tolist() == [pytest.approx(2 * 3 / 7), pytest.approx(2 * 1 / 4)]
    assert found["b"].isnan().all()


def test_dice_by_patient_pools_slices_before_the_ratio() -> None:
    pred = torch.tensor([[[1, 1]], [[0, 0]], [[2, 0]], [[0, 1]]])
    true = torch.tensor([[[1, 0]], [[0, 0]], [[2, 2]], [[1, 1]]])
    found = dice_by_patient(pred, true, ["b", "a", "b", "b"], classes=3)
    assert list(found) == ["b", "a"]
    # Patient b: class 1 shares 2 of 3 and 3 pixels, class 2 shares 1 of 1 and 2.
    assert found["b"][1:].tolist() == pytest.approx([4 / 6, 2 / 3])
    means = foreground_dice(pred, true, ["b", "a", "b", "b"], classes=3)
    assert means["b"] == pytest.approx(2 / 3)
    assert math.isnan(means["a"])


@pytest.mark.parametrize("where", ["prediction", "ground truth"])
@pytest.mark.parametrize("value", [2, -1])
def test_dice_rejects_values_outside_the_classes(where: str, value: int) -> None:
    good, bad = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)
    bad[0, 2] = value
    pair = (bad, good) if where == "prediction" else (good, bad)
    with pytest.raises(LabelError, match=rf"{where}: expected classes 0\.\.1"):
        dice(*pair, classes=2)


def test_dice_rejects_wrong_shapes_types_and_name_counts() -> None:
    with pytest.raises(LabelError, match=r"prediction: expected shape \[1, 5\], found \[2, 5\]"):
        dice(PRED, TRUE[:1], 2)
    with pytest.raises(LabelError, match=r"expected integer class indices, found torch\.float32"):
        dice(PRED.float(), TRUE, 2)
    with pytest.raises(LabelError, match=r"class indices \[B, ...\]"):
        dice(PRED[0], TRUE[0], 2)
    with pytest.raises(LabelError, match=r"one name per slice \(2\), found 1"):
        dice_by_patient(PRED, TRUE, ["a"], 2)


class TestAccuracy:
    """Metrics of tasks with one class per image."""

    def test_accuracy_matches_hand_computed_values(self) -> None:
        true = torch.tensor([0, 0, 0, 0, 2, 2])
        pred = torch.tensor([0, 0, 0, 1, 2, 0])
        assert accuracy(pred, true, 3) == pytest.approx(4 / 6)
        # Class 1 is absent from the truth: the mean over classes 0 and 2, 3/4 and 1/2.
        assert balanced_accuracy(pred, true, 3) == pytest.approx((3 / 4 + 1 / 2) / 2)

    def test_accuracy_equals_scikit_learn(self) -> None:
        pred, true = torch.randint(0, 5, (2, 200), generator=torch.Generator().manual_seed(0))
        assert accuracy(pred, true, 5) == pytest.approx(accuracy_score(true, pred))
        assert balanced_accuracy(pred, true, 9) == pytest.approx(balanced_accuracy_score(true, pred))

    def test_accuracy_of_no_images_is_nan(self) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        assert math.isnan(accuracy(none, none, 3))
        assert math.isnan(balanced_accuracy(none, none, 3))

    def test_accuracy_rejects_invalid_classes_and_shapes(self) -> None:
        with pytest.raises(LabelError, match=r"0\.\.1"):
            accuracy(torch.tensor([0, 2]), torch.tensor([0, 1]), 2)
        with pytest.raises(LabelError, match="one class per image"):
            balanced_accuracy(torch.zeros(2, 2).long(), torch.zeros(2, 2).long(), 2)
