"""The windows by which a network sees a volume: where they start, how they are weighted, and their average.

The patch of a network's training is the window of its validation and of its serving. Training validates with
these functions, and the service runs onnxruntime with them, patch by patch, in bounded memory: `slide` keeps
a slab of sums one patch thick, and gives the planes on which no later window lies.

Shape suffixes: C channels, K outputs, X Y Z voxels of the network's grid, P the sides of a patch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

WindowRule = Literal["gaussian", "constant", "nnunet"]
Shape = tuple[int, ...]
Values = TypeVar("Values", bound=np.generic)

# MONAI's and nnU-Net's: the sigma of the weights as a share of a patch's side.
_SIGMA = 0.125
# MONAI's least weight, of a largest of 1.
_LEAST_WEIGHT = 1e-3
# nnU-Net's largest weight, which keeps half precision from underflow at a patch's corners.
_NNUNET_LARGEST = 10
# nnU-Net's Gaussian is scipy's, which is cut off after so many sigmas.
_TRUNCATE = 4.0


def padding(shape: Sequence[int], patch: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Voxels to add before and after each axis that is shorter than the patch; of an odd number, one more
    after it. MONAI and nnU-Net pad so, with zeros."""
    missing = [max(0, wanted - side) for side, wanted in zip(shape, patch, strict=True)]
    return tuple((each // 2, each - each // 2) for each in missing)


def starts(side: int, patch: int, overlap: float, rule: WindowRule) -> tuple[int, ...]:
    """First voxels of the windows along an axis of `side` voxels, at least `patch`, ascending.

    MONAI's (`dense_patch_slices`): steps of int(patch · (1 - overlap)), the last window moved inside.
    nnU-Net's (`compute_steps_for_sliding_window`): as many windows as such steps need, spread evenly.
    A patch of one voxel is at each.
    """
    if side < patch:
        raise ValueError(f"expected at least {patch} voxels, those of the patch, found {side}; pad first")
    if patch == 1:
        return tuple(range(side))
    room = side - patch
    if rule == "nnunet":
        count = math.ceil(room / (patch * (1 - overlap))) + 1
        step = room / (count - 1) if count > 1 else 0.0
        return tuple(round(step * index) for index in range(count))
    step = max(1, int(patch * (1 - overlap)))
    count = math.ceil(room / step) + 1
    return tuple(min(index * step, room) for index in range(count))


def windows(
    shape: Sequence[int], patch: Sequence[int], overlap: float, rule: WindowRule = "gaussian"
) -> list[Shape]:
    """First voxels of all windows of a volume, the last axis fastest; each side is at least the patch's."""
    sides = zip(shape, patch, strict=True)
    return list(itertools.product(*(starts(side, own, overlap, rule) for side, own in sides)))


def window_count(
    shape: Sequence[int], patch: Sequence[int], overlap: float, rule: WindowRule = "gaussian"
) -> int:
    """How many windows a volume of any sides takes."""
    sides = zip(shape, patch, strict=True)
    return math.prod(len(starts(max(side, own), own, overlap, rule)) for side, own in sides)


def tiles(shape: Sequence[int], patch: Sequence[int]) -> list[Shape]:
    """First voxels of windows side by side, the last of each axis moved inside, the last axis fastest.

    For what measures or learns: each voxel is seen about once. An axis shorter than the patch has
    one window, from 0.
    """
    sides = zip(shape, patch, strict=True)
    return list(
        itertools.product(
            *(
                sorted({min(start, max(side - own, 0)) for start in range(0, side, own)})
                for side, own in sides
            )
        )
    )


def evenly_drawn(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, evenly spaced."""
    if count <= most:
        return list(range(count))
    return [int((index + 0.5) * count / most) for index in range(most)]


def cut(values: NDArray[Values], corner: Shape, patch: Shape) -> NDArray[Values]:
    """The patch of a volume [..., X, Y, Z] at a corner: [..., P...], with zeros where `slide` pads."""
    spatial = values.shape[-len(patch) :]
    inside = tuple(slice(start, start + side) for start, side in zip(corner, patch, strict=True))
    margins = padding(spatial, patch)
    place: tuple[Any, ...] = (..., *inside)
    found: NDArray[Values] = values[place]
    if not any(map(any, margins)):
        return found
    return np.pad(found, (*((0, 0) for _ in values.shape[: -len(patch)]), *margins))


@lru_cache(maxsize=8)
def weights(patch: Shape, rule: WindowRule = "gaussian") -> NDArray[np.float32]:
    """The weights [P…] of a patch's voxels in the average over windows; read-only."""
    if rule == "constant":
        found = np.ones(patch, np.float32)
    elif rule == "gaussian":
        found = np.ones(patch, np.float32)
        for axis, side in enumerate(patch):
            from_middle = np.arange(side, dtype=np.float32) - np.float32((side - 1) / 2)
            bell = np.exp(from_middle**2 / np.float32(-2 * (_SIGMA * side) ** 2))
            found = found * _along(bell, axis, len(patch))
        found = np.maximum(found, np.float32(max(float(found.min()), _LEAST_WEIGHT)))
    else:
        bells = np.ones(patch)
        for axis, side in enumerate(patch):
            sigma = _SIGMA * side
            distance = np.arange(side) - side // 2
            bell = np.exp(-0.5 * (distance / sigma) ** 2)
            bell[np.abs(distance) > int(_TRUNCATE * sigma + 0.5)] = 0
            bells = bells * _along(bell, axis, len(patch))
        halves = (bells * _NNUNET_LARGEST).astype(np.float16)
        halves[halves == 0] = halves[halves > 0].min()
        found = halves.astype(np.float32)
    found.flags.writeable = False
    return found


def slide(
    volume_CXYZ: NDArray[np.float32],
    patch: Shape,
    overlap: float,
    rule: WindowRule,
    predict: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    *,
    axis: int = 0,
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Average what a network says of a volume over its windows, in memory for one slab.

    Args:
        volume_CXYZ: the network's input; sides shorter than the patch's are padded here.
        patch, overlap, rule: of the task's geometry. By `nnunet`, sums are rounded to half precision after
            every window, as nnU-Net's are, which its masks depend on where a network is undecided.
        predict: from one patch [C, P…] to its outputs [K, P…]; called once per window, in order.
        axis: along which the slab moves, 0 to 2; see `slab_axis`.

    Yields:
        Each place along `axis`, ascending and without the padding, and the average there: [K, …] over the
        two other axes in their order.
    """
    shape = volume_CXYZ.shape[1:]
    margins = padding(shape, patch)
    if any(map(any, margins)):
        volume_CXYZ = np.pad(volume_CXYZ, ((0, 0), *margins))
    padded = volume_CXYZ.shape[1:]
    # Below, the slab's axis is the first.
    turn = (axis, *(other for other in range(len(shape)) if other != axis))
    weight = weights(patch, rule).transpose(turn)
    inside = [slice(margins[each][0], margins[each][0] + shape[each]) for each in turn]
    own = np.float16 if rule == "nnunet" else np.float32
    slab = tuple(patch[axis] if each == axis else padded[each] for each in turn)
    total, sums = np.zeros((1, *slab), own), np.zeros((0, *slab), own)
    along, *across = (starts(padded[each], patch[each], overlap, rule) for each in turn)
    for start, after in zip(along, [*along[1:], padded[axis]], strict=True):
        for places in itertools.product(*across):
            corner = [start, *places]
            window = [
                slice(corner[turn.index(each)], corner[turn.index(each)] + patch[each])
                for each in range(len(shape))
            ]
            outputs = predict(volume_CXYZ[(slice(None), *window)])
            if outputs.ndim != len(patch) + 1 or outputs.shape[1:] != patch:
                raise ValueError(
                    f"expected outputs [K, *{list(patch)}] of a patch, found {list(outputs.shape)}"
                )
            if not np.isfinite(outputs.sum()):
                raise ValueError("expected finite outputs, found NaN or infinity: a broken graph")
            if not len(sums):
                sums = np.zeros((len(outputs), *slab), own)
            here: tuple[slice, ...] = (slice(None), *(window[each] for each in turn[1:]))
            for each, output in zip((*sums, *total), (*outputs, 1.0), strict=True):
                product = weight * (output.transpose(turn) if isinstance(output, np.ndarray) else 1)
                np.add(each[here], product, out=each[here], casting="unsafe")
        for index in range(start, after):
            if inside[0].start <= index < inside[0].stop:
                plane: tuple[int | slice, ...] = (slice(None), index - start, *inside[1:])
                yield index - inside[0].start, (sums[plane] / total[plane]).astype(np.float32)
        for each in (*sums, *total):
            _move_down(each, after - start)


def slab_axis(shape: Sequence[int], patch: Sequence[int]) -> int:
    """The axis along which a slab of one patch is the smallest share of the volume; the first of equals."""
    shares = [own / max(side, own) for side, own in zip(shape, patch, strict=True)]
    return shares.index(min(shares))


def slab_bytes(shape: Sequence[int], patch: Sequence[int], outputs: int, axis: int) -> int:
    """Bytes of the sums that `slide` keeps."""
    padded = [max(side, own) for side, own in zip(shape, patch, strict=True)]
    return 4 * (outputs + 1) * patch[axis] * (math.prod(padded) // padded[axis])


def _move_down(planes: NDArray[np.floating], count: int) -> None:
    """Move planes [P, …] down by `count` in place, and clear those that come free."""
    left = len(planes) - count
    for index in range(left):
        planes[index] = planes[index + count]
    planes[left:] = 0


def _along(values: NDArray[np.floating], axis: int, axes: int) -> NDArray[np.floating]:
    return values.reshape([-1 if each == axis else 1 for each in range(axes)])
