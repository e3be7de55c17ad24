"""Find the scans of a cohort that are unlike the others or the task, so that nothing learns from them.

Behind another scanner all scans of a hospital may look unlike training: these are what an adaptation is for.
A few among others, or a kind of scans beside another, are a mistake more often than a scanner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from model_store.guard import (
    GuardWarning,
    ReferenceStatistics,
    ScanSummary,
    check,
    distances,
    is_mistaken,
)
from model_store.task import Task

# Two kinds are as far from each other as a scan that is warned of is from the training mean, and farther than
# this many times the usual distance of a scan from the next. The phantoms' scanners are at most 3 times, and
# inverted scans at least 12 times as far.
_FARTHER = 4.0


@dataclass(frozen=True)
class CohortKinds:
    """The guard's verdict on every scan of a cohort.

    Attributes:
        warnings: of each scan.
        mistaken: whether no training scan resembles the scan in kind.
        kind: of each scan, a number by first appearance; scans that show nothing count by themselves.
        used: whether anything may be fitted to the scan. It is not where its kind is warned of and another
            is not, where fewer than half of the scans are warned of, and where it shows nothing or is
            mistaken. Without a reference, it is not where its kind has fewer scans than another. If nothing
            were left, all are.
    """

    warnings: tuple[tuple[GuardWarning, ...], ...]
    mistaken: NDArray[np.bool_]
    kind: NDArray[np.int64]
    used: NDArray[np.bool_]

    @cached_property
    def warned(self) -> NDArray[np.bool_]:
        """Whether the guard warns of the scan."""
        return np.array([bool(found) for found in self.warnings], dtype=bool)

    @property
    def share_warned(self) -> float:
        """Share of the scans that the guard warns of."""
        return float(self.warned.mean())

    @property
    def share_mistaken(self) -> float:
        """Share of the scans that no training scan resembles in kind."""
        return float(self.mistaken.mean())

    @property
    def share_gross(self) -> float:
        """Share of the scans of another kind, size or spacing than training, whatever their colour."""
        return float(np.mean([any(each.gross for each in found) for found in self.warnings]))


def kinds_of(
    summaries: Sequence[ScanSummary], reference: ReferenceStatistics | None, task: Task
) -> CohortKinds:
    """Compare the scans of a cohort with training and with each other.

    Without a reference, they are compared with each other alone.
    """
    warnings = tuple(tuple(check(summary, reference, task)) for summary in summaries)
    mistaken = np.array(
        [is_mistaken(each, reference, found) for each, found in zip(summaries, warnings, strict=True)],
        dtype=bool,
    )
    constant = np.array([summary.constant for summary in summaries], dtype=bool)
    vectors = [summary.appearance for summary in summaries]
    # What training scans look like is not known of a model made elsewhere.
    looks = reference if reference is not None and reference.has_appearance else None
    # The last is the training mean.
    between = distances([*vectors, looks.mean if looks is not None else vectors[0]], looks)
    away = between[-1, :-1] if looks is not None else np.zeros(len(summaries))
    kind = _linked(between[:-1, :-1], away, ~constant)
    warned = np.array([bool(found) for found in warnings], dtype=bool)
    used = _used(kind, warned, mistaken | constant, known=looks is not None)
    return CohortKinds(warnings, mistaken, kind, used)


def _used(
    kind: NDArray[np.int64], warned: NDArray[np.bool_], unusable: NDArray[np.bool_], *, known: bool
) -> NDArray[np.bool_]:
    used = ~unusable
    if not used.any():
        return np.ones(len(kind), dtype=bool)
    there, sizes = np.unique(kind[used], return_counts=True)
    warned_of = np.array([warned[used & (kind == each)].sum() for each in there])
    ordinary = (2 * warned_of <= sizes) & known
    # Where every kind is unlike training, the hospital's is the one that most scans have.
    used &= np.isin(kind, there[ordinary if ordinary.any() else sizes == sizes.max()])
    few = 2 * int((used & warned).sum()) < int(used.sum())
    return used & ~warned if few else used


def _linked(
    distance_NN: NDArray[np.float64], away_N: NDArray[np.float64], usable: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Number the kinds of scans: those that no chain of near scans links (single linkage).

    Scans far `away` from the training mean are near each other where they differ by less than half of that.
    """
    kind = np.arange(len(distance_NN))
    edges: list[tuple[float, int, int]] = []
    nodes = [index for index, fits in enumerate(usable) if fits]
    inside, outside = nodes[:1], nodes[1:]
    while outside:
        between = distance_NN[np.ix_(inside, outside)]
        one, other = divmod(int(between.argmin()), len(outside))
        edges.append((float(between.min()), inside[one], outside[other]))
        inside.append(outside.pop(other))
    lengths = sorted(length for length, _, _ in edges)
    # The longest is the one in question.
    usual = float(np.median(lengths[:-1])) if len(lengths) > 1 else 0.0
    for length, one, other in edges:
        if length <= max(1.0, _FARTHER * usual, min(away_N[one], away_N[other]) / 2):
            kind[kind == kind[other]] = kind[one]
    return np.unique(kind, return_inverse=True)[1].astype(np.int64)
