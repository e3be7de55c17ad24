"""The content of a card as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from service.kinds import Words
from service.kinds.card import Section

UNDER_WAY = ("queued", "running", "cancelling")


@dataclass(frozen=True)
class Epoch:
    """One epoch as it was scored: epoch 0 is step 0, before anything was learned.

    `parts` are the terms of the loss by name, unweighted. `foreground` is the share of pixels that are not
    background, `agreement` the Dice with step 0's masks. `reason` says why an epoch is not safe.
    """

    epoch: int
    loss: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    foreground: float | None = None
    agreement: float | None = None
    safe: bool = True
    reason: str | None = None


@dataclass(frozen=True)
class CheckRow:
    """One line of the gate. `passed` is None for what could not be measured.

    `failure` says of the candidate that the check failed; None unless it did.
    """

    name: str
    meaning: str
    value: float | None
    limit: str
    passed: bool | None
    failure: str | None = None


@dataclass(frozen=True)
class Gate:
    """What the gate found, check by check, and in sentences what gain to expect."""

    passed: bool
    checks: tuple[CheckRow, ...]
    summary: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A PNG: one scan, `before` or `after` the adaptation, or as the hospital has drawn on it."""

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

    `words` and `sections` are those of the parent's kind.
    """

    job: str
    kind: str
    state: str
    model: str
    words: Words
    hospital: str | None = None
    reason: str | None = None
    stage: str | None = None
    attempt: int = 0
    created: datetime | None = None
    started: datetime | None = None
    finished: datetime | None = None
    candidate: str | None = None
    candidate_digest: str | None = None
    candidate_withdrawn: str | None = None
    parent_digest: str | None = None
    scans: int | None = None
    images: int | None = None
    best_epoch: int | None = None
    epochs: tuple[Epoch, ...] = ()
    sections: tuple[Section, ...] = ()
    gate: Gate | None = None
    pictures: tuple[tuple[Picture, ...], ...] = ()
    warnings: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def under_way(self) -> bool:
        """Whether there is more to come, so that the page should look again."""
        return self.state in UNDER_WAY
