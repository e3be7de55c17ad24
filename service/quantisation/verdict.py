"""The gate of a graph in another precision: its masks beside those of the float32 graph, patient by patient.

No label is used. The two graphs have the same weights, so that every difference is one of rounding: a mask
that differs by more is refused, whether it is better or worse.

Legend: K classes, 0 is background.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.task import Task

# Dice of the two masks of the patient who agrees least. Two readers of one scan agree less, and at 0.98 the
# size of a target has changed by less than 4 percent.
LEAST_AGREEMENT = 0.98
# What all patients' targets together may shrink or grow by: each patient's may err, not all to one side.
MOST_SIZE_CHANGE = 0.02
# A class with fewer voxels than this in both masks of a patient is too small to be compared: one voxel of 50
# is 0.98 of Dice.
LEAST_VOXELS = 50


@dataclass
class PatientCounts:
    """Voxels of one patient by class: in the float32 masks, in the others, and in both, [K] each."""

    before: NDArray[np.int64]
    after: NDArray[np.int64]
    both: NDArray[np.int64]

    @classmethod
    def none(cls, classes: int) -> PatientCounts:
        """Nothing counted so far."""
        return cls(*(np.zeros(classes, np.int64) for _ in range(3)))

    def add(self, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
        """Count the masks of one scan, class indices of one shape."""
        classes = len(self.both)
        self.before += np.bincount(before.ravel(), minlength=classes)
        self.after += np.bincount(after.ravel(), minlength=classes)
        self.both += np.bincount(before[before == after], minlength=classes)

    @property
    def compared(self) -> NDArray[np.bool_]:
        """[K]: the classes that are large enough in either mask; never the background."""
        found: NDArray[np.bool_] = np.maximum(self.before, self.after) >= LEAST_VOXELS
        found[0] = False
        return found

    @property
    def agreement(self) -> float | None:
        """Mean Dice over the compared classes; None where there is none."""
        seen = self.compared
        if not seen.any():
            return None
        dice = 2 * self.both[seen] / (self.before[seen] + self.after[seen])
        return float(dice.mean())

    @property
    def size_ratio(self) -> float | None:
        """Foreground after over before; None where the float32 graph found nothing."""
        before = int(self.before[1:].sum())
        return int(self.after[1:].sum()) / before if before else None

    @property
    def emptied(self) -> list[int]:
        """The compared classes that the float32 graph found and the other did not."""
        return [int(index) for index in np.flatnonzero(self.compared & (self.after == 0))]


@dataclass(frozen=True)
class Report:
    """What was compared, and the verdict. No name of a patient or scan is in it: patients are 1, 2, ...

    `calibrated_on` is the number of patients that the graph was calibrated on, `overlap` tells that the
    same patients judged it, `left_out` the number of scans beyond the limit.
    """

    precision: str
    task: Task
    patients: Sequence[PatientCounts]
    scans: int
    calibrated_on: int
    overlap: bool
    left_out: int
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def worst(self) -> float | None:
        """The agreement of the patient who agrees least; None where no mask shows a target."""
        found = [value for each in self.patients if (value := each.agreement) is not None]
        return min(found) if found else None

    @property
    def mean(self) -> float | None:
        """The mean agreement over patients with a target."""
        found = [value for each in self.patients if (value := each.agreement) is not None]
        return float(np.mean(found)) if found else None

    @property
    def size_change(self) -> float | None:
        """How much all targets together shrink or grow, as a share of them."""
        before, after = (sum(int(counts[1:].sum()) for counts in each) for each in self._sums())
        return abs(after / before - 1) if before else None

    @property
    def emptied(self) -> int:
        """The number of targets, each a class of a patient, that are gone."""
        return sum(len(each.emptied) for each in self.patients)

    @property
    def passed(self) -> bool:
        """Whether the graph may serve."""
        return all(check["passed"] for check in self.checks())

    def checks(self) -> list[dict[str, Any]]:
        """The checks of the gate, in the form of every gate's JSON."""
        # What was not measured fails: a graph is not served because nothing could be measured.
        worst, change = self.worst, self.size_change
        return [
            {
                "name": "worst-patient",
                "value": worst,
                "limit": LEAST_AGREEMENT,
                "passed": worst is not None and worst >= LEAST_AGREEMENT,
                "meaning": "Dice with the float32 masks, of the patient who agrees least",
                "bound": "at least",
                "failure": "Its masks differ from those of the float32 graph."
                if worst is not None
                else "The float32 graph finds no target in these scans, so nothing can be compared.",
            },
            {
                "name": "emptied",
                "value": float(self.emptied),
                "limit": 0.0,
                "passed": self.emptied == 0,
                "meaning": "targets that the float32 graph finds and this one does not",
                "bound": "at most",
                "failure": "It loses targets.",
            },
            {
                "name": "size",
                "value": change,
                "limit": MOST_SIZE_CHANGE,
                "passed": change is not None and change <= MOST_SIZE_CHANGE,
                "meaning": "share by which all targets together shrink or grow",
                "bound": "at most",
                "failure": "Its targets are smaller or larger on the whole.",
            },
        ]

    def sentences(self) -> list[str]:
        """What a person should know besides the checks."""
        found = [
            f"Judged on {self.scans} scans of {len(self.patients)} patients, calibrated on scans of "
            f"{self.calibrated_on} {'of the same' if self.overlap else 'other'} patients."
        ]
        if self.overlap:
            found.append(
                "The scans that calibrated the graph also judged it, since they are of fewer than "
                f"{FEWEST_TO_SPLIT} patients: on other scans it may agree less."
            )
        if self.left_out:
            found.append(f"{self.left_out} further scans were not used: the others are evenly spaced.")
        return found

    def to_json(self) -> dict[str, Any]:
        """The verdict and the patients behind it, for the gate of a job, a version's lineage and a file."""
        names = [" + ".join(each.labels) for each in self.task.classes]
        return {
            "passed": self.passed,
            "checks": self.checks(),
            "summary": self.sentences(),
            "precision": self.precision,
            "mean_agreement": _rounded(self.mean),
            "overlap": self.overlap,
            "calibrated_on": self.calibrated_on,
            "scans": self.scans,
            "left_out": self.left_out,
            "bytes": self.sizes,
            "patients": [
                {
                    "patient": number,
                    "agreement": _rounded(each.agreement),
                    "size_ratio": _rounded(each.size_ratio),
                    "emptied": [names[index] for index in each.emptied],
                }
                for number, each in enumerate(self.patients, start=1)
            ],
        }

    def _sums(self) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        return [each.before for each in self.patients], [each.after for each in self.patients]


# With fewer patients, none would be left to judge by.
FEWEST_TO_SPLIT = 4


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
