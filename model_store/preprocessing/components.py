"""Keep the largest connected component of labels, in memory for some planes of a volume.

Voxels that touch at a face, an edge or a corner are one component. Labels of 32 bits of a whole CT would need
a gigabyte, so components are found slab by slab, joined where slabs meet, and found again to be cleared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model_store.preprocessing.forward import no_look
from model_store.task import Task

# Voxels of a slab: 16 MiB of labels.
_SLAB: Final = 2**22


def keep_largest(
    classes: NDArray[np.uint8], task: Task, slab: int = _SLAB, look: Callable[[], None] = no_look
) -> Mapping[str, int]:
    """Keep the largest component of each label in the task's `keep_largest`, in place and in that order.

    A voxel elsewhere loses the label: it gets the class with the most of its other labels, which is
    background where there is none. So a cup beside the largest one becomes disc, and a disc beside the
    largest one, cup and all, background. Of equal components, one is kept.

    Args:
        classes: class indices [H, W] or [I, J, K] of one scan; changed.
        task: of the network.
        slab: voxels to label together.
        look: called before each slab; what it raises ends the work.

    Returns:
        How many voxels each of the labels lost.
    """
    return {label: _keep(classes, _without(task, label), slab, look) for label in task.keep_largest}


def _without(task: Task, label: str) -> NDArray[np.uint8]:
    """[K]: the class that each class becomes where it loses a label; its own where it has not got it."""
    found = np.arange(len(task.classes), dtype=np.uint8)
    for own in task.classes:
        if label in own.labels:
            left = {*own.labels} - {label}
            parts = [each for each in task.classes if {*each.labels} <= left]
            found[own.index] = max(parts, key=lambda each: (len(each.labels), -each.index)).index
    return found


def _keep(classes: NDArray[np.uint8], lost: NDArray[np.uint8], slab: int, look: Callable[[], None]) -> int:
    has_label = lost != np.arange(len(lost))
    sizes: list[NDArray[np.int64]] = []
    touching: list[NDArray[np.int64]] = []
    above: NDArray[np.int64] | None = None
    count = 0
    for place in _slabs(classes.shape, slab):
        look()
        labelled, found = _components(has_label[classes[place]])
        sizes.append(np.bincount(labelled.ravel(), minlength=found + 1)[1:])
        first, last = (labelled[..., end].astype(np.int64) for end in (0, -1))
        first[first > 0] += count
        last[last > 0] += count
        if above is not None:
            touching.append(_touching(above, first))
        above, count = last, count + found
    if count < 2:
        return 0
    joined = _joined(touching, count)
    of_component = np.bincount(joined, weights=np.concatenate(sizes))
    largest, removed, before = int(of_component.argmax()), 0, 0
    for place, own in zip(_slabs(classes.shape, slab), sizes, strict=True):
        elsewhere = np.append(False, joined[before : before + len(own)] != largest)
        before += len(own)
        if not elsewhere.any():
            continue
        look()
        here = classes[place]
        gone = elsewhere[_components(has_label[here])[0]]
        here[gone] = lost[here[gone]]
        removed += int(gone.sum())
    return removed


def _slabs(shape: tuple[int, ...], voxels: int) -> Iterator[tuple[Any, ...]]:
    """Places of slabs across the last axis, which is the slowest of a mask that is restored."""
    *plane, depth = shape
    step = max(1, voxels // max(1, int(np.prod(plane))))
    for start in range(0, depth, step):
        yield (..., slice(start, start + step))


def _components(member: NDArray[np.bool_]) -> tuple[NDArray[np.int32], int]:
    # A sixth of the service's imports, which tasks without `keep_largest` do not need.
    from scipy import ndimage

    return ndimage.label(member, np.ones((3,) * member.ndim, np.int8))  # type: ignore[no-any-return]


def _touching(above: NDArray[np.int64], below: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs [M, 2] of components in two planes with voxels that touch."""
    pairs = [np.empty((0, 2), np.int64)]
    for shift in itertools.product((-1, 0, 1), repeat=above.ndim):
        moved = list(zip(shift, above.shape, strict=True))
        here = tuple(slice(max(0, by), side + min(0, by)) for by, side in moved)
        there = tuple(slice(max(0, -by), side + min(0, -by)) for by, side in moved)
        one, other = above[here], below[there]
        both = (one > 0) & (other > 0)
        pairs.append(np.unique(np.stack([one[both], other[both]], axis=1), axis=0))
    return np.concatenate(pairs)


def _joined(touching: list[NDArray[np.int64]], count: int) -> NDArray[np.int32]:
    """[count]: which component each one of a slab belongs to."""
    pairs = np.concatenate([np.empty((0, 2), np.int64), *touching]) - 1
    from scipy import sparse
    from scipy.sparse import csgraph

    graph = sparse.coo_array((np.ones(len(pairs), np.int8), pairs.T), shape=(count, count))
    found: NDArray[np.int32] = csgraph.connected_components(graph, directed=False)[1]
    return found
