"""Dice and surface distances per patient on the scan's own grid, prepared and restored as in serving."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_store.guard import ScanSummary, summarise
from model_store.preprocessing import Geometry, align, class_map, prepare, restore
from model_store.scan import Scan
from model_store.task import Task
from personalization.metrics import METRICS, Compared, dice
from personalization.surfaces import surface_distances
from training.data.cases import Case
from training.data.scan_files import mask_of, read_scan

BATCH = 16
# Measured on surfaces, beside Dice: HD95, and normalised surface Dice at a tolerance of 1 mm or pixel.
SURFACES = ("hd95", "nsd")


@dataclass(frozen=True)
class ReadScan:
    """One scan of `Scans`: its number of slices, the geometry of its own grid, and the true classes there.

    `spacing` has the millimetres between neighbours along each axis of that grid, None where unknown.
    """

    patient: str
    slices: int
    geometry: Geometry
    truth: Tensor
    summary: ScanSummary
    spacing: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Scans:
    """A hospital's scans, decoded and prepared once for many networks. `images`: [N, C, H, W]."""

    images: Tensor
    scans: tuple[ReadScan, ...]
    classes: int

    @classmethod
    def load(cls, cases: Iterable[Case], task: Task, change: Callable[[Scan], Scan] | None = None) -> Scans:
        """Decode, apply `change` if it is given, and prepare; all slices are held in memory."""
        images: list[Tensor] = []
        scans: list[ReadScan] = []
        for case in cases:
            scan = read_scan(case.image)
            scan = change(scan) if change else scan
            prepared = prepare(scan, task)
            truth = _tensor(class_map(align(mask_of(case), scan.grid, scan.affine, scan.other_affine), task))
            images.append(torch.tensor(prepared.slices))
            count = len(prepared.slices)
            summary, spacing = summarise(scan, prepared), _spacing(scan)
            scans.append(ReadScan(case.patient, count, prepared.geometry, truth, summary, spacing))
        return cls(torch.cat(images), tuple(scans), len(task.classes))

    @property
    def patients(self) -> tuple[str, ...]:
        """Every patient once, sorted."""
        return tuple(sorted({scan.patient for scan in self.scans}))

    @property
    def scan_index(self) -> list[int]:
        """For every slice the number of its scan."""
        return [number for number, scan in enumerate(self.scans) for _ in range(scan.slices)]

    @property
    def patient_index(self) -> list[int]:
        """For every slice the number of its patient, in the order of `patients`."""
        numbers = {patient: number for number, patient in enumerate(self.patients)}
        return [numbers[scan.patient] for scan in self.scans for _ in range(scan.slices)]

    def of(self, patients: Collection[str]) -> Scans:
        """The scans of some patients."""
        return self._only({number for number, scan in enumerate(self.scans) if scan.patient in patients})

    def thinned(self, most: int) -> Scans:
        """Evenly spaced scans with about `most` slices at most."""
        return self._only(set(range(0, len(self.scans), math.ceil(len(self.images) / most))))

    def _only(self, numbers: Collection[int]) -> Scans:
        kept = [i for i, number in enumerate(self.scan_index) if number in numbers]
        scans = tuple(scan for number, scan in enumerate(self.scans) if number in numbers)
        return Scans(self.images[kept], scans, self.classes)

    def dice(self, probabilities_NKHW: Tensor) -> dict[str, float]:
        """Foreground Dice of every patient, over all voxels of its scans, of predictions for `images`.

        Mean over the task's foreground classes; NaN without any foreground.
        """
        voxels: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for scan, predicted in self._restored(probabilities_NKHW):
            voxels.setdefault(scan.patient, []).append((predicted.flatten(), scan.truth.flatten()))
        return {patient: _dice(pairs, self.classes) for patient, pairs in sorted(voxels.items())}

    def measured(self, probabilities_NKHW: Tensor, metric: str) -> dict[str, float]:
        """Any metric of `personalization.metrics` of every patient, on the scans' own grids.

        Mean over the patient's scans in which it is defined; NaN where it is in none.
        """
        of = METRICS[metric].of
        if of is None:
            raise ValueError(f"metric '{metric}': expected a mean over cases, such as 'dice'")
        values: dict[str, list[float]] = {}
        for scan, predicted in self._restored(probabilities_NKHW):
            value = of(Compared(predicted, scan.truth, self.classes))
            values.setdefault(scan.patient, []).append(value)
        return {patient: float(np.nanmean(found)) for patient, found in sorted(values.items())}

    def surfaces(self, probabilities_NKHW: Tensor) -> dict[str, dict[str, float]]:
        """HD95 and normalised surface Dice of every patient, by `SURFACES`: metric -> patient -> value.

        Mean over the foreground classes of a scan, then over the patient's scans; in millimetres where the
        spacing is known, else in pixels. NaN where no class is both in an answer and in its truth.
        """
        labels = [(index,) for index in range(1, self.classes)]
        found: dict[str, dict[str, list[float]]] = {metric: {} for metric in SURFACES}
        for scan, predicted in self._restored(probabilities_NKHW):
            sides = [axis for axis, side in enumerate(predicted.shape) if side > 1]
            spacing = None if scan.spacing is None else [scan.spacing[axis] for axis in sides]
            measured = surface_distances(predicted.squeeze(), scan.truth.squeeze(), labels, spacing)
            for metric, values in found.items():
                values.setdefault(scan.patient, []).append(float(measured[metric].nanmean()))
        return {
            metric: {patient: _mean_defined(each) for patient, each in sorted(values.items())}
            for metric, values in found.items()
        }

    def _restored(self, probabilities_NKHW: Tensor) -> Iterable[tuple[ReadScan, Tensor]]:
        """Each scan, and the classes found on its own grid."""
        parts = torch.split(probabilities_NKHW, [scan.slices for scan in self.scans])
        for scan, part in zip(self.scans, parts, strict=True):
            yield scan, _tensor(restore(part.numpy(), scan.geometry))


def mixed_order(count: int) -> list[int]:
    """An order of the slices in which every batch is spread over the whole set.

    Neighbouring slices belong to one patient. Where batch norm uses a batch's own statistics, these should
    be the hospital's, not one patient's.
    """
    batches = math.ceil(count / BATCH)
    return [index for first in range(batches) for index in range(first, count, batches)]


@torch.no_grad()
def predict(network: nn.Module, images_NCHW: Tensor) -> Tensor:
    """Probabilities [N, K, H, W] on the CPU, in `mixed_order`; the network is put into evaluation mode."""
    network.eval()
    device = next(network.parameters()).device
    order = mixed_order(len(images_NCHW))
    batches = images_NCHW[order].tensor_split(math.ceil(len(order) / BATCH))
    found = torch.cat([torch.softmax(network(batch.to(device)), dim=1).cpu() for batch in batches])
    result = torch.empty_like(found)
    result[order] = found
    return result


def mean_dice(dice: Mapping[str, float]) -> float:
    """Mean over the patients with a defined Dice; NaN when there is none."""
    return _mean_defined([*dice.values()])


def _mean_defined(values: Sequence[float]) -> float:
    defined = [value for value in values if math.isfinite(value)]
    return sum(defined) / len(defined) if defined else math.nan


def _spacing(scan: Scan) -> tuple[float, ...] | None:
    """Millimetres between neighbours along each axis of the scan's grid, None of an image."""
    if scan.affine is None:
        return None
    return tuple(map(float, np.linalg.norm(scan.affine[:3, :3], axis=0) * scan.mm_per_unit))


def _tensor(labels: NDArray[np.uint8]) -> Tensor:
    """Copy to contiguous memory: torch rejects the negative strides of a flipped volume."""
    return torch.from_numpy(np.ascontiguousarray(labels))


def _dice(pairs: Sequence[tuple[Tensor, Tensor]], classes: int) -> float:
    predicted, truth = (torch.cat(parts).unsqueeze(0) for parts in zip(*pairs, strict=True))
    value = float(dice(predicted, truth, classes)[0, 1:].nanmean())
    return value if math.isfinite(value) else math.nan
