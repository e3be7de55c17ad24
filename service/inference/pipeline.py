"""One scan through one network: decode, prepare, guard, run, restore. Synchronous: for a worker thread.

Every step is a function of the bytes, the task and the graph, so the same scan gets the same answer again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from model_store.errors import ArtefactDamaged
from model_store.guard import check, summarise
from model_store.manifest import ModelManifest
from model_store.preprocessing import Geometry, Prepared, Restorer, prepare
from model_store.scan import Limits, Scan, decode
from service.inference.attention import Attention
from service.inference.sessions import Outputs, Session
from service.inference.uncertainty import Uncertainty

Taken = TypeVar("Taken", contravariant=True)

# Slices per run: bounds the memory of activations and probabilities, whatever the volume's length.
BATCH = 8


@dataclass
class Stopwatch:
    """Milliseconds per stage, in the order in which they were entered."""

    stages: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block; a stage entered twice adds up."""
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = (time.perf_counter() - started) * 1000
            self.stages[name] = self.stages.get(name, 0.0) + elapsed

    def header(self) -> str:
        """For `Server-Timing`."""
        return ", ".join(f"{name};dur={duration:.2f}" for name, duration in self.stages.items())


@dataclass(frozen=True)
class Reading:
    """A scan as it was decoded, what the network is to see of it, and what the guard says to it."""

    scan: Scan
    prepared: Prepared
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Segmentation:
    """`classes`: uint8 class indices on the scan's own grid, [H, W] or [I, J, K].

    `attention`: the share of each source, over all slices; None of a network without cross-attention.
    """

    scan: Scan
    geometry: Geometry
    classes: NDArray[np.uint8]
    uncertainty: float
    warnings: tuple[str, ...]
    attention: dict[str, float] | None = None


# Called with the decoded scan and the guard's warnings, before anything is run; it refuses by raising.
BeforeRunning = Callable[[Scan, tuple[str, ...]], None]


def read(
    data: bytes, manifest: ModelManifest, limits: Limits, watch: Stopwatch, before_running: BeforeRunning
) -> Reading:
    """Decode `data` (the bytes of a file: PNG, TIFF or NIfTI, told by its content), prepare it for the task
    of `manifest`, and hold it against the scans of its training.

    Raises ScanError for a scan that cannot be read or does not fit the task, and what `before_running` does.
    """
    with watch.stage("decode"):
        scan = decode(data, limits)
    with watch.stage("prepare"):
        prepared = prepare(scan, manifest.task)
    with watch.stage("guard"):
        warnings = tuple(check(summarise(scan, prepared), manifest.statistics, manifest.task))
    before_running(scan, warnings)
    return Reading(scan, prepared, warnings)


def run(reading: Reading, session: Session, watch: Stopwatch) -> Iterator[Outputs]:
    """What the network gives for the slices in order, at most BATCH at a time."""
    slices = reading.prepared.slices
    for start in range(0, len(slices), BATCH):
        with watch.stage("inference"):
            outputs = session.run(slices[start : start + BATCH])
        yield outputs


def segment(
    data: bytes,
    manifest: ModelManifest,
    session: Session,
    limits: Limits,
    watch: Stopwatch,
    before_running: BeforeRunning,
) -> Segmentation:
    """Segment the scan in `data`.

    Args:
        data: the bytes of a file.
        manifest: of the network in `session`.
        session: the loaded graph.
        limits: what a scan may cost.
        watch: receives the time of every stage.
        before_running: see above.

    Raises:
        ScanError: the scan cannot be read or does not fit the task.
        ArtefactDamaged: the network gives no probabilities for it.
    """
    reading = read(data, manifest, limits, watch, before_running)
    geometry = reading.prepared.geometry
    restorer, uncertainty, attention = Restorer(geometry), Uncertainty(), Attention(manifest.sources)
    for probabilities, shares in run(reading, session, watch):
        with watch.stage("uncertainty"):
            uncertainty.add(probabilities)
        with watch.stage("restore"):
            _add(restorer, probabilities, session.digest)
            _add(attention, shares, session.digest)
    with watch.stage("restore"):
        classes = restorer.finish()
    return Segmentation(
        reading.scan, geometry, classes, uncertainty.value, reading.warnings, attention.shares
    )


class _Taking(Protocol[Taken]):
    def add(self, values: Taken, /) -> None: ...


def _add(to: _Taking[Taken], values: Taken, graph: str) -> None:
    try:
        to.add(values)
    except ValueError as error:
        raise ArtefactDamaged(f"graph {graph}: {error}; withdraw the model or publish it again") from error
