"""Which masks must be looked at: the rank of an answer among the hospital's own.

A confidence has no meaning by itself, since networks are sure in different ways. Among a hospital's own
answers of the same version its rank says which are the least sure.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Assignment, Database, LookedAt, Observation, ObservedLabel
from service.observation.rows import Stored, keyed_all, of_numbers

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
        with self._database.read() as session:
            found = _newest(session, hospital, version, held.last)
            if not found:
                return
            held.last = found[0]
            for _, label, confidence in _confidences(session, found):
                held.by_label.setdefault(label, deque(maxlen=AMONG)).append(confidence)


@dataclass(frozen=True)
class Ranked:
    """An answer, and the rank of each of its labels among the others that were read."""

    stored: Stored
    ranks: Mapping[str, float]


def most_doubtful(session: Session, hospital: str, model: str, limit: int) -> list[Ranked]:
    """The newest answers of the version that serves a hospital, by the rank of their least sure label.

    At most `AMONG` are read. Those at which somebody looked come last, and among equals the newest first.
    The caller's right to see the hospital is the route's to check.
    """
    log = select(Assignment.digest).where(Assignment.hospital == hospital, Assignment.model == model)
    version = session.scalar(log.order_by(Assignment.sequence.desc()).limit(1))
    ranks = {} if version is None else _ranks(session, hospital, version)
    numbers = list(ranks)
    seen = set(session.scalars(select(LookedAt.observation).where(LookedAt.observation.in_(numbers))))
    # Without a rank nothing is known to be doubtful.
    numbers.sort(key=lambda number: (number in seen, min(ranks[number].values(), default=1.0), -number))
    return [Ranked(each, ranks[each.row["id"]]) for each in of_numbers(session, hospital, numbers[:limit])]


def doubts(session: Session, hospital: str, scans: Collection[str]) -> dict[str, float]:
    """Of scans, by the digests of their bytes: the rank of the least sure label in the newest answer.

    Scans without an answer, and answers without a rank, are left out.
    """
    keys = keyed_all(session, scans)
    query = select(Observation.id, Observation.scan, Observation.version).where(
        Observation.hospital == hospital, Observation.scan.in_(keys), Observation.usual
    )
    newest = {row.scan: row for row in session.execute(query.order_by(Observation.id))}
    ranks: dict[int, dict[str, float]] = {}
    for version in {row.version for row in newest.values()}:
        ranks |= _ranks(session, hospital, version)
    found = {keys[scan]: ranks.get(row.id) for scan, row in newest.items()}
    return {digest: min(own.values()) for digest, own in found.items() if own}


def _ranks(session: Session, hospital: str, version: str) -> dict[int, dict[str, float]]:
    """The ranks of the labels in the newest answers by a version, by number and label."""
    numbers = _newest(session, hospital, version)
    by_label: dict[str, list[tuple[int, float]]] = {}
    for number, label, confidence in _confidences(session, numbers):
        by_label.setdefault(label, []).append((number, confidence))
    ranks: dict[int, dict[str, float]] = {number: {} for number in numbers}
    for label, own in by_label.items():
        among = sorted(confidence for _, confidence in own)
        others = len(own) - 1
        for number, confidence in own if others >= FEWEST else ():
            below, up_to = bisect_left(among, confidence), bisect_right(among, confidence)
            # Less the answer itself, which is as sure as itself.
            ranks[number][label] = (below + up_to - 1) / 2 / others
    return ranks


def _newest(session: Session, hospital: str | None, version: str, after: int = 0) -> list[int]:
    """The numbers of the newest answers by a version, the newest first."""
    query = (
        select(Observation.id)
        .where(Observation.hospital == hospital, Observation.version == version)
        .where(Observation.id > after)
        .order_by(Observation.id.desc())
        .limit(AMONG)
    )
    return list(session.scalars(query))


def _confidences(session: Session, numbers: Collection[int]) -> list[tuple[int, str, float]]:
    """The number, label and confidence of every label of these answers, the oldest answer first."""
    columns = (ObservedLabel.observation, ObservedLabel.label, ObservedLabel.confidence)
    query = select(*columns).where(ObservedLabel.observation.in_(numbers))
    return [(*row,) for row in session.execute(query.order_by(ObservedLabel.observation))]


def _rank(earlier: Collection[float], own: float) -> float | None:
    if len(earlier) < FEWEST:
        return None
    values = np.fromiter(earlier, np.float64, len(earlier))
    return float((values < own).sum() + (values == own).sum() / 2) / len(earlier)
