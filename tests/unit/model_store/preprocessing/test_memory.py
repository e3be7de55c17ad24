"""Memory of a tilted volume until its mask is restored, and the check of its size beforehand."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.errors import ScanTooLarge
from model_store.preprocessing import Restorer, check_restorable, geometry_of, prepare, restore
from model_store.scan import Scan
from model_store.task import Normalisation, Task


def tilted(shape: tuple[int, int, int], degrees: float = 30) -> Scan:
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    affine = np.array([[c, 0, s, 0], [0, 1, 0, 0], [-s, 0, c, 0], [0, 0, 0, 1]])
    return Scan(np.broadcast_to(np.int16(0), (*shape, 1)), affine, "nifti")


def segmenting(classes: int, size: tuple[int, int]) -> Task:
    return Task(name="organs", labels={f"organ {i}": (i,) for i in range(1, classes)}, size=size)


def probable(slices: int, classes: int, size: tuple[int, int]) -> NDArray[np.float32]:
    found = np.random.default_rng(0).random((slices, classes, *size), np.float32)
    found /= found.sum(axis=1, keepdims=True)
    return found


def test_restorer_holds_the_probabilities_of_a_tilted_volume_once() -> None:
    size = (128, 128)
    geometry = geometry_of(tilted((32, 32, 32)), segmenting(5, size))
    assert geometry.resampled
    probabilities = probable(geometry.slices[0], 5, size)
    expected = restore(probabilities, geometry)
    tracemalloc.start()
    restorer = Restorer(geometry)
    for start in range(0, len(probabilities), 4):
        restorer.add(probabilities[start : start + 4])
    mask = restorer.finish()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(mask, expected)
    assert len(np.unique(mask)) == 5
    assert peak < 1.3 * probabilities.nbytes


@pytest.mark.parametrize("plane", ["axial", "sagittal"])
def test_normalisation_of_a_volume_takes_one_slice_at_a_time(plane: str) -> None:
    scan = Scan(np.zeros((128, 128, 128, 1), np.int16), np.eye(4), "nifti")
    normalisation = Normalisation(scope="volume", percentiles=(1, 99))
    task = Task(name="t", labels={"a": (1,)}, size=(16, 16), plane=plane, normalisation=normalisation)
    tracemalloc.start()
    prepare(scan, task)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < scan.voxels.nbytes / 4


def test_restorer_rejects_a_batch_with_another_number_of_classes() -> None:
    size = (32, 32)
    geometry = geometry_of(tilted((16, 16, 16)), segmenting(3, size))
    restorer = Restorer(geometry)
    restorer.add(probable(4, 3, size))
    for classes in (1, 2, 4):
        with pytest.raises(ValueError, match=f"expected 3 classes as in the first slices, found {classes}"):
            restorer.add(probable(4, classes, size))


def test_check_restorable_rejects_a_tilted_volume_with_too_many_classes() -> None:
    shape, size = (64, 64, 128), (512, 512)
    scan = tilted(shape)
    slices = geometry_of(scan, segmenting(2, size)).slices[0]
    fitting = 2**28 // (slices * 512 * 512)
    most = segmenting(fitting, size)
    check_restorable(geometry_of(scan, most), most)
    # Training and adaptation restore no mask, so they accept it.
    more = segmenting(fitting + 1, size)
    tilt = geometry_of(scan, more)
    assert tilt.resampled
    with pytest.raises(
        ScanTooLarge, match=f"tilted by 30 degrees, and {fitting + 1} classes in {slices} axial"
    ):
        check_restorable(tilt, more)
    # For an upright volume each slice is decided as it arrives.
    check_restorable(geometry_of(tilted(shape, 0), more), more)
