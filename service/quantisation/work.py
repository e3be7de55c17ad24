"""Make a graph in another precision on scans of a hospital, judge it there, and publish it if it passed.

    1  the patients are dealt: a quarter, two at least, calibrates, the others judge; of fewer than four, all
       do both
    2  slices of the calibrating scans, evenly spaced, find the scales of the integers
    3  the judging scans are segmented by both graphs, as the service does, on the scans' own grid

Everything follows from the scans, their order and the weights: the same again is the same version.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from model_store.artefact import Artefact
from model_store.digest import sha256
from model_store.errors import KindMismatch, LocumStoreError, PublishRefused, ReferenceNotFound
from model_store.lens import LENS, lens_of
from model_store.manifest import GRAPH, Lineage, ModelManifest, Reduced
from model_store.preprocessing import PreparedVolume
from model_store.preprocessing.windows import padding, windows
from model_store.scan import Limits
from model_store.store import Store
from service.cohorts.patients import numbered
from service.inference.pipeline import Stopwatch, read, segment
from service.inference.sessions import GraphSession
from service.quantisation.graph import reduced
from service.quantisation.precision import is_reduced
from service.quantisation.verdict import FEWEST_TO_SPLIT, PatientCounts, Report

METHOD = "quantisation"
# Inputs of the calibrating scans, by their spatial dimensions: more slices hardly change the scales, and a
# patch of a volume has as many voxels as dozens of slices.
MOST_INPUTS = {2: 32, 3: 8}
# Scans beyond are left out, evenly.
MOST_SCANS = 400
_SHARE_TO_CALIBRATE = 4
_LONGEST_NAME = 128
_DIGITS = 8


class Source(Protocol):
    """One scan: its `name`, which may tell the patient, and its bytes."""

    @property
    def name(self) -> str:
        """The file's name."""

    def read(self) -> bytes:
        """The file."""


Load = Callable[[bytes], GraphSession]
# Called before each scan with the number of scans done and of all; what it raises ends the work.
Between = Callable[[int, int], None]


def reduced_name(network: str, precision: Reduced) -> str:
    """Return `brain.int8`; a longer name than the store allows is cut and ends with eight hash digits."""
    name = f"{network}.{precision}"
    if len(name) <= _LONGEST_NAME:
        return name
    digits = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{name[: _LONGEST_NAME - _DIGITS - 1]}-{digits}"


def require_reducible(network: Artefact) -> Artefact[ModelManifest]:
    """The network, if another graph can be made of it.

    Raises:
        KindMismatch: it is not one network, or classifies.
        PublishRefused: it is such a graph already.
    """
    try:
        found = network.expect(ModelManifest)
    except KindMismatch as error:
        raise KindMismatch(f"{error}; of a composite, name its part (`brain.global@1`)") from error
    manifest = found.manifest
    if manifest.task.kind != "segmentation":
        raise KindMismatch(f"'{network}': expected a network that segments, found a classifier")
    if manifest.precision is not None:
        raise PublishRefused(
            f"'{network}' is in {manifest.precision}: name the float32 network that it was made from"
        )
    return found


def make(
    network: Artefact[ModelManifest],
    precision: Reduced,
    scans: Sequence[Source],
    load: Load,
    limits: Limits,
    between: Between = lambda _done, _total: None,
) -> tuple[bytes, Report]:
    """Make the graph and judge it.

    Args:
        network: of which the graph is made, see `require_reducible`.
        precision: of the graph.
        scans: by name.
        load: loads a graph as the service does.
        limits: on decoding.
        between: see `Between`.

    Raises:
        ScanError: a scan cannot be read or does not fit the task; the message has its place.
        ReferenceNotFound: there is no scan.
        GraphRefused: the graph cannot be converted.
    """
    if not scans:
        raise ReferenceNotFound("expected scans to find the scales on and to judge by, found none")
    kept = [scans[index] for index in _evenly(len(scans), MOST_SCANS)]
    task = network.manifest.task
    patients = numbered([scan.name for scan in kept], task)
    calibrating, judging, overlap = dealt(patients)
    graph, lens = network.read(GRAPH), lens_of(network)
    total = len(calibrating) + len(judging)
    done = itertools.count()

    def reading_of(index: int) -> Any:
        between(next(done), total)
        try:
            return read(kept[index].read(), network.manifest, limits, Stopwatch(), lens=lens)
        except LocumStoreError as error:
            raise type(error)(f"scan {index + 1} of {len(kept)}: {error}") from error

    inputs: list[NDArray[np.float32]] = []
    if precision == "int8":
        most = MOST_INPUTS[task.spatial_dims]
        each = max(1, most // len(calibrating))
        for index in calibrating[:most]:
            inputs += inputs_of(reading_of(index).prepared, network.manifest, each)
    made = reduced(graph, precision, inputs)
    before, after = load(graph), load(made)
    counts: dict[int, PatientCounts] = {}
    for index in judging:
        reading = reading_of(index)
        masks = [segment(reading, network.manifest, each, Stopwatch()).classes for each in (before, after)]
        own = counts.setdefault(patients[index], PatientCounts.none(len(task.classes)))
        own.add(*masks)
    report = Report(
        precision=precision,
        task=task,
        patients=[counts[patient] for patient in sorted(counts)],
        scans=len(judging),
        calibrated_on=len({patients[index] for index in calibrating}),
        overlap=overlap,
        left_out=len(scans) - len(kept),
        sizes={"float32": len(graph), precision: len(made)},
    )
    return made, report


def publish(
    store: Store,
    network: Artefact[ModelManifest],
    graph: bytes,
    report: Report,
    admit: Callable[[], None] | None = None,
) -> Artefact[ModelManifest]:
    """Publish a graph that passed as a version of its own. Idempotent.

    Raises:
        PublishRefused: its gate refused it.
        StoreError: as `Store.publish`.
    """
    parent, precision = network.manifest, report.precision
    assert is_reduced(precision)
    found = report.to_json()
    if not report.passed:
        failed = [f"{each['failure']} ({each['name']})" for each in report.checks() if not each["passed"]]
        raise PublishRefused(
            f"'{network}': its graph in {precision} is not published: {' '.join(failed)} The float32 graph "
            "stays; other scans, or more, may find other scales"
        )
    # By its content, which has neither a time nor a name: the same work is the same version.
    run = sha256(f"{network.digest} {sha256(graph)}".encode()).removeprefix("sha256:")[:_DIGITS]
    manifest = ModelManifest(
        name=reduced_name(network.name, precision),
        part_of=network.name,
        role=parent.role,
        site=parent.site,
        hospital=parent.hospital,
        task=parent.task,
        network=parent.network,
        lineage=Lineage(
            method=METHOD,
            run=f"{precision}-{run}",
            sites=parent.lineage.sites,
            rounds=0,
            seed=0,
            parents=(network.digest,),
            weights=parent.lineage.weights,
            details={"float32_graph": parent.files[GRAPH].sha256, "gate": found},
        ),
        metrics={"worst_agreement": report.worst or 0.0, "mean_agreement": report.mean or 0.0},
        statistics=parent.statistics,
        sources=parent.sources,
        precision=precision,
        software={part: version(part) for part in ("locum", "onnx", "numpy")} | _onnxruntime(),
    )
    # It sees what its parent sees.
    files = {LENS: network.read(LENS)} if LENS in parent.files else {}
    return store.publish(manifest, {GRAPH: graph, **files}, admit).expect(ModelManifest)


def dealt(patients: Sequence[int]) -> tuple[list[int], list[int], bool]:
    """Deal scans of these patients to calibrate and to judge: indices of both, and whether they overlap."""
    count = len(set(patients))
    everyone = list(range(len(patients)))
    if count < FEWEST_TO_SPLIT:
        return everyone, everyone, True
    # By a fixed draw: the order of names may follow dates or wards.
    drawn = np.random.default_rng(0).permutation(count)[: max(2, count // _SHARE_TO_CALIBRATE)]
    calibrating = {int(patient) for patient in drawn}
    return (
        [index for index in everyone if patients[index] in calibrating],
        [index for index in everyone if patients[index] not in calibrating],
        False,
    )


def gate_of(version_: Artefact[ModelManifest]) -> Mapping[str, Any]:
    """What the gate found of a published graph."""
    found = version_.manifest.lineage.details.get("gate")
    return found if isinstance(found, dict) else {}


def inputs_of(prepared: Any, manifest: ModelManifest, most: int) -> list[NDArray[np.float32]]:
    """Evenly, at most so many slices [C, H, W] of a prepared scan, or patches [C, P...] of a volume."""
    if not isinstance(prepared, PreparedVolume):
        return [prepared.slices[index].copy() for index in _evenly(len(prepared.slices), most)]
    return [*itertools.islice(_patches(prepared.volume, manifest, most), most)]


def _patches(
    volume: NDArray[np.float32], manifest: ModelManifest, most: int
) -> Iterator[NDArray[np.float32]]:
    geometry = manifest.task.geometry
    assert geometry is not None
    volume = np.pad(volume, [(0, 0), *padding(volume.shape[1:], geometry.patch)])
    corners = windows(volume.shape[1:], geometry.patch, geometry.overlap, geometry.window)
    for index in _evenly(len(corners), most):
        places = (slice(at, at + own) for at, own in zip(corners[index], geometry.patch, strict=True))
        yield volume[(slice(None), *places)].copy()


def _evenly(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return [math.floor((place + 0.5) * count / most) for place in range(most)]


def _onnxruntime() -> dict[str, str]:
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__}
