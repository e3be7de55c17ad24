"""Restore a mask on the scan's own grid from the network's probabilities, which are upsampled first.

Taking the argmax first and enlarging the labels would give jagged borders. With upsampled probabilities, the
border is where the network was undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model_store.errors import ScanTooLarge
from model_store.preprocessing.forward import no_look
from model_store.preprocessing.geometry import MOST_ELEMENTS, Geometry
from model_store.preprocessing.resample import sample
from model_store.preprocessing.slices import network_to_slices, unstacked
from model_store.task import Task

# With a smaller difference, rounding could decide between two classes (see `_two_classes`).
_UNDECIDED = 2e-6


def check_restorable(geometry: Geometry, task: Task) -> None:
    """Raise ScanTooLarge for an oblique volume if a `Restorer` would need too much memory."""
    count, (height, width), classes = geometry.slices[0], geometry.size, len(task.classes)
    if geometry.resampled and count * classes * height * width > MOST_ELEMENTS:
        raise ScanTooLarge(
            f"the volume is tilted by {geometry.tilt_degrees:.0f} degrees, and {classes} classes in {count} "
            f"{task.plane} slices are too many to restore at once for task '{task.name}'; send a part of "
            "the volume, or resample it upright"
        )


def restore(probabilities: NDArray[np.float32], geometry: Geometry) -> NDArray[np.uint8]:
    """Compute class indices on the scan's own grid, [H, W] or [I, J, K].

    Args:
        probabilities: [S, K, H, W] of the slices that `prepare` made.
        geometry: the geometry that `prepare` returned with them.

    The class with the highest probability wins; among equals, the lowest index. Raises ValueError if
    probabilities have another shape or are not finite.
    """
    restorer = Restorer(geometry)
    restorer.add(probabilities)
    return restorer.finish()


class Restorer:
    """Restores batch by batch: the probabilities of a whole volume need not be in memory at once.

    What becomes of a slice is `_write`'s: here the most probable class.
    """

    def __init__(self, geometry: Geometry, look: Callable[[], None] = no_look) -> None:
        """`look` is called before each plane, and before each class of one that is enlarged."""
        self._geometry = geometry
        self._look = look
        self._filled = 0
        # Oblique volumes interpolate across slices, so they keep all probabilities until `finish`.
        self._kept: NDArray[np.float32] | None = None
        self._labels = np.empty((0, 0, 0), np.uint8)
        if not geometry.resampled:
            self._labels = np.empty(geometry.slices, np.uint8)

    def add(self, probabilities: NDArray[np.float32]) -> None:
        """Add the next slices' probabilities [s, K, H, W]."""
        expected = self._geometry.size
        if probabilities.ndim != 4 or probabilities.shape[2:] != expected:
            raise ValueError(
                f"probabilities: expected [slices, classes, {expected[0]}, {expected[1]}], "
                f"found {list(probabilities.shape)}"
            )
        if self._filled + len(probabilities) > self._geometry.slices[0]:
            raise ValueError(
                f"probabilities: expected {self._geometry.slices[0]} slices, "
                f"found {self._filled + len(probabilities)}"
            )
        # Probabilities are in [0, 1], so their sum is finite if and only if all of them are.
        if not np.isfinite(probabilities.sum()):
            raise ValueError("probabilities: expected finite numbers, found NaN or infinity: a broken graph")
        if self._geometry.resampled:
            self._keep(probabilities)
        else:
            for index, stack in enumerate(probabilities, self._filled):
                self._look()
                self._write(stack, self._labels[index])
        self._filled += len(probabilities)

    def finish(self) -> NDArray[np.uint8]:
        """Return the mask. Every slice must have been added."""
        if self._filled != self._geometry.slices[0]:
            raise ValueError(
                f"probabilities: expected {self._geometry.slices[0]} slices, found {self._filled}"
            )
        if self._kept is not None:
            return _onto_own_grid(self._kept, self._geometry, self._write, self._look)
        if self._geometry.to_own is None:
            own: NDArray[np.uint8] = self._labels[0]
        else:
            own = unstacked(self._labels, self._geometry)
        return own

    def _write(self, stack: NDArray[np.float32], found: NDArray[np.uint8]) -> None:
        """Write the voxels [R, C] of a slice's probabilities [K, H, W], which may have another size."""
        rows, columns = found.shape
        decide(stack, (rows, columns), found, self._look)

    def _keep(self, probabilities: NDArray[np.float32]) -> None:
        """Copy into one array [S, K, H, W]; joining batches at the end would need twice the memory."""
        if self._kept is None:
            self._kept = np.empty((self._geometry.slices[0], *probabilities.shape[1:]), np.float32)
        classes = self._kept.shape[1]
        if probabilities.shape[1] != classes:
            raise ValueError(
                f"probabilities: expected {classes} classes as in the first slices, "
                f"found {probabilities.shape[1]}"
            )
        self._kept[self._filled : self._filled + len(probabilities)] = probabilities


class PercentRestorer(Restorer):
    """Restores one map [S, 1, H, W] of values in 0..1, as whole percents, by the same interpolation."""

    def _write(self, stack: NDArray[np.float32], found: NDArray[np.uint8]) -> None:
        rows, columns = found.shape
        plane = stack[0] if stack.shape[1:] == found.shape else _resized(stack[0], (rows, columns))
        np.rint(100 * plane.clip(0, 1), out=found, casting="unsafe")


def decide(
    stack: NDArray[np.float32],
    shape: tuple[int, int],
    labels: NDArray[np.uint8],
    look: Callable[[], None] = no_look,
) -> None:
    """Write the class indices [R, C] of probabilities [K, H, W] into `labels`."""
    if stack.shape[1:] == shape:
        _argmax(stack, labels)
    elif len(stack) == 2:
        _two_classes(stack, shape, labels)
    else:
        _argmax(_looking((_resized(plane, shape) for plane in stack), look), labels)


def _looking(
    planes: Iterable[NDArray[np.float32]], look: Callable[[], None]
) -> Iterator[NDArray[np.float32]]:
    for plane in planes:
        look()
        yield plane


def _two_classes(stack: NDArray[np.float32], shape: tuple[int, int], labels: NDArray[np.uint8]) -> None:
    """Resize the difference of two classes (resizing is linear), or both classes if it is near a tie."""
    difference = _resized(stack[1] - stack[0], shape)
    if float(np.abs(difference).min()) > _UNDECIDED:
        np.greater(difference, 0, out=labels)
    else:
        _argmax((_resized(plane, shape) for plane in stack), labels)


def _argmax(planes: Iterable[NDArray[np.float32]], labels: NDArray[np.uint8]) -> None:
    """Compute np.argmax over planes [H, W], one by one: of many classes, all would not fit in memory."""
    if isinstance(planes, np.ndarray) and len(planes) == 2:
        np.greater(planes[1], planes[0], out=labels)
        return
    remaining = iter(planes)
    labels[...] = 0
    best = next(remaining)
    for index, plane in enumerate(remaining, 1):
        np.copyto(labels, index, where=plane > best)
        best = np.maximum(best, plane)


def _resized(plane: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    image = Image.fromarray(np.ascontiguousarray(plane, np.float32), "F")
    return np.asarray(image.resize(shape[::-1], Image.Resampling.BILINEAR))


def _onto_own_grid(
    probabilities: NDArray[np.float32],
    geometry: Geometry,
    write: Callable[[NDArray[np.float32], NDArray[np.uint8]], None],
    look: Callable[[], None],
) -> NDArray[np.uint8]:
    """Interpolate (trilinear) from the network's pixels to an oblique volume's voxels, slab by slab."""
    to_own = np.array(geometry.to_own) @ network_to_slices(geometry)
    to_network = np.asarray(np.linalg.inv(to_own), np.float64)
    i, j, k = geometry.grid
    labels = np.empty((i, j, k), np.uint8, order="F")
    slab = np.empty((probabilities.shape[1], i, j, 1), np.float32)
    for index in range(k):
        look()
        for channel, target in enumerate(slab):
            sample(probabilities[:, channel], to_network, target, (0, 0, index), order=1, outside="nearest")
        write(slab[..., 0], labels[..., index])
    return labels
