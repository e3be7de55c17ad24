"""What is done to a hospital's scans: the rungs of the protocol (`docs/results/protocol-lens.md`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from benchmarks.accuracy.dose.kinds import KINDS, shifted
from benchmarks.accuracy.lens.detector import Detector
from benchmarks.accuracy.outside.scanner import SEVERITIES, ShiftedScanner
from model_store.scan import Scan

Change: TypeAlias = Callable[[Scan], Scan]

AS_THEY_ARE = "0"
DRAWN = tuple(str(severity) for severity in SEVERITIES if severity)
UNDRAWN = tuple(KINDS)
INVERTED, DETECTOR, GREY = "inverted", "detector", "grey"
# Of ITU-R BT.601, as the task's own rule.
_LUMINANCE = np.array([0.299, 0.587, 0.114])


def rungs_of(*, colour: bool) -> tuple[str, ...]:
    """The rungs of a set, in the order in which they are computed."""
    return (AS_THEY_ARE, *DRAWN, INVERTED, DETECTOR, *UNDRAWN, *((GREY,) if colour else ()))


def change_of(rung: str, site: str, seed: int) -> Change | None:
    """What changes a scan; None where it stays as it is."""
    if rung == INVERTED:
        return _inverted
    if rung == GREY:
        return _grey
    if rung == DETECTOR:
        change: Change | None = Detector.of(site, seed).change()
    elif rung in KINDS:
        change = shifted(rung, site, seed)
    else:
        change = ShiftedScanner.of(site, seed).at(int(rung))
    return None if change is None else _plane_by_plane(change)


def _plane_by_plane(change: Change) -> Change:
    """The change of a volume with one channel: its planes take the place of channels."""

    def changed(scan: Scan) -> Scan:
        if scan.voxels.ndim < 4:
            return change(scan)
        planes = change(replace(scan, voxels=np.asarray(scan.voxels)[..., 0]))
        return replace(planes, voxels=planes.voxels[..., np.newaxis])

    return changed


def _inverted(scan: Scan) -> Scan:
    voxels = np.asarray(scan.voxels, dtype=np.float32)
    return replace(scan, voxels=voxels.min() + voxels.max() - voxels)


def _grey(scan: Scan) -> Scan:
    voxels = np.asarray(scan.voxels, dtype=np.float64)
    grey = (voxels @ _LUMINANCE)[..., np.newaxis]
    return replace(scan, voxels=np.repeat(grey, 3, axis=-1).astype(np.float32))
