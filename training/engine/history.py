"""What happened in each round, as a person and a report want to read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class SiteEntry:
    """One site's part of a round. Bytes are those of the tensors, by group; `sent` counts metrics too."""

    weight: float
    metrics: Mapping[str, float]
    sent: Mapping[str, int]
    received: Mapping[str, int]
    withheld: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class RoundEntry:
    """One round of a phase, or one step of a server stage (which has no sites).

    `dropped` says why a site that was asked did not deliver; `absent` why a site was not asked.
    """

    phase: str
    round: int
    rounds: int
    seconds: float = 0.0
    sites: Mapping[str, SiteEntry] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As checkpoints and records hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RoundEntry:
        """The inverse of `to_json`."""
        sites = {
            name: SiteEntry(**{**entry, "withheld": tuple(entry["withheld"])})
            for name, entry in content["sites"].items()
        }
        return cls(**{**content, "sites": sites})


class Observer(Protocol):
    """Who watches a run. Nothing it does changes the run."""

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:
        """A round begins; `round` counts from 0 within its phase."""

    def site_finished(self, phase: str, round: int, site: str, entry: SiteEntry) -> None:
        """A site delivered."""

    def round_finished(self, entry: RoundEntry) -> None:
        """A round is over and safe on disk."""

    def warning(self, message: str) -> None:
        """Something a person should know."""


class Silent:
    """An observer that looks away."""

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:
        """Say nothing."""

    def site_finished(self, phase: str, round: int, site: str, entry: SiteEntry) -> None:
        """Say nothing."""

    def round_finished(self, entry: RoundEntry) -> None:
        """Say nothing."""

    def warning(self, message: str) -> None:
        """Say nothing."""
