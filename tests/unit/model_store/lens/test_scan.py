"""The lens of one scan: a cohort of one patient, used where it shows what the members' scans show."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from model_store.lens import Fingerprint, LensForScan, fit, seen_of
from model_store.lens.scan import LEAST_GRID, LEAST_SIDES
from model_store.preprocessing import Prepared, geometry_of
from model_store.scan import Scan
from model_store.task import Task
from personalization.gate.lens import lens_grid, lens_left, lens_sides

TASK = Task(name="organ", labels={"organ": (1,)}, size=(48, 48))
Slices = np.ndarray


def slices(seed: int, count: int = 4) -> Slices:
    """Slices [count, 1, 48, 48] with a bright organ off the centre."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:48, :48]
    y, x = draw.normal([20, 28], 1.0)
    organ = np.hypot(rows - y, columns - x) < draw.uniform(9, 11)
    noise = ndimage.gaussian_filter(draw.normal(size=(count, 1, 48, 48)), (0, 0, 1, 1))
    return (3.0 * organ + noise).astype(np.float32)


def prepared(images: Slices) -> Prepared:
    voxels = np.moveaxis(images[:, 0], 0, -1)[..., None]
    return Prepared(images, geometry_of(Scan(voxels, np.eye(4), "nifti"), TASK))


@pytest.fixture(scope="module")
def fingerprint() -> Fingerprint:
    members = [
        [(seed, slices(seed) ** 3 if member else slices(seed)) for seed in range(6)] for member in (0, 1)
    ]
    return Fingerprint.of([seen_of(each) for each in members])


def test_a_scan_that_looks_inverted_is_negated(fingerprint: Fingerprint) -> None:
    found = LensForScan(fingerprint).of(prepared(-slices(50)))
    assert found.lens is not None
    assert found.lens.negated
    made = fit(lambda: [("the one patient", -slices(50))], fingerprint)
    assert made is not None
    assert found.lens == made.lens


def test_a_scan_like_the_members_is_not_negated_nor_refused(fingerprint: Fingerprint) -> None:
    for seed in range(60, 70):
        found = LensForScan(fingerprint).of(prepared(slices(seed)))
        assert not found.refused
        assert found.lens is None or not found.lens.negated


def test_a_scan_that_shows_nothing_of_theirs_stays_as_it_is(fingerprint: Fingerprint) -> None:
    draw = np.random.default_rng(7)
    noise = ndimage.gaussian_filter(draw.normal(size=(4, 1, 48, 48)), (0, 0, 2, 2)).astype(np.float32)
    found = LensForScan(fingerprint).of(prepared(noise))
    assert found.lens is None
    assert found.refused
    constant = LensForScan(fingerprint).of(prepared(np.ones((2, 1, 48, 48), np.float32)))
    assert constant.lens is None
    assert not constant.refused


def test_a_long_scan_is_fitted_by_slices_evenly_spaced(fingerprint: Fingerprint) -> None:
    long = -np.concatenate([slices(seed, 10) for seed in range(10)])
    found = LensForScan(fingerprint).of(prepared(long))
    made = fit(lambda: [(0, long[::4])], fingerprint)
    assert made is not None
    assert found.lens == made.lens


def test_limits_are_those_of_the_gate() -> None:
    assert (lens_grid.limit, lens_sides.limit, lens_left.limit) == (LEAST_GRID, LEAST_SIDES, 1.0)
