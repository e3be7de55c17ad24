"""Classify one scan: decode, prepare, guard, run, average. Synchronous: call it in a worker thread.

A network sees slices, as it did in training, where each slice of a volume counted as an image of its class. A
volume's probabilities are the mean over its slices. Every slice's own are reported too: the mean loses a
finding that shows in few slices.

Legend: S slices (1 of an image), K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_store.errors import ArtefactDamaged
from model_store.manifest import NetworkManifest
from model_store.scan import Scan
from service.inference.pipeline import PreparedScan, Stopwatch, add, run
from service.inference.pool import Picks, PickUnit, PoolPick
from service.inference.sessions import GraphSession
from service.inference.shift import MomentSums, ShiftAt
from service.inference.volumes import Between

# Tolerance of the sum of a slice's probabilities, from 1: float32, and half precision on a GPU.
_TOLERANCE = 0.01


@dataclass(frozen=True)
class Classification:
    """`probabilities` float64 [S, K]: each slice's class probabilities, along the task's plane in order.

    `picked`: which entries of its pool, by the scan or by each slice; None of a network without one.
    `shift`: as of a segmentation.
    """

    scan: Scan
    probabilities: NDArray[np.float64]
    picked: tuple[PoolPick, ...] | None = None
    shift: tuple[float, ShiftAt] | None = None

    @property
    def mean(self) -> NDArray[np.float64]:
        """[K]: the scan's class probabilities."""
        mean: NDArray[np.float64] = self.probabilities.mean(axis=0)
        return mean


def classify(
    reading: PreparedScan,
    manifest: NetworkManifest,
    session: GraphSession,
    watch: Stopwatch,
    routing: PickUnit = "scan",
    *,
    between: Between | None = None,
) -> Classification:
    """Classify a scan; arguments as of `pipeline.segment`.

    Raises:
        ArtefactDamaged: the network gives no probabilities for it.
    """
    picks, moments = Picks(once=routing == "scan"), MomentSums()
    parts = []
    for outputs in run(reading, session, watch, routing, between=between):
        parts.append(outputs.probabilities)
        moments.add(outputs.moments)
        add(picks, outputs, session.digest)
    expected = len(manifest.task.classes)
    for part in parts:
        if part.ndim != 2 or part.shape[1] != expected:
            raise _damaged(session, f"expected probabilities [S, {expected}], found {list(part.shape)}")
    probabilities = np.concatenate(parts).astype(np.float64)
    # A NaN is in no range.
    if not (probabilities >= 0).all() or not (abs(probabilities.sum(axis=1) - 1) <= _TOLERANCE).all():
        raise _damaged(session, "expected probabilities that add up to 1, found others")
    with watch.stage("shift"):
        shift = session.reference.shift_of(moments, reading.prepared)
    return Classification(reading.scan, probabilities, picks.picked, shift)


def _damaged(session: GraphSession, what: str) -> ArtefactDamaged:
    return ArtefactDamaged(f"graph {session.digest}: {what}; withdraw the model or publish it again")
