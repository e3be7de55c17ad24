"""Run history: one entry per round and site, and the observer interface that receives the entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from training.privacy import Spent


@dataclass(frozen=True)
class SiteEntry:
    """One site's part of a round. `sent` and `received` are bytes of tensors by group.

    `sent` also has the bytes of the metrics. `scaled` is the factor of its update that counted, where the
    defence bounded it. `claimed` is the weight that it claimed, where that was more than it had announced,
    which counted. `share` is its share of the round's weight, where it is more than half. `privacy` says, of
    the groups that left with noise, what they cost the site so far.
    """

    weight: float
    metrics: Mapping[str, float]
    sent: Mapping[str, int]
    received: Mapping[str, int]
    withheld: tuple[str, ...]
    seconds: float
    scaled: float | None = None
    privacy: Mapping[str, Spent] = field(default_factory=dict)
    claimed: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class RoundEntry:
    """One round of a phase, or one step of a server stage (which has no sites).

    `dropped` gives the reason for each participating site that failed; `absent` for each site that did not
    participate. `refused` has the part of each dropped site that had delivered: it does not count in the
    result, but it left the site.
    """

    phase: str
    round: int
    rounds: int
    seconds: float = 0.0
    sites: Mapping[str, SiteEntry] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, SiteEntry] = field(default_factory=dict)

    @property
    def deliveries(self) -> dict[str, SiteEntry]:
        """All that left the sites in the round."""
        return {**self.sites, **self.refused}

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON, as stored in checkpoints and records."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RoundEntry:
        """Build an entry from the result of `to_json`."""
        parts = {
            field: {
                name: SiteEntry(
                    **{
                        **entry,
                        "withheld": tuple(entry["withheld"]),
                        "privacy": {group: Spent(**said) for group, said in entry.get("privacy", {}).items()},
                    }
                )
                for name, entry in content.get(field, {}).items()
            }
            for field in ("sites", "refused")
        }
        return cls(**{**content, **parts})


def defended(history: Sequence[RoundEntry]) -> list[str]:
    """Describe what the server did not believe of the sites, and which sites had most of the weight.

    One sentence for each site and phase, however many rounds it was so.
    """
    parts: dict[tuple[str, str], list[SiteEntry]] = {}
    for entry in history:
        for site, part in entry.sites.items():
            parts.setdefault((entry.phase, site), []).append(part)
    found = []
    for (phase, site), entries in parts.items():
        head = f"phase '{phase}': site {site}"
        if shares := [entry.share for entry in entries if entry.share is not None]:
            found.append(f"{head} {majority(max(shares))} in {_rounds(len(shares))}")
        if claims := [entry for entry in entries if entry.claimed is not None]:
            most = max(claims, key=lambda entry: entry.claimed or 0.0)
            found.append(f"{head} {overclaim(most)} in {_rounds(len(claims))}")
        if factors := [entry.scaled for entry in entries if entry.scaled is not None]:
            found.append(f"{head} had its update scaled by {min(factors):.3g} in {_rounds(len(factors))}")
    return found


def majority(share: float) -> str:
    """Say that a site has more than half of the weight of a round."""
    return (
        f"has {share:.1%} of all weight, more than all others together, and decides what is learned "
        "(`defence: {most_share: 0.5}` bounds it)"
    )


def overclaim(entry: SiteEntry) -> str:
    """Say that a site claimed more weight than it announced."""
    return f"claimed a weight of {entry.claimed:g}; {entry.weight:g} counts, which it announced"


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


class Observer(Protocol):
    """Receives the events of a run. An observer cannot change the run."""

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:
        """Handle the start of a round; `round` counts from 0 within its phase."""

    def site_finished(self, phase: str, round: int, site: str, entry: SiteEntry) -> None:
        """Handle a site's delivery."""

    def round_finished(self, entry: RoundEntry) -> None:
        """Handle the end of a round, after it was committed to disk."""

    def warning(self, message: str) -> None:
        """Handle a warning for the operator."""


class Silent:
    """An observer that ignores all events."""

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:
        """Do nothing."""

    def site_finished(self, phase: str, round: int, site: str, entry: SiteEntry) -> None:
        """Do nothing."""

    def round_finished(self, entry: RoundEntry) -> None:
        """Do nothing."""

    def warning(self, message: str) -> None:
        """Do nothing."""
