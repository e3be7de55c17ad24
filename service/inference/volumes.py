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
from typing_extensions import override

from model_store.errors import ArtefactDamaged
from model_store.preprocessing import PreparedVolume, VolumeGrid, outputs_of, slab_axis_of, windowed
from model_store.preprocessing.volume_restore import as_logits
from model_store.preprocessing.windows import slide, window_count
from model_store.task import Task
from service.inference.sessions import GraphSession, Outputs
from service.inference.shift import MomentSums

# Patches after the first, which takes longer than the others since a library chooses its kernels.
_PATCHES_TO_TELL = 3
# Voxels of all windows of a volume that a graph takes at once, which holds all their features.
MOST_TOGETHER = 2**20


class Between:
    """What happens between two steps of the work on a scan: this one lets it run to its end.

    `rested` are the seconds that the work waited for others, which are none of its own.
    """

    rested = 0.0

    def look(self) -> None:
        """Between two planes, while a scan is prepared or restored. What it raises ends the work."""

    def before_run(self, done: int, total: int, seconds: float | None) -> None:
        """Before each run of the network.

        `done` patches or slices of `total` are done, and all are expected to take `seconds`, None while that
        is not known. What it raises ends the work.
        """
        del done, total, seconds
        self.look()


class Checked(Between):
    """Ends the work where a check raises."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check

    @override
    def look(self) -> None:
        self.check()


class TakesLonger(Exception):
    """A scan would take longer than a client is to wait for its answer."""


class Deadline(Between):
    """Ends the work on a scan that would take more than some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @override
    def before_run(self, done: int, total: int, seconds: float | None) -> None:
        """Raises TakesLonger, and what `look` raises."""
        self.look()
        if seconds is not None and seconds > self.seconds:
            raise TakesLonger(f"{total} runs, of which {done} are done, would take {seconds:.0f} s")


class Pace:
    """How long a scan takes: by the patches or slices that are done, before that by the last scan's."""

    def __init__(self, session: GraphSession, total: int, between: Between) -> None:
        self._session, self._total, self._between = session, total, between
        self._began: tuple[int, float] | None = None

    def before_run(self, done: int) -> None:
        """Look, when `done` are done; the pace is noted for the graph's next scan."""
        now = time.monotonic() - self._between.rested
        if done and self._began is None:
            self._began = (done, now)
        if self._began is not None and done > max(self._began[0], _PATCHES_TO_TELL):
            self._session.seconds_each = (now - self._began[1]) / (done - self._began[0])
        each = self._session.seconds_each
        self._between.before_run(done, self._total, None if each is None else each * self._total)


def patches_of(grid: VolumeGrid, task: Task) -> int:
    """Number of runs of the network that a volume takes."""
    geometry = task.geometry
    assert geometry is not None
    windows = window_count(grid.shape, geometry.patch, geometry.overlap, geometry.window)
    return windows << len(geometry.mirror)


def is_taken_together(grid: VolumeGrid, task: Task) -> bool:
    """Whether a graph may take all windows of a volume at once; not where it answers mirrored ones too."""
    geometry = task.geometry
    assert geometry is not None
    voxels = patches_of(grid, task) * math.prod(geometry.patch)
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
    between: Between,
    *,
    together: NDArray[np.float32] | None = None,
    moments: MomentSums | None = None,
) -> Iterator[NDArray[np.float32]]:
    """Run the network on a prepared volume.

    Args:
        prepared: the volume, prepared for the task.
        task: of the network.
        session: the loaded graph.
        stage: a context for each stage, by name, that is timed.
        between: looked at before each run.
        together: `all_windows`, for a graph that takes a scan as one batch; they are run at once.
        moments: takes those of every patch.

    Yields:
        The planes [K, ...] of `windowed`, of the kind that the task averages.

    Raises:
        ValueError: the network gives no probabilities for a patch.
        ArtefactDamaged: it gives another number of answers than it got patches.
    """
    geometry, regions = task.geometry, bool(task.regions)
    assert geometry is not None
    total, counted = patches_of(prepared.grid, task), itertools.count()
    pace = Pace(session, total, between)

    at_once: Outputs | None = None
    if together is not None:
        between.before_run(0, total, None)
        with stage("inference"):
            at_once = session.run_alone(together)
        count = len(_averaged(at_once, task))
        if count != len(together):
            raise ArtefactDamaged(
                f"graph {session.digest}: expected an answer for each of {len(together)} patches, found "
                f"{count}; withdraw the model or publish it again"
            )

    def run(patch: NDArray[np.float32]) -> NDArray[np.float32]:
        found: NDArray[np.float32]
        index = next(counted)
        if at_once is None:
            pace.before_run(index)
            with stage("inference"):
                outputs, index = session.run_alone(patch[np.newaxis]), 0
            if moments is not None:
                moments.add(outputs.moments)
        else:
            outputs = at_once
        found = _averaged(outputs, task)[index]
        if found.shape != (task.out_channels, *geometry.patch):
            raise ValueError(
                f"expected {outputs_of(task)} {[task.out_channels, *geometry.patch]} of a patch, "
                f"found {list(found.shape)}"
            )
        if outputs_of(task) == "logits" and outputs.logits is None:
            return as_logits(found, regions=regions)
        return found

    return windowed(prepared.volume, prepared.grid, task, run)


def _averaged(outputs: Outputs, task: Task) -> NDArray[np.float32]:
    """What is averaged over windows [S, K, ...], or the probabilities that its logits are taken from."""
    if outputs_of(task) == "logits" and outputs.logits is not None:
        return outputs.logits
    return outputs.probabilities
