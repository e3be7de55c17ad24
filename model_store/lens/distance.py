"""How far scans are from those that a model was trained on, without its network.

field, spectrum and quantiles are compared by R (`Fingerprint.shifts`), spacing and size with the ranges of
the guard, on the same scale (`Apart.shift`): 1 is usual, and 4 is twice as far.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from model_store.errors import ScanMismatch
from model_store.guard import Apart, Extent, ReferenceStatistics, apart, summarise
from model_store.lens.features import Kind
from model_store.lens.fingerprint import Fingerprint, Seen, Sums
from model_store.lens.fit import Polarity, Step, foreseen, polarity_of
from model_store.lens.scan import images_of
from model_store.preprocessing import prepare_for
from model_store.scans.types import Scan
from model_store.task import Task

Measure: TypeAlias = Kind | Extent | Literal["polarity"]
# Two natural deviations, above which something differs; the guard warns of a spacing and a size there.
UNUSUAL: Final = 4.0


@dataclass(frozen=True)
class Distance:
    """How far one scan, or all of them, are.

    Attributes:
        shifts: R of each kind.
        apart: spacing and size, where they are known.
        polarity: whether it looks inverted, and how surely.
    """

    shifts: Mapping[Kind, float]
    apart: Mapping[Extent, Apart]
    polarity: Polarity

    @property
    def most(self) -> Measure | None:
        """What differs most, the polarity of what looks inverted; None where nothing is unusual."""
        if self.polarity.inverted:
            return "polarity"
        extents = {extent: each.shift for extent, each in self.apart.items()}
        found: dict[Measure, float] = dict([*self.shifts.items(), *extents.items()])
        farthest = max(found, key=lambda each: found[each])
        return farthest if found[farthest] > UNUSUAL else None


class Distances:
    """Distances of scans that come one by one; none of them is kept."""

    def __init__(self, fingerprint: Fingerprint, task: Task, reference: ReferenceStatistics | None) -> None:
        self._fingerprint, self._task, self._reference = fingerprint, task, reference
        self._sums = Sums()
        self._apart: list[Mapping[Extent, Apart]] = []

    def add(self, patient: Hashable, scan: Scan) -> Distance:
        """Measure a scan of a patient.

        Raises ScanError for one that does not fit the task, that shows nothing, and for a mask.
        """
        if (values := scan.values_of_mask) is not None:
            raise ScanMismatch(
                f"expected a scan, found {values} different values, as masks have: leave masks out"
            )
        prepared = prepare_for(self._task, scan)
        own = Sums()
        own.add(patient, images_of(prepared))
        if not (seen := own.seen()):
            raise ScanMismatch(
                "expected a scan, found the same intensity everywhere in each image: it shows nothing"
            )
        beyond = apart(summarise(scan, prepared), self._reference)
        self._sums.include(own)
        self._apart.append(beyond)
        return self._of(seen, beyond)

    @property
    def count(self) -> int:
        """The number of scans."""
        return len(self._apart)

    @property
    def seen(self) -> Mapping[Kind, Seen]:
        """The features of all scans together, patient by patient."""
        return self._sums.seen()

    def whole(self) -> Distance:
        """That of all scans together: spacing and size by the geometric mean. There is at least one."""
        beyond: dict[Extent, Apart] = {}
        for extent in dict.fromkeys(extent for each in self._apart for extent in each):
            known = [each[extent] for each in self._apart if extent in each]
            ratio, factor = (
                math.exp(np.mean(np.log(each)))
                for each in zip(*((one.ratio, one.factor) for one in known), strict=True)
            )
            beyond[extent] = Apart(ratio, factor)
        return self._of(self.seen, beyond)

    def steps(self) -> dict[Step, float]:
        """What a lens of all these scans would do, as far as one look at them tells (`foreseen`)."""
        return foreseen(self.seen, self._fingerprint)

    def _of(self, seen: Mapping[Kind, Seen], beyond: Mapping[Extent, Apart]) -> Distance:
        return Distance(self._fingerprint.shifts(seen), beyond, polarity_of(seen, self._fingerprint))
