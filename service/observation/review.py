"""Which masks must be looked at: the rank of an answer among the hospital's own.

A confidence has no meaning by itself, since networks are sure in different ways. Among a hospital's own
answers of the same version its rank says which are the least sure.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from sqlalchemy import select

from service.database import Database, Observation, ObservedLabel

# Answers that a rank is among, the newest; and how many there must be for one.
AMONG: Final = 500
FEWEST: Final = 20
# Answers that were given since are looked for so often: a look costs more than an observation.
_LOOK_SECONDS = 5.0
# Hospitals and versions of which the newest confidences are held.
_MOST_HELD = 256


@dataclass
class _Held:
    """The newest confidences of one hospital and version by label, up to the observation `last`."""

    last: int = 0
    looked: float = float("-inf")
    by_label: dict[str, deque[float]] = field(default_factory=dict)


class Reviews:
    """The ranks of answers among those that were given until some seconds ago. Safe from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str | None, str], _Held] = OrderedDict()

    def of(
        self, hospital: str | None, version: str, confidences: Mapping[str, float]
    ) -> dict[str, float | None]:
        """By label: the share of the newest answers that were less sure, 0 to 1; those as sure count half.

        None where there were too few. Answers of no hospital are among each other.
        """
        with self._lock:
            held = self._held.setdefault((hospital, version), _Held())
            self._held.move_to_end((hospital, version))
            while len(self._held) > _MOST_HELD:
                self._held.popitem(last=False)
            if time.monotonic() - held.looked > _LOOK_SECONDS:
                self._read(held, hospital, version)
                held.looked = time.monotonic()
            return {label: _rank(held.by_label.get(label, ()), own) for label, own in confidences.items()}

    def _read(self, held: _Held, hospital: str | None, version: str) -> None:
        numbers = (
            select(Observation.id)
            .where(Observation.hospital == hospital, Observation.version == version)
            .where(Observation.id > held.last)
            .order_by(Observation.id.desc())
            .limit(AMONG)
        )
        with self._database.read() as session:
            found = list(session.scalars(numbers))
            if not found:
                return
            held.last = found[0]
            columns = (ObservedLabel.label, ObservedLabel.confidence)
            labels = select(*columns).where(ObservedLabel.observation.in_(found))
            for label, confidence in session.execute(labels.order_by(ObservedLabel.observation)):
                held.by_label.setdefault(label, deque(maxlen=AMONG)).append(confidence)


def _rank(earlier: deque[float] | tuple[()], own: float) -> float | None:
    if len(earlier) < FEWEST:
        return None
    values = np.fromiter(earlier, np.float64, len(earlier))
    return float((values < own).sum() + (values == own).sum() / 2) / len(earlier)
