"""Segment one scan: decode, prepare, guard, run, restore. Synchronous: call it in a worker thread.

Every step is a function of the bytes, the task and the graph, so the same scan gives the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from model_store.errors import ArtefactDamaged
from model_store.guard import GuardWarning, check, outline, summarise
from model_store.lens import Lens, LensForScan, OfScan, seen_through
from model_store.manifest import NetworkManifest
from model_store.preprocessing import (
    Geometry,
    PercentRestorer,
    PercentVolumeRestorer,
    Prepared,
    PreparedVolume,
    Price,
    VolumeGrid,
    check_restorable,
    check_volume_restorable,
    finish,
    outputs_of,
    prepare_for,
    price_of,
    slab_axis_of,
)
from model_store.preprocessing.forward import no_look
from model_store.preprocessing.volume_restore import as_probabilities
from model_store.scan import Limits, Note, Scan, decode
from model_store.task import Task
from service.inference.confidence import SoftDice
from service.inference.pool import Picks, PickUnit, PoolPick
from service.inference.sessions import GraphSession, Outputs
from service.inference.shift import MomentSums, ShiftAt
from service.inference.uncertainty import Attention, entropy_map, region_entropy_map
from service.inference.volumes import Between, Pace, all_windows, outputs_of_volume

_NEGATED = Note(
    "scan-negated", "the scan looks inverted, so it was negated for the network: look at the mask"
)
_REFUSED = Note(
    "lens-refused",
    "the scan is far from the members' scans and does not show what they show: the network saw it as it is",
)

Taken = TypeVar("Taken", contravariant=True)


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
class PreparedScan:
    """The bytes of a scan's file, the decoded scan, the network's input, and the guard's warnings.

    `lens` is what the network sees it through, `remarks` what is to be known of one that was fitted to it.
    """

    data: bytes
    scan: Scan
    prepared: Prepared | PreparedVolume
    warnings: tuple[GuardWarning, ...]
    lens: Lens | None = None
    remarks: tuple[Note, ...] = ()

    @property
    def sliced(self) -> Prepared:
        """The input of a network of slices."""
        assert isinstance(self.prepared, Prepared), "the network of this task sees volumes"
        return self.prepared


@dataclass(frozen=True)
class Segmentation:
    """`classes`: uint8 class indices on the scan's own grid, [H, W] or [I, J, K].

    `geometry`: of the slices that a person sees; those of a network of slices are the same.

    `confidence`: of each label, 0 to 1 (`service.inference.confidence`).
    `shift`: how far the scan is from the members' scans, and where that was measured; None if it was not.
    `attention`: the share of each source, over all slices; None of a network without cross-attention.
    `picked`: which entries of its pool, by the scan or by each slice; None of a network without one.
    `removed`: how many voxels each label lost of which the task keeps the largest component alone.
    `uncertainty_map`: each voxel's normalised entropy in percent, on the same grid; None unless requested.
    """

    scan: Scan
    geometry: Geometry
    classes: NDArray[np.uint8]
    confidence: Mapping[str, float]
    shift: tuple[float, ShiftAt] | None = None
    attention: dict[str, float] | None = None
    picked: tuple[PoolPick, ...] | None = None
    uncertainty_map: NDArray[np.uint8] | None = None
    removed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenedScan:
    """The bytes of a scan's file, the decoded scan, and of a task of volumes its price, within the limits."""

    data: bytes
    scan: Scan
    price: Price | None


def open_scan(data: bytes, task: Task, limits: Limits, watch: Stopwatch) -> OpenedScan:
    """Decode `data` (the bytes of a scan's file), and price it for the task. Raises ScanError."""
    with watch.stage("decode"):
        scan = decode(data, limits)
        price = None
        if task.is_volume and scan.is_volume:
            price = price_of(scan, task)
            price.check(limits, task)
    return OpenedScan(data, scan, price)


def read(
    data: bytes,
    manifest: NetworkManifest,
    limits: Limits,
    watch: Stopwatch,
    look: Callable[[], None] = no_look,
    *,
    lens: Lens | LensForScan | None = None,
) -> PreparedScan:
    """`open_scan`, then `prepare_opened`."""
    return prepare_opened(open_scan(data, manifest.task, limits, watch), manifest, watch, look, lens=lens)


def prepare_opened(
    opened: OpenedScan,
    manifest: NetworkManifest,
    watch: Stopwatch,
    look: Callable[[], None] = no_look,
    *,
    lens: Lens | LensForScan | None = None,
) -> PreparedScan:
    """Prepare a scan for the task of `manifest`, compare it with the scans of its training, and look through
    the version's lens, or that of this scan.

    `look` is called between planes; what it raises ends the work. Raises ScanError for a scan that does not
    fit the task.
    """
    data, scan = opened.data, opened.scan
    with watch.stage("prepare"):
        prepared = prepare_for(manifest.task, scan, look)
    with watch.stage("guard"):
        warnings = tuple(check(summarise(scan, prepared), manifest.statistics, manifest.task))
    if lens is None:
        return PreparedScan(data, scan, prepared, warnings)
    with watch.stage("lens"):
        remarks: tuple[Note, ...] = ()
        if isinstance(lens, LensForScan):
            found = lens.of(prepared)
            lens, remarks = found.lens, _remarks_on(found)
        prepared = seen_through(lens, prepared, look)
    return PreparedScan(data, scan, prepared, warnings, lens, remarks)


def _remarks_on(found: OfScan) -> tuple[Note, ...]:
    if found.refused:
        return (_REFUSED,)
    return (_NEGATED,) if found.lens is not None and found.lens.negated else ()


def warnings_of(opened: OpenedScan, manifest: NetworkManifest) -> tuple[GuardWarning, ...]:
    """What the guard says of a volume that is not prepared: all but what its appearance tells.

    Raises ScanError for one that does not fit the task.
    """
    return tuple(check(outline(opened.scan, manifest.task), manifest.statistics, manifest.task))


def check_answerable(reading: PreparedScan, task: Task) -> None:
    """Raise ScanTooLarge if the mask of a scan would need too much memory."""
    if isinstance(reading.prepared, PreparedVolume):
        check_volume_restorable(reading.prepared.grid, task)
    else:
        check_restorable(reading.prepared.geometry, task)


def run(
    reading: PreparedScan,
    session: GraphSession,
    watch: Stopwatch,
    routing: PickUnit = "scan",
    *,
    whole: bool = False,
    between: Between | None = None,
) -> Iterator[Outputs]:
    """Run the network on the slices in order, some at a time, or all at once for the `whole`.

    `routing` says how a volume picks from a network's pool: as a whole, by the mean of its slices' queries,
    or slice by slice. `between` is looked at before each run.
    """
    between = between or Between()
    slices = reading.sliced.slices
    most = len(slices) if whole else session.slices_per_run(slices.shape[1:])
    parts = [slices[start : start + most] for start in range(0, len(slices), most)]
    query = None
    if session.has_pool and routing == "scan" and len(slices) > 1:
        with watch.stage("inference"):
            queries = np.concatenate([_asked(session, part, between) for part in parts])
            query = queries.mean(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
    pace, done = Pace(session, len(slices), between), 0
    for part in parts:
        pace.before_run(done)
        done += len(part)
        with watch.stage("inference"):
            # What runs as a whole, or picks as a whole, has a run of its own.
            outputs = session.run(part) if query is None and not whole else session.run_alone(part, query)
        yield outputs


def _asked(session: GraphSession, slices: NDArray[np.float32], between: Between) -> NDArray[np.float32]:
    between.look()
    return session.queries(slices)


def segment(
    reading: PreparedScan,
    manifest: NetworkManifest,
    session: GraphSession,
    watch: Stopwatch,
    routing: PickUnit = "scan",
    *,
    whole: bool = False,
    with_map: bool = False,
    between: Between | None = None,
) -> Segmentation:
    """Segment a scan.

    Args:
        reading: the scan, prepared for the task of `manifest`.
        manifest: of the network in `session`.
        session: the loaded graph.
        watch: receives the time of every stage.
        routing, whole: see `run`.
        with_map: whether the answer has the uncertainty of every voxel.
        between: looked at between the steps.

    Raises:
        ScanError: the scan's grid is too large for a mask.
        ArtefactDamaged: the network gives no probabilities for it.
    """
    prepared, task = reading.prepared, manifest.task
    between = between or Between()
    check_answerable(reading, task)
    sure, attention, moments = SoftDice(task), Attention(manifest.sources), MomentSums()
    picks = Picks(once=routing == "scan")
    entropies: PercentRestorer | PercentVolumeRestorer | None
    if isinstance(prepared, PreparedVolume):
        grid: Geometry | VolumeGrid = prepared.grid
        axis = slab_axis_of(prepared.grid, task)
        entropies = of_volume = PercentVolumeRestorer(prepared.grid, axis) if with_map else None
        together = all_windows(prepared, task) if whole else None
        planes = outputs_of_volume(
            prepared, task, session, watch.stage, between, together=together, moments=moments
        )
        seen = _planes_seen(planes, task, watch, sure, of_volume)
    else:
        grid = prepared.geometry
        entropies = of_slices = PercentRestorer(prepared.geometry) if with_map else None
        parts = run(reading, session, watch, routing, whole=whole, between=between)
        seen = _slices_seen(parts, session.digest, watch, (sure, attention, picks, moments), of_slices)
    try:
        classes, removed = finish(grid, task, seen, watch.stage, between.look)
    except ValueError as error:
        raise _damaged(session.digest, error) from error
    with watch.stage("restore"):
        uncertainty_map = None if entropies is None else entropies.finish()
    with watch.stage("shift"):
        shift = session.reference.shift_of(moments, prepared)
    return Segmentation(
        reading.scan,
        prepared.geometry,
        classes,
        sure.values,
        shift,
        attention.shares,
        picks.picked,
        uncertainty_map,
        removed,
    )


def _planes_seen(
    planes: Iterator[NDArray[np.float32]],
    task: Task,
    watch: Stopwatch,
    sure: SoftDice,
    entropies: PercentVolumeRestorer | None,
) -> Iterator[NDArray[np.float32]]:
    """The planes of a volume, each noted before it is restored."""
    regions = bool(task.regions)
    for plane in planes:
        with watch.stage("confidence"):
            p = plane if outputs_of(task) == "probabilities" else as_probabilities(plane, regions=regions)
            sure.add(p[np.newaxis])
            if entropies is not None:
                entropies.add(region_entropy_map(p) if regions else entropy_map(p))
        yield plane


def _slices_seen(
    parts: Iterator[Outputs],
    graph: str,
    watch: Stopwatch,
    noted: tuple[SoftDice, Attention, Picks, MomentSums],
    entropies: PercentRestorer | None,
) -> Iterator[NDArray[np.float32]]:
    """The probabilities of slices, each run noted before it is restored."""
    sure, attention, picks, moments = noted
    for outputs in parts:
        moments.add(outputs.moments)
        with watch.stage("confidence"):
            sure.add(outputs.probabilities)
            if entropies is not None:
                maps = np.stack([entropy_map(each) for each in outputs.probabilities])
                entropies.add(maps[:, np.newaxis])
        add(attention, outputs.attention, graph)
        add(picks, outputs, graph)
        yield outputs.probabilities


def _damaged(graph: str, error: ValueError) -> ArtefactDamaged:
    return ArtefactDamaged(f"graph {graph}: {error}; withdraw the model or publish it again")


class _Taking(Protocol[Taken]):
    def add(self, values: Taken, /) -> None: ...


def add(to: _Taking[Taken], values: Taken, graph: str) -> None:
    """Pass outputs of a graph on. Raises ArtefactDamaged for invalid ones."""
    try:
        to.add(values)
    except ValueError as error:
        raise _damaged(graph, error) from error
