"""What is known of one answer, before it is stored: numbers, no pixel and no name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.scan import Scan
from model_store.task import Task
from service.inference.shift import ShiftAt

# Voxels of the boxes around labels in which parts are counted, per answer: a tenth of a second at most.
_MOST_COUNTED = 2**22


@dataclass(frozen=True)
class SeenLabel:
    """One label of an answer; see `service.database.ObservedLabel`."""

    label: str
    confidence: float
    voxels: int
    volume_ml: float | None = None
    parts: int | None = None
    at_border: bool = False


@dataclass(frozen=True)
class Observed:
    """One answer; see `service.database.Observation`.

    `series`, `scan` and `mask` are a UID, the digest of the received bytes and `mask_digest`: the database
    gets keyed digests of them. `choice` is how the network was chosen, by which the same answer can be made
    again (`Selection.kept`, and the option `routing`); None where it was adapted to the scan by a job.
    """

    model: str
    version: str
    graph: str
    scan: str
    size: tuple[int, ...]
    seconds: float
    precision: str
    provider: str
    labels: tuple[SeenLabel, ...]
    locum: str
    usual: bool = True
    spacing: tuple[float, ...] | None = None
    scanner: str | None = None
    series: str | None = None
    acquisition: Mapping[str, Any] | None = None
    shift: float | None = None
    shift_at: ShiftAt | None = None
    unlike: int = 0
    warnings: tuple[str, ...] = ()
    mask: str | None = None
    choice: Mapping[str, str | None] | None = None

    def to_json(self) -> bytes:
        """For the checkpoint of a job, which is no client's."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Observed:
        """What `to_json` wrote."""
        said = json.loads(content)
        for name in ("size", "spacing", "warnings"):
            said[name] = None if said[name] is None else tuple(said[name])
        return cls(**{**said, "labels": tuple(SeenLabel(**each) for each in said["labels"])})


def acquisition_of(scan: Scan) -> dict[str, Any] | None:
    """What a DICOM scan says of its acquisition, without the series; None of other scans."""
    if scan.acquisition is None:
        return None
    said = asdict(scan.acquisition) | {"modality": scan.modality}
    return {name: value for name, value in said.items() if value and name != "series"}


def spacing_of(scan: Scan) -> tuple[float, ...] | None:
    """Millimetres between voxels along the scan's axes; None of an image."""
    if scan.affine is None:
        return None
    sides = np.linalg.norm(scan.affine[:3, :3], axis=0) * scan.mm_per_unit
    return tuple(round(float(side), 4) for side in sides)


def mask_digest(classes: NDArray[np.uint8]) -> str:
    """The digest of a mask, 64 hex digits: of its class indices on the scan's own grid, and their shape."""
    digest = hashlib.blake2b(",".join(str(side) for side in classes.shape).encode() + b";", digest_size=32)
    digest.update(np.ascontiguousarray(classes).data)
    return digest.hexdigest()


def seen_labels(
    classes: NDArray[np.uint8], task: Task, confidences: Mapping[str, float], voxel_ml: float | None
) -> tuple[SeenLabel, ...]:
    """Size, parts and place of each label in class indices on the scan's own grid.

    `voxel_ml`: millilitres of a voxel. Parts touch by a side, an edge or a corner. They are counted in the
    smallest boxes around the labels, of which larger ones beyond a bound are left out.
    """
    from scipy import ndimage

    boxes = ndimage.find_objects(classes, max_label=len(task.classes) - 1)
    found: dict[str, SeenLabel] = {}
    counted: list[tuple[int, str, tuple[slice, ...]]] = []
    for label in task.labels:
        box = _around([boxes[index - 1] for index in task.label_classes(label) if index])
        if box is None:
            found[label] = SeenLabel(label, confidences[label], 0, _volume(0, voxel_ml), 0)
        else:
            counted.append((classes[box].size, label, box))
    left = _MOST_COUNTED
    touching = np.ones((3,) * classes.ndim, np.int8)
    for size, label, box in sorted(counted, key=lambda each: each[:2]):
        inside = np.isin(classes[box], task.label_classes(label))
        left -= size
        parts = int(ndimage.label(inside, touching)[1]) if left >= 0 else None
        voxels = int(np.count_nonzero(inside))
        edges = any(
            side.start == 0 or side.stop == length for side, length in zip(box, classes.shape, strict=True)
        )
        volume = _volume(voxels, voxel_ml)
        found[label] = SeenLabel(label, confidences[label], voxels, volume, parts, edges)
    return tuple(found[label] for label in task.labels)


def _volume(voxels: int, voxel_ml: float | None) -> float | None:
    return None if voxel_ml is None else voxels * voxel_ml


def _around(boxes: Sequence[tuple[slice, ...] | None]) -> tuple[slice, ...] | None:
    """The smallest box around all boxes that are there."""
    there = [box for box in boxes if box is not None]
    if not there:
        return None
    return tuple(
        slice(min(side.start for side in sides), max(side.stop for side in sides))
        for sides in zip(*there, strict=True)
    )
