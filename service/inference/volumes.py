"""Run a network on a volume by windows: one patch per run, planes given as they are done.

One patch per run keeps the memory of activations small, and a run's deadline, the client's leaving and a
job's cancelling are looked at between patches. Several at once would not be faster on a CPU.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.errors import ArtefactDamaged
from model_store.preprocessing import PreparedVolume, outputs_of, slab_axis_of, windowed
from model_store.preprocessing.volume_restore import as_logits
from model_store.preprocessing.windows import slide, starts
from model_store.task import Task
from service.inference.sessions import GraphSession, Outputs

# Patches after the first, which takes longer than the others since a library chooses its kernels.
_PATCHES_TO_TELL = 3
# Voxels of all windows of a volume that a graph takes at once, which holds all their features.
MOST_TOGETHER = 2**20

# Called before each patch with the number of patches done, of all, and the seconds that all are expected to
# take, None while that is not known. What it raises ends the run.
BetweenPatches = Callable[[int, int, float | None], None]


def never_ended(done: int, total: int, seconds: float | None) -> None:
    """Let a volume run to its end."""
    del done, total, seconds


class TakesLonger(Exception):
    """A volume would take longer than a client is to wait for its answer."""


class Deadline:
    """Ends a volume between two patches: when it is not wanted any more, or would take too long."""

    def __init__(self, seconds: float, check_wanted: Callable[[], None]) -> None:
        """`check_wanted` raises where the answer is not wanted any more."""
        self._seconds, self._check_wanted = seconds, check_wanted

    def __call__(self, done: int, total: int, seconds: float | None) -> None:
        """Look before the next patch. Raises TakesLonger, and what `check_wanted` raises."""
        self._check_wanted()
        if seconds is not None and seconds > self._seconds:
            raise TakesLonger(f"{total} patches, of which {done} are done, would take {seconds:.0f} s")


class _Pace:
    """How long all patches of a volume take: by those that are done, before that by the last volume's."""

    def __init__(self, session: GraphSession, total: int) -> None:
        self._session, self._total = session, total
        self._first_done = 0.0

    def seconds(self, done: int) -> float | None:
        """Expected seconds, when `done` patches are done; it is noted for the graph's next volume."""
        now = time.monotonic()
        if done == 1:
            self._first_done = now
        if done > _PATCHES_TO_TELL:
            self._session.seconds_per_patch = (now - self._first_done) / (done - 1)
        each = self._session.seconds_per_patch
        return None if each is None else each * self._total


def patches_of(prepared: PreparedVolume, task: Task) -> int:
    """Number of runs of the network that a volume takes."""
    geometry = task.geometry
    assert geometry is not None
    sides = zip(prepared.grid.shape, geometry.patch, strict=True)
    windows = math.prod(
        len(starts(max(side, own), own, geometry.overlap, geometry.window)) for side, own in sides
    )
    return windows << len(geometry.mirror)


def is_taken_together(prepared: PreparedVolume, task: Task) -> bool:
    """Whether a graph may take all windows of a volume at once; not where it answers mirrored ones too."""
    geometry = task.geometry
    assert geometry is not None
    voxels = patches_of(prepared, task) * math.prod(geometry.patch)
    return not geometry.mirror and voxels <= MOST_TOGETHER


def all_windows(prepared: PreparedVolume, task: Task) -> NDArray[np.float32]:
    """The patches [n, C, P...] of all windows of a volume, in the order of `slide`."""
    geometry = task.geometry
    assert geometry is not None
    seen: list[NDArray[np.float32]] = []

    def note(patch: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(patch.copy())
        return patch[:1]

    axis = slab_axis_of(prepared.grid, task)
    for _ in slide(prepared.volume, geometry.patch, geometry.overlap, geometry.window, note, axis=axis):
        pass
    return np.stack(seen)


def outputs_of_volume(
    prepared: PreparedVolume,
    task: Task,
    session: GraphSession,
    stage: Callable[[str], Any],
    between: BetweenPatches,
    *,
    together: NDArray[np.float32] | None = None,
) -> Iterator[NDArray[np.float32]]:
    """Run the network on a prepared volume.

    Args:
        prepared: the volume, prepared for the task.
        task: of the network.
        session: the loaded graph.
        stage: a context for each stage, by name, that is timed.
        between: see `BetweenPatches`.
        together: `all_windows`, for a graph that takes a scan as one batch; they are run at once.

    Yields:
        The planes [K, ...] of `windowed`, of the kind that the task averages.

    Raises:
        ValueError: the network gives no probabilities for a patch.
        ArtefactDamaged: it gives another number of answers than it got patches.
    """
    geometry, regions = task.geometry, bool(task.regions)
    assert geometry is not None
    total, counted = patches_of(prepared, task), itertools.count()
    pace = _Pace(session, total)

    at_once: Outputs | None = None
    if together is not None:
        between(0, total, None)
        with stage("inference"):
            at_once = session.run_alone(together)
        if len(at_once.probabilities) != len(together):
            raise ArtefactDamaged(
                f"graph {session.digest}: expected an answer for each of {len(together)} patches, found "
                f"{len(at_once.probabilities)}; withdraw the model or publish it again"
            )

    def run(patch: NDArray[np.float32]) -> NDArray[np.float32]:
        found: NDArray[np.float32]
        index = next(counted)
        if at_once is None:
            between(index, total, pace.seconds(index))
            with stage("inference"):
                outputs, index = session.run_alone(patch[np.newaxis]), 0
        else:
            outputs = at_once
        found = outputs.probabilities[index]
        if found.shape != (task.out_channels, *geometry.patch):
            raise ValueError(
                f"expected probabilities {[task.out_channels, *geometry.patch]} of a patch, "
                f"found {list(found.shape)}"
            )
        if outputs_of(task) == "probabilities":
            return found
        return as_logits(found, regions=regions) if outputs.logits is None else outputs.logits[index]

    return windowed(prepared.volume, prepared.grid, task, run)
