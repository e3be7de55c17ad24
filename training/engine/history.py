"""Run history: one entry per round and site, and the observer interface that receives the entries."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from training.privacy import Spent

TEST = "test"
_MODEL = r"((?P<model>cluster|personal)_)?"
_FINAL = re.compile(_MODEL + r"(?P<split>test|val)_(dice|accuracy)(/(?P<label>.*))?", re.DOTALL)
_SURFACES = re.compile(_MODEL + r"test_(?P<metric>hd95|assd|nsd)(?P<pixels>_px)?/(?P<label>.*)", re.DOTALL)
_ONLY_FINAL = re.compile(_MODEL + r"(test_.*|val_dice/.*|val_n(/.*)?)", re.DOTALL)
_SURFACE_GROUPS = ("model", "metric", "pixels", "label")


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


@dataclass(frozen=True)
class FinalScore:
    """A score of a model that sites took once, at the end: mean and number of patients by site.

    `model` is `cluster` for that of a site's cluster, `personal` for a site's own, empty for the one that all
    share. Of images with classes it is the accuracy, and images are counted. `label` is empty for all labels.
    """

    model: str
    split: str
    label: str
    sites: Mapping[str, tuple[float, int]]

    @property
    def count(self) -> int:
        """The patients of all sites."""
        return sum(count for _, count in self.sites.values())

    @property
    def mean(self) -> float:
        """The mean over the patients of all sites."""
        return math.fsum(mean * count for mean, count in self.sites.values()) / self.count


def final_scores(history: Sequence[RoundEntry]) -> list[FinalScore]:
    """Return the scores of the phase `test`, model by model.

    A model's scores on test patients come first, then those on validation patients by label.
    """
    found: dict[tuple[str, str, str], dict[str, tuple[float, int]]] = {}
    for entry in history:
        for site, part in entry.sites.items() if entry.phase == TEST else ():
            for name, value in part.metrics.items():
                if match := _FINAL.fullmatch(name):
                    model, split, label = match["model"] or "", match["split"], match["label"] or ""
                    of = f"{model}_" if model else ""
                    count = int(part.metrics[f"{of}{split}_n" + (f"/{label}" if label else "")])
                    found.setdefault((model, split, label), {})[site] = value, count
    return [FinalScore(*names, sites) for names, sites in sorted(found.items())]


@dataclass(frozen=True)
class FinalDistance:
    """A surface metric of a model by label, taken once on test patients: mean and number of them by site.

    `metric` is hd95 or assd (lower is better) or nsd; `unit` is mm, or px of the network's input where
    spacing is unknown. A patient of whom answer or truth lacks the label has no surface to measure: it is not
    in the number, and is in that of the label's `FinalScore`.
    """

    model: str
    label: str
    metric: str
    unit: str
    sites: Mapping[str, tuple[float, int]]

    @property
    def count(self) -> int:
        """The patients of all sites that have both surfaces."""
        return sum(count for _, count in self.sites.values())

    @property
    def mean(self) -> float:
        """The mean over these patients; NaN of none."""
        total = math.fsum(mean * count for mean, count in self.sites.values())
        return total / self.count if self.count else math.nan


def final_distances(history: Sequence[RoundEntry]) -> list[FinalDistance]:
    """Return the surface metrics of the phase `test`, model by model, label by label."""
    found: dict[tuple[str, str, str, str], dict[str, tuple[float, int]]] = {}
    for entry in history:
        for site, part in entry.sites.items() if entry.phase == TEST else ():
            for name, value in part.metrics.items():
                if match := _SURFACES.fullmatch(name):
                    model, metric, pixels, label = (match[group] or "" for group in _SURFACE_GROUPS)
                    of = f"{model}_" if model else ""
                    count = int(part.metrics[f"{of}test_surfaces{pixels}/{label}"])
                    key = (model, label, metric, "px" if pixels else "mm")
                    found.setdefault(key, {})[site] = value, count
    return [FinalDistance(*names, sites) for names, sites in sorted(found.items())]


def missing(history: Sequence[RoundEntry]) -> dict[str, str]:
    """Say of each site that a round went on without in which rounds that was, and why the last time."""
    rounds: dict[str, dict[str, list[int]]] = {}
    why: dict[str, str] = {}
    for entry in history:
        for site, reason in entry.dropped.items():
            rounds.setdefault(site, {}).setdefault(entry.phase, []).append(entry.round + 1)
            why[site] = reason
    lengths = {entry.phase: entry.rounds for entry in history}
    found = {}
    for site, phases in rounds.items():
        places = [
            f"{phase} {_ranges(numbers)} of {lengths[phase]}" if lengths[phase] > 1 else phase
            for phase, numbers in phases.items()
        ]
        found[site] = f"{', '.join(places)}: {why[site]}"
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """Such as 3-5, 7 of 3, 4, 5 and 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def is_final(metric: str) -> bool:
    """Whether a metric is one of those that are taken once, at the end, with their numbers of patients."""
    return _ONLY_FINAL.fullmatch(metric) is not None


def never_found(history: Sequence[RoundEntry]) -> list[str]:
    """Describe the labels of which no model of the run finds a voxel in any patient that was scored."""
    by_label: dict[str, list[FinalScore]] = {}
    for score in final_scores(history):
        if score.label:
            by_label.setdefault(score.label, []).append(score)
    return [
        f"label '{label}' is never found: its Dice is 0 in all {_most_patients(scores)} "
        "patients that were scored; look at its masks, train longer, or leave it out"
        for label, scores in by_label.items()
        if not any(score.mean for score in scores)
    ]


def _most_patients(scores: Sequence[FinalScore]) -> int:
    """The patients of the model that most were scored with: the models of a run are scored on the same."""
    counts: Counter[str] = Counter()
    for score in scores:
        counts[score.model] += score.count
    return max(counts.values())


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
