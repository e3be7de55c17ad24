"""What a scan picked from a pool, as a JSON answer tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, Field

from service.inference.picks import Picked

PICKED: Final = (
    "Of an ssf-pool (FedIns): what the scan picked; with routing=slice, what each slice of a volume did, in "
    "order."
)


class PickReport(BaseModel):
    """Which entries of an ssf-pool a scan, or a slice, was adapted by."""

    entries: list[int] = Field(description="The most similar first; their mean is what adapts the network.")
    similarities: list[float] = Field(
        description="Of each entry's key and the scan's query: the cosine, -1..1. Two scans that picked "
        "other entries were answered by differently adapted networks."
    )


def pick_reports(picked: Sequence[Picked] | None) -> list[PickReport] | None:
    """What was picked, as a JSON answer tells it."""
    if picked is None:
        return None
    return [PickReport(entries=list(p.entries), similarities=list(p.similarities)) for p in picked]
