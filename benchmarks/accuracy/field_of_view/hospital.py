"""A cell of `field_of_view`: the slices of an outside hospital show more around what the network knows.

A border is drawn around each image, and the mask gets the same. The hospital's patients are halved as for the
lens: one half is the cohort of a job, the other is scored as the service answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.accuracy.lens.hospital import Cohort, Scores, Trained, arms_of, gate_of, mean, scores_of
from benchmarks.accuracy.lens.rungs import Change, change_of
from benchmarks.accuracy.outside.hospital import MOST_SLICES, halves, short
from model_store.lens import Scale, Step, enlarged, middle, scale_of
from model_store.lens.fit import Cohort as OfImages
from model_store.preprocessing import classes_on, prepare
from model_store.scan import Scan
from model_store.task import Task
from personalization.dose import Lensed, by_scale
from personalization.gate import ThroughLens
from training.data.cases import Case
from training.data.scan_files import mask_of
from training.local.masks import Drawn
from training.local.registry import kind_of
from training.local.slices import Slices

# The percentile of a scan that is the border's intensity: air, or what is beyond the film.
_AIR = 1.0
_POLARITY: tuple[Step, ...] = ("polarity",)


@dataclass(frozen=True)
class Rung:
    """How many times wider the field of view is, and the rung of `lens` behind which it is seen."""

    wider: float
    behind: str = "0"

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"{self.wider:g} times" + (f", {self.behind}" if self.behind != "0" else "")

    def change(self, site: str, seed: int) -> Change | None:
        """What is done to the wider scan."""
        return change_of(self.behind, site, seed)


def widened(values: NDArray[Any], wider: float, border: float) -> NDArray[Any]:
    """Values [H, W, ...] with a border on each side."""
    margins = [(round(side * (wider - 1) / 2),) * 2 for side in values.shape[:2]]
    return np.pad(values, [*margins, *((0, 0) for _ in values.shape[2:])], constant_values=border)


@dataclass(frozen=True)
class WiderScans:
    """The cases of a hospital as a rung shows them."""

    cases: Sequence[Case]
    rung: Rung
    change: Change | None

    def load(self, task: Task, patients: Collection[str]) -> Slices:
        """Decode, widen, change and prepare those of some patients."""
        read, parts = kind_of(task).reader(task), []
        for case in self.cases:
            if case.patient in patients:
                scan = read(case)
                truth = widened(classes_on(scan, mask_of(case), task), self.rung.wider, 0)
                prepared = prepare(self._seen(scan), task)
                drawn = Drawn(case.patient, prepared.geometry, truth)
                parts.append(Slices.of_drawn(case, prepared, drawn, task))
        return Slices.joined(parts, task)

    def _seen(self, scan: Scan) -> Scan:
        voxels = np.asarray(scan.voxels)
        wide = replace(scan, voxels=widened(voxels, self.rung.wider, float(np.percentile(voxels, _AIR))))
        return wide if self.change is None else self.change(wide)


def at(trained: Trained, cases: Sequence[Case], rung: Rung, site: str, seed: int) -> dict[str, Any]:
    """What is found and served of a rung, by cohort, and what it changes of the global model's score."""
    scans = WiderScans(cases, rung, rung.change(site, seed))
    parts = halves(sorted({case.patient for case in cases}), seed)
    before: list[Scores] = []
    served: list[Scores] = []
    cohorts = []
    for own, other in (parts, parts[::-1]):
        judged, facts = _judged(trained, partial(_learned, scans, own))
        usual = after = scores_of(trained.network(), scans.load(trained.task, other))
        if judged is not None and judged.served == "scale":
            larger = enlarged(trained.task, facts["zoom"])
            assert larger is not None
            after = scores_of(trained.network(), scans.load(larger, other))
        before.append(usual)
        served.append(after)
        cohorts.append({**facts, "change": short(mean(after) - mean(usual))})
    return {"arms": arms_of(before, {"served": served}), "cohorts": cohorts}


def _learned(scans: WiderScans, patients: Collection[str], task: Task) -> Slices:
    return cast(Slices, Cohort(scans.load(task, patients), {}).thinned(MOST_SLICES).data)


def _judged(trained: Trained, load: Callable[[Task], Slices]) -> tuple[Lensed | None, dict[str, Any]]:
    """The verdict on larger slices of a cohort, None where none are asked for, and what was found."""
    usual = load(trained.task)
    made = trained.lens(Cohort(usual, {}), _POLARITY)

    @cache
    def larger(zoom: float) -> Slices | None:
        task = enlarged(trained.task, zoom)
        return None if task is None else load(task)

    def middles(zoom: float) -> OfImages | None:
        if (slices := larger(zoom)) is None:
            return None
        size = trained.task.size
        return lambda: [(patient, middle(images, size)) for patient, images in slices.viewed()]

    scale = None if made.lens.negated else scale_of(usual.viewed, trained.fingerprint, middles)
    if scale is None:
        return None, {"zoom": None}
    if (slices := larger(scale.zoom)) is None:
        return None, {"zoom": scale.zoom}
    found = _asked(trained, scale, usual, slices)
    shifts = None if found.shifts is None else [*map(short, found.shifts)]
    facts = {"zoom": scale.zoom, "left": short(scale.left), "network": shifts, "gate": gate_of(found.verdict)}
    return found, facts


def _asked(trained: Trained, scale: Scale, usual: Slices, larger: Slices) -> Lensed:
    images, more = (torch.from_numpy(np.array(each.images)) for each in (usual, larger))
    return by_scale(
        trained.network(),
        len(trained.task.classes),
        images.to(trained.device),
        more.to(trained.device),
        torch.from_numpy(middle(more.numpy(), trained.task.size)).to(trained.device),
        usual.patients,
        ThroughLens(scale.left, None, scale.grid, scale.sides, zoom=scale.zoom),
        trained.spread,
    )
