"""What a network sees of a scan, as pictures of the slices that a person sees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from model_store.preprocessing import display_slices, geometry_of, prepare, prepare_volume
from model_store.scan import Scan
from model_store.task import Task
from service.worker.pictures import seen_slices

SIDES = (16, 32, 48)
VOLUMES = Task.model_validate(
    {
        "name": "organ",
        "labels": {"organ": [1]},
        "normalisation": {"scope": "volume", "method": "none"},
        "geometry": {"spacing": None, "patch": [8, 8, 8]},
    }
)


def slices_of(size: tuple[int, int], **fields: object) -> Task:
    as_is = {"name": "organ", "labels": {"organ": [1]}, "normalisation": {"method": "none"}}
    return Task.model_validate({**as_is, "size": size, **fields})


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("signs", [(1, 1, 1), (-1, 1, -1), (-1, -1, 1)])
def test_what_a_network_sees_lies_as_the_scan_that_is_shown(
    order: tuple[int, int, int], signs: tuple[int, int, int]
) -> None:
    affine = np.eye(4)
    affine[:3, :3] = np.eye(3)[:, order] * np.array(signs)
    voxels = np.random.default_rng(0).uniform(0, 1, (*SIDES, 1)).astype(np.float32)
    scan = Scan(voxels, affine, "nifti", mm_per_unit=1.0)
    prepared, geometry = prepare_volume(scan, VOLUMES), geometry_of(scan, VOLUMES)
    shown = display_slices(scan, VOLUMES)
    seen = seen_slices(prepared, geometry, VOLUMES)
    assert len(seen) == len(shown)
    for index, picture in enumerate(seen):
        assert correlation(picture, shown[index]) > 0.99
    _, rows, columns = geometry.slices
    task = slices_of((rows, columns))
    by_slice = seen_slices(prepare(scan, task), geometry, task)
    assert all(correlation(one, other) > 0.99 for one, other in zip(seen, by_slice, strict=True))


def test_a_resized_slice_stays_in_its_place() -> None:
    pixels = np.zeros((24, 24), np.float32)
    pixels[8:16, 6:18] = 1
    scan, task = Scan(pixels[..., None], None, "png"), slices_of((32, 32))
    (picture,) = seen_slices(prepare(scan, task), geometry_of(scan, task), task)
    assert np.array_equal(picture[..., 0] > 127, pixels > 0)


def test_pictures_have_the_slices_sides_and_colours() -> None:
    colours = np.random.default_rng(1).uniform(0, 255, (20, 30, 3)).astype(np.float32)
    scan, task = Scan(colours, None, "png"), slices_of((16, 32), channels=3)
    (picture,) = seen_slices(prepare(scan, task), geometry_of(scan, task), task)
    assert picture.shape == (20, 30, 3)
    assert not np.array_equal(picture[..., 0], picture[..., 1])
    near = slices_of((16, 16), neighbours=1)
    one = np.random.default_rng(2).uniform(0, 9, (16, 16, 1, 1))
    voxels = np.arange(3)[None, None, :, None] + one
    stack = Scan(voxels.astype(np.float32), np.diag([-1.0, -1.0, 1.0, 1.0]), "nifti", mm_per_unit=1.0)
    found = seen_slices(prepare(stack, near), geometry_of(stack, near), near)
    assert [each.mean() for each in found] == sorted(each.mean() for each in found)
