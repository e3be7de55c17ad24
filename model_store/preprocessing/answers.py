"""Make the answer to a scan of what its network gives: the mask that is served is the mask that is scored.

Training, gates, checks and the service call this, each with its own way to run the network: torch or
onnxruntime. Windows, mirrored passes, restoring and the largest components are here and nowhere else.

Shape suffixes: B slices of a run, C channels, K outputs of the network per voxel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.preprocessing.components import keep_largest
from model_store.preprocessing.forward import Prepared, no_look, prepare
from model_store.preprocessing.geometry import Geometry
from model_store.preprocessing.grid import VolumeGrid
from model_store.preprocessing.restore import Restorer
from model_store.preprocessing.volume_restore import Outputs, VolumeRestorer, slab_axis_of
from model_store.preprocessing.volumes import PreparedVolume, prepare_volume
from model_store.preprocessing.windows import slide
from model_store.scans.types import Scan
from model_store.task import Task

# A run of a network: [B, C, ...] -> [B, K, ...], of the kind that `outputs_of` says.
Run = Callable[[NDArray[np.float32]], NDArray[np.float32]]
# Times a stage of the work, by its name.
Stage = Callable[[str], AbstractContextManager[Any]]


def prepare_for(task: Task, scan: Scan, look: Callable[[], None] = no_look) -> Prepared | PreparedVolume:
    """The input of the task's network: `prepare_volume` of a scan, or `prepare`. Raises as they do."""
    return prepare_volume(scan, task, look) if task.is_volume else prepare(scan, task, look)


def outputs_of(task: Task) -> Outputs:
    """What a `Run` gives: probabilities, or logits where the task averages them over windows."""
    return "probabilities" if task.geometry is None else task.geometry.average


def answer(prepared: Prepared | PreparedVolume, task: Task, run: Run, at_once: int = 8) -> NDArray[np.uint8]:
    """Class indices on the scan's own grid, [H, W] or [I, J, K].

    `at_once` slices are run together; of a volume, one patch. Raises ValueError for outputs that are none of
    the task's.
    """
    if isinstance(prepared, PreparedVolume):
        planes = windowed(prepared.volume, prepared.grid, task, lambda patch: run(patch[np.newaxis])[0])
        return finish(prepared.grid, task, planes)[0]
    slices = prepared.slices
    batches = (run(slices[start : start + at_once]) for start in range(0, len(slices), at_once))
    return finish(prepared.geometry, task, batches)[0]


def windowed(
    volume: NDArray[np.float32],
    grid: VolumeGrid,
    task: Task,
    run: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> Iterator[NDArray[np.float32]]:
    """The average over windows, and over the mirrored passes of each, as planes [K, ...] for `finish`.

    `volume` and `grid` are a `PreparedVolume`'s. `run` takes a patch [C, P...] and gives its outputs
    [K, P...]; it is called once per window and mirroring.
    """
    geometry = task.geometry
    assert geometry is not None
    flips = [
        tuple(axis + 1 for axis in axes)
        for count in range(len(geometry.mirror) + 1)
        for axes in itertools.combinations(geometry.mirror, count)
    ]

    def mirrored(patch: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(flips) == 1:
            return run(patch)
        mean: NDArray[np.float32] | None = None
        for axes in flips:
            found = np.flip(run(np.flip(patch, axes)), axes)
            mean = found.copy() if mean is None else np.add(mean, found, out=mean)
        assert mean is not None
        mean /= np.float32(len(flips))
        return mean

    axis = slab_axis_of(grid, task)
    planes = slide(volume, geometry.patch, geometry.overlap, geometry.window, mirrored, axis=axis)
    return (plane for _, plane in planes)


def finish(
    grid: Geometry | VolumeGrid,
    task: Task,
    outputs: Iterable[NDArray[np.float32]],
    stage: Stage = nullcontext,
    look: Callable[[], None] = no_look,
) -> tuple[NDArray[np.uint8], Mapping[str, int]]:
    """Restore the outputs of a whole scan, and keep the largest components that the task says.

    Args:
        grid: the geometry of the prepared scan, or the grid of the prepared volume.
        task: of the network.
        outputs: of the slices in their order, probabilities [B, K, H, W]; of a volume those of `windowed`.
        stage: times `restore`.
        look: called before each plane, within a large one, and before each slab of components; what it
            raises ends the work.

    Returns:
        Class indices on the scan's own grid, and how many voxels each label lost, as `keep_largest` says.

    Raises:
        ValueError: outputs of another shape or number, or that are not finite.
    """
    restorer: Restorer | VolumeRestorer
    if isinstance(grid, VolumeGrid):
        restorer = VolumeRestorer(grid, task, slab_axis_of(grid, task), outputs_of(task), look)
    else:
        restorer = Restorer(grid, look)
    for each in outputs:
        with stage("restore"):
            restorer.add(each)
    with stage("restore"):
        classes = restorer.finish()
        return classes, keep_largest(classes, task, look=look)
