"""The content of a card as plain values: the API's view of the job, and what that does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from service.jobs.views import JobView
from service.kinds import Words

UNDER_WAY = ("queued", "running", "cancelling")


@dataclass(frozen=True)
class Picture:
    """A PNG: one scan, `before` or `after` the adaptation, through the lens, or as it was drawn on."""

    caption: str
    content: bytes


@dataclass(frozen=True)
class Decision:
    """An entry of the serving log that puts this candidate into force."""

    sequence: int
    at: datetime
    actor: str
    reason: str
    override: bool
    in_force: bool


@dataclass(frozen=True)
class Card:
    """Everything on one card. Text may come from anybody: it is escaped where it is shown.

    `job` has the sections, `words` are those of the parent's kind, and `model` is the parent, else its name.
    """

    job: JobView
    model: str
    words: Words
    candidate_withdrawn: str | None = None
    scans: int | None = None
    images: int | None = None
    best_epoch: int | None = None
    pictures: tuple[tuple[Picture, ...], ...] = ()
    decisions: tuple[Decision, ...] = ()
    lineage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def under_way(self) -> bool:
        """Whether there is more to come, so that the page should look again."""
        return self.job.state in UNDER_WAY

    def has_pictures(self, caption: str) -> bool:
        """Whether a scan has a picture of this caption."""
        return any(each.caption.endswith(caption) for scan in self.pictures for each in scan)

    @property
    def passed(self) -> bool | None:
        """The gate's verdict; None before there is one."""
        found = (self.job.gate or {}).get("passed")
        return found if isinstance(found, bool) else None
