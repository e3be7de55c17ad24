"""What the gate looks at: a candidate's masks beside its parent's and its replicas'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from personalization.gate.masks import (
    Comparison,
    agreement_gain,
    checked_index,
    checked_maps,
    mean_agreement,
    mean_fragments,
)

# Below this share of one slice (16 pixels of 128x128) a class in a scan is specks: it counts as not there.
SPECK = 1e-3
# Of all pixels: added to sizes before they are divided, so that nothing from nothing is no change.
LITTLE = 1e-4
# Share of a scan's pixels to which any mask may grow, however small the parent's are.
ROOM = 0.02


@dataclass(frozen=True)
class Evidence:
    """The numbers that are judged; their meaning is in `verdict.judge`. None: not measured."""

    scans: int
    agreement: float
    stability: float | None
    size_factor: float
    emptied: float
    giant: float
    fragments: float
    source_warnings: float
    statistics_distance: float
    consensus_gain: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def gather(
    candidate: ArrayLike,
    parent: ArrayLike,
    replicas: Sequence[ArrayLike],
    scan_index: ArrayLike,
    classes: int,
    source_warnings: float,
    statistics_distance: float,
    references: Sequence[ArrayLike] = (),
) -> Evidence:
    """Measure the class maps [N, H, W] of a candidate on the hospital's scans.

    `parent` is what the global model gives on the same slices, whatever serves the hospital now. `replicas`
    are what the same adaptation gives with another seed, or from half of the scans. `scan_index` [N] says
    which slices are of one scan; those of one patient count as one where patients can be told.
    `source_warnings` is the share of scans that do not look like training's, `statistics_distance` what the
    function of that name says. `references` are what the federation says of the same slices (`consensus`);
    none: not measured.

    Raises LabelError for maps of unlike shapes, or with values that are no classes.
    """
    ours = checked_maps(candidate, "candidate", classes)
    theirs = checked_maps(parent, "parent", classes, ours)
    index = checked_index(scan_index, len(ours))
    others = [
        checked_maps(replica, f"replica {i}", classes, ours) for i, replica in enumerate(replicas, start=1)
    ]
    said = [checked_maps(maps, f"reference {i}", classes, ours) for i, maps in enumerate(references, start=1)]
    comparison = Comparison.of(ours, theirs, index, classes)
    own, before = comparison.first[:, 1:].sum(axis=1), comparison.second[:, 1:].sum(axis=1)
    slices = comparison.first.sum(axis=1)
    gains = [agreement_gain(ours, theirs, maps, index, classes, SPECK) for maps in said]
    return Evidence(
        scans=len(own),
        agreement=mean_agreement(ours, theirs, index, classes, SPECK),
        stability=min((mean_agreement(ours, other, index, classes, SPECK) for other in others), default=None),
        size_factor=_size_factor(comparison),
        emptied=float(np.mean((before >= SPECK) & (own < SPECK))),
        giant=float(np.mean(own / slices > largest_sound(float((before / slices).max())))),
        fragments=(mean_fragments(ours, classes) + 1) / (mean_fragments(theirs, classes) + 1),
        source_warnings=source_warnings,
        statistics_distance=statistics_distance,
        consensus_gain=min((gain for gain in gains if gain is not None), default=None),
    )


def _size_factor(comparison: Comparison) -> float:
    """By how much the foreground class that changed most grew or shrank over all scans, at least 1."""
    counts = comparison.counts.sum(axis=0)
    now = counts.sum(axis=1)[1:] / counts.sum() + LITTLE
    before = counts.sum(axis=0)[1:] / counts.sum() + LITTLE
    return float(np.maximum(now / before, before / now).max())


def largest_sound(before: float) -> float:
    """The share of a scan beyond which a mask is a giant, where the parent's largest one has `before`.

    Twice as large, but where that is most of the image, half of what is left of it.
    """
    return max(min(2 * before, (1 + before) / 2), ROOM)
