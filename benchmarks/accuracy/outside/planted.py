"""Candidates that are bad on purpose: what the gate is there to refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy.outside.arms import NO_LIMITS, Models, Turn
from benchmarks.accuracy.outside.gate import Judge, shuffled
from benchmarks.accuracy.outside.routing import Adapted, facts_of, learn, replicas_of
from benchmarks.harness.evaluation import Scans
from model_store.scan import Scan
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.safety import SafetyLimits

RATE_FACTOR = 100
# A layer in the middle: the harm of one is less plain than that of all.
ONE_LAYER = "bottleneck.bottleneck_conv1"


@dataclass(frozen=True)
class Cohorts:
    """A hospital's few scans; the same with intensities inverted; scans of another modality, if there are."""

    own: Scans
    inverted: Scans
    foreign: Scans | None


def inverted(scan: Scan) -> Scan:
    """Bright where it was dark."""
    highest = np.asarray(scan.voxels).max()
    return replace(scan, voxels=highest - scan.voxels)


def some(scans: Scans, count: int) -> tuple[str, ...]:
    """The first patients who have `count` slices between them."""
    kept: list[str] = []
    slices = 0
    for patient in scans.patients:
        if slices >= count and len(kept) > 1:
            break
        kept.append(patient)
        slices += sum(scan.slices for scan in scans.scans if scan.patient == patient)
    return tuple(kept)


def planted(
    models: Models, judge: Judge, scans: Scans, cohorts: Cohorts, config: AdaptationConfig
) -> dict[str, Any]:
    """A cell's result: the gate's verdict on each, and its true change of Dice on all of `scans`.

    `few scans` is no bad candidate: it is what the shuffled ones were before, and is judged beside them.
    """
    return {"gate": list(_judged(models, judge, scans, cohorts, config))}


def _judged(
    models: Models, judge: Judge, scans: Scans, cohorts: Cohorts, config: AdaptationConfig
) -> Iterator[dict[str, Any]]:
    space = models.space()
    fast = config.model_copy(
        update={"routing_rate": RATE_FACTOR * config.rate, "bn_rate": RATE_FACTOR * config.bn_rate}
    )
    good = learn(space, cohorts.own, config)
    replicas = replicas_of(space, cohorts.own, config)
    yield judge.record("few scans", good.merged, replicas, Turn(cohorts.own, scans)) | _end(good)
    generator = torch.Generator().manual_seed(config.seed)
    for kind, only in (("shuffled weights", ""), ("one layer shuffled", ONE_LAYER)):
        yield judge.record(kind, shuffled(good.merged, generator, only), replicas, Turn(cohorts.own, scans))
    plants = [
        (f"rate x{RATE_FACTOR}", cohorts.own, fast, SafetyLimits()),
        (f"rate x{RATE_FACTOR}, safety limits off", cohorts.own, fast, NO_LIMITS),
        ("inverted scans", cohorts.inverted, config, SafetyLimits()),
        *([("another modality", cohorts.foreign, config, SafetyLimits())] if cohorts.foreign else []),
    ]
    for kind, cohort, settings, limits in plants:
        bad = learn(space, cohort, settings, limits=limits)
        others = replicas_of(space, cohort, settings, limits)
        yield judge.record(kind, bad.merged, others, Turn(cohort, scans)) | _end(bad)


def _end(adapted: Adapted) -> dict[str, Any]:
    return {"adaptation": facts_of(adapted)}
