"""Run history: one entry per round and site, and the observer interface that receives the entries."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from training.paired import Paired, PairedSums
from training.privacy import Spent

TEST = "test"
_MODEL = r"((?P<model>cluster|personal)_)?"
_FINAL = re.compile(_MODEL + r"(?P<split>test|val)_(dice|accuracy)(/(?P<label>.*))?", re.DOTALL)
_SURFACES = re.compile(_MODEL + r"test_(?P<metric>hd95|assd|nsd)(?P<pixels>_px)?/(?P<label>.*)", re.DOTALL)
_RATES = re.compile(_MODEL + r"test_(?P<metric>missed|recall|precision)/(?P<label>.*)", re.DOTALL)
_PAIRED = re.compile(_MODEL + r"test_paired_(?P<what>n|before|change|squares)(?P<label>/.*)?", re.DOTALL)
_ONLY_FINAL = re.compile(_MODEL + r"(test_.*|val_dice/.*|val_n(/.*)?)", re.DOTALL)
# Rounding of a mean of many.
_ROUNDING = 1e-6


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


class _Final:
    """A figure that sites took once, at the end: mean and number of patients, or images, by site."""

    sites: Mapping[str, tuple[float, int]]

    @property
    def count(self) -> int:
        """The patients of all sites."""
        return sum(count for _, count in self.sites.values())

    @property
    def mean(self) -> float:
        """The mean over the patients of all sites; NaN of none."""
        total = math.fsum(mean * count for mean, count in self.sites.values())
        return total / self.count if self.count else math.nan


@dataclass(frozen=True)
class FinalScore(_Final):
    """A score of a model.

    `model` is `cluster` for that of a site's cluster, `personal` for a site's own, empty for the one that all
    share. Of images with classes it is the accuracy, and images are counted. `label` is empty for all labels.
    """

    model: str
    split: str
    label: str
    sites: Mapping[str, tuple[float, int]]


def final_scores(history: Sequence[RoundEntry]) -> list[FinalScore]:
    """Return the scores of the phase `test`, model by model.

    A model's scores on test patients come first, then those on validation patients by label.
    """
    found: dict[tuple[str, str, str], dict[str, tuple[float, int]]] = {}
    for site, metrics in _of_tests(history):
        for name, value in metrics.items():
            if match := _FINAL.fullmatch(name):
                key = match["model"] or "", match["split"], match["label"] or ""
                found.setdefault(key, {})[site] = value, int(metrics[str(_count_of(name))])
    return [FinalScore(*names, sites) for names, sites in sorted(found.items())]


@dataclass(frozen=True)
class FinalDistance(_Final):
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


def final_distances(history: Sequence[RoundEntry]) -> list[FinalDistance]:
    """Return the surface metrics of the phase `test`, model by model, label by label."""
    found: dict[tuple[str, str, str, str], dict[str, tuple[float, int]]] = {}
    for site, metrics in _of_tests(history):
        for name, value in metrics.items():
            if match := _SURFACES.fullmatch(name):
                key = match["model"] or "", match["label"], match["metric"], "px" if match["pixels"] else "mm"
                found.setdefault(key, {})[site] = value, int(metrics[str(_count_of(name))])
    return [FinalDistance(*names, sites) for names, sites in sorted(found.items())]


@dataclass(frozen=True)
class FinalRate(_Final):
    """A share of test patients, or of test images, of a model by label, taken once.

    `metric` is `missed`: of the patients with the label, those of whom the answer has no voxel of it in the
    right place; or, of images with classes, `recall` (n: the images of the class) or `precision` (n: the
    images that were answered with it).
    """

    model: str
    label: str
    metric: str
    sites: Mapping[str, tuple[float, int]]


def final_rates(history: Sequence[RoundEntry]) -> list[FinalRate]:
    """Return the shares of the phase `test`, model by model, label by label."""
    found: dict[tuple[str, str, str], dict[str, tuple[float, int]]] = {}
    for site, metrics in _of_tests(history):
        for name, value in metrics.items():
            if match := _RATES.fullmatch(name):
                key = match["model"] or "", match["label"], match["metric"]
                found.setdefault(key, {})[site] = value, int(metrics[str(_count_of(name))])
    return [FinalRate(*names, sites) for names, sites in sorted(found.items())]


@dataclass(frozen=True)
class FinalChange:
    """What a model changes on the same test patients, against `base`, by label: the sums of each site.

    `model` is `personal`, or `cluster`; `base` is empty for the model that all share, or `cluster`.
    """

    model: str
    base: str
    label: str
    sites: Mapping[str, PairedSums]

    @property
    def together(self) -> Paired | None:
        """The change of all sites' patients; None of no patient."""
        return PairedSums.together(self.sites.values()).paired()

    @property
    def by_site(self) -> dict[str, Paired]:
        """The change at each site that has a patient with both scores."""
        return {site: found for site, sums in self.sites.items() if (found := sums.paired())}


def final_changes(history: Sequence[RoundEntry]) -> list[FinalChange]:
    """Return the paired changes of the phase `test`: of all labels first, then label by label."""
    found: dict[tuple[str, str], dict[str, PairedSums]] = {}
    shared = False
    for site, metrics in _of_tests(history):
        shared = shared or "test_n" in metrics
        for name in metrics:
            if (match := _PAIRED.fullmatch(name)) and match["what"] == "n":
                key = match["model"], (match["label"] or "")[1:]
                found.setdefault(key, {})[site] = _paired(metrics, match)
    return [
        FinalChange(model, "" if shared else "cluster", label, sites)
        for (model, label), sites in sorted(found.items())
    ]


def _of_tests(history: Sequence[RoundEntry]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """The metrics of each site in the phase `test`."""
    for entry in history:
        for site, part in entry.sites.items() if entry.phase == TEST else ():
            yield site, part.metrics


def check_finals(metrics: Mapping[str, float], most: int | None) -> None:
    """Raise ValueError for figures of the phase `test` that no site of at most so many cases can have.

    Every score has its number, a whole one of at most `most`, and scores and shares are in 0..1.
    """
    for name, value in metrics.items():
        if (counted := _count_of(name)) is None:
            continue
        count = metrics.get(counted, math.nan)
        if not (count == count // 1 and count >= 1 and (most is None or count <= most)):
            raise ValueError(f"{counted}: expected a whole number of 1..{most}, found {count:g}")
        distance = _SURFACES.fullmatch(name)
        largest = math.inf if distance and distance["metric"] != "nsd" else 1.0
        if not -_ROUNDING <= value <= largest + _ROUNDING:
            raise ValueError(f"{name}: expected a number in 0..{largest:g}, found {value:g}")
    for name in metrics:
        if (match := _PAIRED.fullmatch(name)) and match["what"] == "n":
            _paired(metrics, match).check(most)


def _count_of(name: str) -> str | None:
    """The metric with the number of patients that a figure of the end is a mean of; None of other names."""
    if match := _FINAL.fullmatch(name):
        counted, label = f"{match['split']}_n", match["label"]
    elif match := _SURFACES.fullmatch(name):
        counted, label = f"test_surfaces{match['pixels'] or ''}", match["label"]
    elif match := _RATES.fullmatch(name):
        counted, label = f"test_{match['metric']}_n", match["label"]
    else:
        return None
    of = f"{match['model']}_" if match["model"] else ""
    return f"{of}{counted}" + (f"/{label}" if label is not None else "")


def _paired(metrics: Mapping[str, float], match: re.Match[str]) -> PairedSums:
    """The sums of a site, from the means that it sent. Raises ValueError where one is missing."""
    of, label = f"{match['model']}_test_paired_", match["label"] or ""
    try:
        count, before, change, squares = (
            metrics[f"{of}{what}{label}"] for what in ("n", "before", "change", "squares")
        )
    except KeyError as error:
        raise ValueError(f"{error.args[0]}: expected it beside {match[0]}, found none") from error
    return PairedSums(count, *(count * each for each in (before, before + change, change, squares)))


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
