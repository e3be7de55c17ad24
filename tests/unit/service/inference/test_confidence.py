"""Confidence by label, against loops over pixels and on cases worked out by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.task import Task
from service.inference.confidence import SoftDice, agreement

# Classes: background, rim of the disc, cup.
NESTED = Task(name="optic", labels={"disc": (1, 2), "cup": (2,)}, size=(16, 16))
ORGAN = Task(name="organ", labels={"organ": (1,)}, size=(16, 16))
REGIONS = Task(
    name="tumour",
    labels={"core": (2,), "whole": (1, 2)},
    regions=("whole", "core"),
    geometry={"spacing": (1.0, 1.0, 1.0), "patch": (16, 16, 16)},
)


def of(task: Task, *batches: NDArray[np.float32]) -> dict[str, float]:
    """The confidence after all batches."""
    found = SoftDice(task)
    for each in batches:
        found.add(each)
    return found.values


def pixels(*probabilities: tuple[float, ...]) -> NDArray[np.float32]:
    """One picture, one pixel high."""
    return np.array(probabilities, np.float32).T[np.newaxis, :, np.newaxis, :]


def by_loop(p_SKHW: NDArray[np.float32], label: str) -> float:
    """The definition of NESTED's labels, pixel by pixel."""
    classes = {"disc": (1, 2), "cup": (2,)}[label]
    soft = hard = shared = 0.0
    slices, _, height, width = p_SKHW.shape
    for s, i, j in product(range(slices), range(height), range(width)):
        p = [float(value) for value in p_SKHW[s, :, i, j]]
        of_label = sum(p[index] for index in classes)
        y = p.index(max(p)) in classes
        soft, hard, shared = soft + of_label, hard + y, shared + of_label * y
    return 2 * shared / (soft + hard)


def test_confidence_of_two_pixels_matches_the_hand_computed_value() -> None:
    # p = 0.8, 0.4 and y = 1, 0: 2 * 0.8 / (1.2 + 1).
    assert of(ORGAN, pixels((0.2, 0.8), (0.6, 0.4)))["organ"] == pytest.approx(1.6 / 2.2)


def test_confidence_of_nested_labels_equals_the_loop_however_slices_come() -> None:
    p = np.random.default_rng(3).dirichlet((1, 1, 1), (5, 8, 6)).astype(np.float32).transpose(0, 3, 1, 2)
    for found in (of(NESTED, p), of(NESTED, p[:2], p[2:])):
        assert found == pytest.approx({label: by_loop(p, label) for label in ("disc", "cup")}, rel=1e-6)


def test_confidence_of_a_large_picture_keeps_its_digits() -> None:
    p = np.random.default_rng(4).random((1, 1, 512, 512), np.float32)
    p = np.concatenate([1 - p, p], axis=1)
    exact, y = p[0, 1].astype(np.float64), p[0, 1] > p[0, 0]
    assert of(ORGAN, p)["organ"] == pytest.approx(2 * exact[y].sum() / (exact.sum() + y.sum()), rel=1e-6)


def test_confidence_of_regions_decides_pixels_as_the_served_mask_does() -> None:
    # Whole and core at 0.9; whole alone at 0.5, which is not above a half; core without whole, which the
    # served mask gives both labels.
    p = pixels((0.9, 0.9), (0.5, 0.1), (0.2, 0.6))
    found = of(REGIONS, p)
    assert found["whole"] == pytest.approx(2 * (0.9 + 0.2) / (0.9 + 0.5 + 0.2 + 2))
    assert found["core"] == pytest.approx(2 * (0.9 + 0.6) / (0.9 + 0.1 + 0.6 + 2))


def test_empty_answer_is_as_sure_as_its_least_sure_background() -> None:
    assert of(ORGAN, pixels((0.99, 0.01), (0.9, 0.1)), pixels((0.7, 0.3)))["organ"] == pytest.approx(0.7)
    # A slice with the label ends that, whether it is the first or the last.
    full, empty = pixels((0.2, 0.8)), pixels((0.7, 0.3))
    assert of(ORGAN, full, empty)["organ"] == of(ORGAN, empty, full)["organ"] == pytest.approx(1.6 / 2.1)
    assert of(ORGAN)["organ"] == 1


def test_agreement_is_dice_by_label_and_1_where_neither_has_it() -> None:
    one, other = (np.array(each, np.uint8) for each in ([[0, 1, 2, 2]], [[0, 1, 1, 2]]))
    assert agreement(one, other, NESTED) == {"disc": 1.0, "cup": pytest.approx(2 / 3)}
    nothing = np.zeros_like(one)
    assert agreement(nothing, nothing, NESTED) == {"disc": 1.0, "cup": 1.0}
    assert agreement(one, nothing, NESTED) == {"disc": 0.0, "cup": 0.0}
    with pytest.raises(ValueError, match="one grid"):
        agreement(one, nothing.T, NESTED)
