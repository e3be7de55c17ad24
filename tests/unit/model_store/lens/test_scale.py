"""The scale of a cohort: structures that are smaller than the members', and what only looks so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from model_store.lens import Fingerprint, enlarged, scale_of, seen_of
from model_store.task import Task

SIDE = 64
Images = NDArray[np.float32]


def scans(seed: int, smaller: float = 1.0, count: int = 12) -> Images:
    """Images [N, 1, H, W] of two organs in a body, so many times smaller than usual, on a dark background."""
    draw = np.random.default_rng(seed)
    rows, columns = smaller * (np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2) / SIDE
    found = []
    for _ in range(count):
        shift = draw.normal(0, 0.02, 2)
        body = np.hypot(rows, columns) < 0.45
        organ = np.hypot(rows - 0.1 - shift[0], columns + 0.18 - shift[1]) < 0.13
        other = np.hypot(rows + 0.15, columns - 0.15) < 0.09
        texture = ndimage.gaussian_filter(draw.normal(size=(SIDE, SIDE)), 1.2)
        found.append(100 * body + 80 * organ - 60 * other + 12 * texture + draw.normal(0, 2, (SIDE, SIDE)))
    return np.stack(found).astype(np.float32)[:, np.newaxis]


@pytest.fixture(scope="module")
def fingerprint() -> Fingerprint:
    """That of four members with scanners of their own, and patients of other sizes."""
    members = []
    for seed, size, power, blur in (
        (1, 1.0, 1.0, 0.0),
        (2, 0.93, 0.8, 0.5),
        (3, 1.07, 1.3, 0.8),
        (4, 1.0, 1.1, 0.3),
    ):
        images = np.abs(scans(seed, size)) ** power
        members.append(seen_of(enumerate(ndimage.gaussian_filter(images, (0, 0, blur, blur))[:, np.newaxis])))
    return Fingerprint.of(members)


def found(fingerprint: Fingerprint, images: Images) -> float | None:
    scale = scale_of(lambda: enumerate(images[:, np.newaxis]), fingerprint)
    return None if scale is None else scale.zoom


@pytest.mark.parametrize("smaller", [1.5, 2.0, 3.0])
def test_structures_that_are_smaller_are_told_by_how_much(fingerprint: Fingerprint, smaller: float) -> None:
    assert found(fingerprint, scans(9, smaller)) == smaller


def test_slices_that_come_larger_are_seen_themselves_and_not_interpolated(fingerprint: Fingerprint) -> None:
    usual, smaller = scans(9), scans(9, 2.0)[:, np.newaxis]
    asked = []

    def larger(zoom: float) -> Callable[[], Any]:
        asked.append(zoom)
        return lambda: enumerate(usual[:, np.newaxis])

    sharp = scale_of(lambda: enumerate(smaller), fingerprint, larger)
    blurred = scale_of(lambda: enumerate(smaller), fingerprint)
    assert sharp is not None
    assert blurred is not None
    assert asked == [sharp.zoom] == [2.0]
    assert sharp.after == fingerprint.shifts(seen_of(enumerate(usual[:, np.newaxis])))
    assert sharp.after["spectrum"] < blurred.after["spectrum"]


def test_a_larger_task_is_normalised_by_the_middle_and_bounded() -> None:
    task = Task(name="t", labels={"a": (1,)}, size=(160, 400))
    larger = enlarged(task, 2.5)
    assert larger is not None
    assert (larger.size, larger.normalisation.middle) == ((400, 992), 0.4)
    assert enlarged(task, 3.0) is None
    # Of 48 pixels 72 would be 1.5 times as many, and a network takes 64 or 80.
    assert enlarged(task.model_copy(update={"size": (48, 48)}), 1.5) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda images: images,
        lambda images: images + np.random.default_rng(1).normal(0, 60, images.shape).astype(np.float32),
        lambda images: ndimage.gaussian_filter(images, (0, 0, 3, 3)),
        lambda images: images * np.linspace(0.2, 2, SIDE, dtype=np.float32),
        lambda images: -images,
        lambda images: np.sqrt(np.abs(images)),
    ],
    ids=["as-they-are", "noise", "blur", "shading", "inverted", "curve"],
)
def test_what_a_scanner_does_is_no_scale(
    fingerprint: Fingerprint, change: Callable[[Images], Images]
) -> None:
    assert found(fingerprint, change(scans(9))) is None


def test_larger_structures_are_not_told(fingerprint: Fingerprint) -> None:
    assert found(fingerprint, scans(9, 0.6)) is None


def test_images_that_say_nothing_have_no_scale(fingerprint: Fingerprint) -> None:
    assert found(fingerprint, np.zeros((3, 1, SIDE, SIDE), np.float32)) is None
    only_the_border = scans(9, 1.0)
    only_the_border[:, :, 4:-4, 4:-4] = 0
    assert found(fingerprint, only_the_border) is None
