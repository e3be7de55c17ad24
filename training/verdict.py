"""What the test of a run says, in words: is the model good, for whom is it worse, and what next.

Every figure has its number of patients, or of images of a classification. One of fewer than ten is called
few, and is in no rank and no choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import bdtrc

from model_store.task import Task
from personalization.metrics import METRICS, metrics_of
from training.data.cases import FEW_CASES
from training.engine.history import (
    TEST,
    FinalChange,
    FinalScore,
    RoundEntry,
    final_changes,
    final_rates,
    final_scores,
    missing,
    never_found,
)
from training.paired import Paired
from training.progress.format import number

# The models of a run, and how a sentence names each.
MODELS = {
    "": "the shared model",
    "cluster": "the models of the clusters",
    "personal": "the sites' own models",
}
# The model that serves one site, and the models that serve several.
_SERVES = {
    "": ("the shared model", "the shared model"),
    "cluster": ("the model of its cluster", "the models of their clusters"),
    "personal": ("its own model", "their own models"),
}
# Above this a result is called that of chance.
_BY_CHANCE = 0.05
# A label that is missed in more of its patients is named.
_MISSED = 0.05
# So far below the next site, the worst one is to be looked at.
_FAR = 0.05


@dataclass(frozen=True)
class Verdict:
    """Sentences; each may be empty.

    `lacking` names sites that a round or the figures lack, `good` says how good the model is and where it is
    worst, `own` what other models than the shared one change on the same patients, `next` what to do.
    """

    lacking: str
    good: str
    own: str
    next: str

    @property
    def sentences(self) -> tuple[str, ...]:
        """Those that are not empty, in their order."""
        return tuple(filter(None, (self.lacking, self.good, self.own, self.next)))

    @property
    def lines(self) -> tuple[str, ...]:
        """The one or two lines of a command, which says itself what to do next."""
        return tuple(filter(None, (" ".join(filter(None, (self.lacking, self.good))), self.own)))


@dataclass(frozen=True)
class Ranked:
    """A score at one site, of one label, or of all with an empty `label`."""

    site: str
    label: str
    mean: float
    count: int

    @property
    def few(self) -> bool:
        """Whether it is of too few cases to be ranked."""
        return self.count < FEW_CASES


def verdict_of(
    task: Task, patients: Mapping[str, Mapping[str, int]], rounds: Sequence[RoundEntry]
) -> Verdict:
    """The verdict on a run; `patients` has each site's by split."""
    scores = [score for score in final_scores(rounds) if score.split == TEST]
    title, of = METRICS[metrics_of(task.kind)[0].name].title, "patients" if task.labels else "images"
    main = next((model for model in MODELS if any(score.model == model for score in scores)), None)
    gone, silent = missing(rounds), _silent(patients, rounds, scores)
    lacking = _lacking(len(patients), gone, silent)
    if main is None:
        return Verdict(
            lacking,
            "No site sent scores of test patients: how good the model is, is unknown.",
            "",
            "Next: score it on patients that it was not trained on (`locum accept`) before it serves.",
        )
    changes = [each for each in final_changes(rounds) if not each.label]
    useless = _useless(task, rounds, main, scores)
    ranks = ranked(scores, main)
    good = (_good(scores, main, title, of), _worst(ranks, main, of), _missed(rounds, main, of), useless)
    own = [_own(each, [*patients], of) for each in changes]
    if not changes and any(score.model != main for score in scores):
        own = ["No site compared its own model with the shared one on the same patients."]
    return Verdict(
        lacking,
        " ".join(filter(None, good)),
        " ".join(filter(None, own)),
        _next(ranks, changes, [*gone], [*silent], of, main, useless=bool(useless)),
    )


def ranked(scores: Iterable[FinalScore], model: str) -> list[Ranked]:
    """The scores of a model by site, the worst site first, then the sites that are of too few by name.

    A site's place is that of its score of all labels; within a site, all labels come first, then the worst.
    """
    rows = [
        Ranked(site, score.label, *found)
        for score in scores
        if score.model == model
        for site, found in score.sites.items()
    ]
    places = {row.site: (row.few, 0.0 if row.few else row.mean, row.site) for row in rows if not row.label}
    last = (True, 0.0)

    def place(row: Ranked) -> tuple[Any, ...]:
        own = (row.few, 0.0 if row.few else row.mean, row.label) if row.label else (False, -1.0, "")
        return (*places.get(row.site, (*last, row.site)), *own)

    return sorted(rows, key=place)


def chance(task: Task, rounds: Sequence[RoundEntry], model: str) -> tuple[str, float] | None:
    """The class that is answered right as often as the model is, by always answering it, with its share.

    None of a model that is better than that beyond chance, and of what has no classes. The test is one-sided
    and binomial, at 5 %.
    """
    classes = {
        each.label: each for each in final_rates(rounds) if (each.model, each.metric) == (model, "recall")
    }
    total = sum(each.count for each in classes.values())
    if task.labels or not total:
        return None
    most = max(classes.values(), key=lambda each: each.count)
    right = round(sum(each.mean * each.count for each in classes.values()))
    by_chance = float(bdtrc(right - 1, total, most.count / total)) if right else 1.0
    return (most.label, most.count / total) if by_chance > _BY_CHANCE else None


def cases(count: int) -> str:
    """Such as n = 12, or n = 4, few."""
    return f"n = {count}, few" if count < FEW_CASES else f"n = {count}"


def interval(found: Paired) -> str:
    """Such as -0.003 to +0.011; empty without one."""
    return "" if found.low is None else f"{found.low:+.3f} to {found.high:+.3f}"


def _silent(
    patients: Mapping[str, Mapping[str, int]], rounds: Sequence[RoundEntry], scores: Sequence[FinalScore]
) -> dict[str, str]:
    """The sites without a score of a test patient, and why; none of a run that tests nothing."""
    scored = {site for score in scores for site in score.sites}
    entries = [entry for entry in rounds if entry.phase == TEST]
    sites = patients if entries else {}
    return {site: _why(site, sites[site], entries) for site in sites if site not in scored}


def _lacking(sites: int, gone: Mapping[str, str], silent: Mapping[str, str]) -> str:
    """Name the sites that a round went on without, and those that sent no scores."""
    parts = []
    if gone:
        named = "; ".join(f"{site} in {where}" for site, where in gone.items())
        parts.append(f"{sites - len(gone)} of {sites} sites took part in every round: without {named}.")
    if silent:
        named = ", ".join(f"{site} ({why})" for site, why in silent.items())
        parts.append(f"No test scores of {named}.")
    return " ".join(parts)


def _why(site: str, counts: Mapping[str, int], entries: Sequence[RoundEntry]) -> str:
    for entry in entries:
        if site in entry.sites:
            if "metrics" in entry.sites[site].withheld:
                return "its policy keeps its statistics"
            return "it has no test patients" if not counts.get(TEST) else "it sent none"
        if site in entry.dropped:
            return "it dropped out of the test"
        if site in entry.absent:
            return entry.absent[site]
    return "it was not asked"


def _good(scores: Sequence[FinalScore], main: str, title: str, of: str) -> str:
    """How good the model is on all test patients."""
    score = next((each for each in scores if each.model == main and not each.label), None)
    if score is None:
        return ""
    labels = [each for each in scores if each.model == main and each.label]
    least = min(labels, key=lambda each: each.count, default=None)
    over = ""
    if least is not None and len(labels) > 1:
        over = f", a mean over {len(labels)} labels ({least.label}: {cases(least.count)})"
    few = ", few," if score.count < FEW_CASES else ""
    verb = "has" if main == "" else "have"
    return (
        f"{_capital(MODELS[main])} {verb} {title} {number(score.mean)} on {score.count} test {of}{few} of "
        f"{_sites(len(score.sites))}{over}."
    )


def _worst(ranks: Sequence[Ranked], main: str, of: str) -> str:
    """Where the model is worst, of the sites and labels that have enough cases to say so."""
    only = {row.label for row in ranks if row.label}
    # The mean over labels hides one; the only label is that mean.
    rows = [row for row in ranks if bool(row.label) == (len(only) > 1)]
    able = [row for row in rows if not row.few]
    few = list(dict.fromkeys(row.site for row in rows if row.few))
    unranked = f"Not ranked, with fewer than {FEW_CASES} test {of}: {_listed(few)}." if few else ""
    if not able:
        return f"No site is ranked: none has {FEW_CASES} test {of}."
    worst = min(able, key=lambda row: row.mean)
    what = f"{worst.label} at {worst.site}" if worst.label else f"at {worst.site}"
    if len(able) == 1:
        return f"{_capital(what)}: {number(worst.mean)} ({cases(worst.count)}). {unranked}".strip()
    said = f"{'They are' if main else 'It is'} worst {'for ' if worst.label else ''}{what}"
    return f"{said}: {number(worst.mean)} ({cases(worst.count)}). {unranked}".strip()


def _missed(rounds: Sequence[RoundEntry], main: str, of: str) -> str:
    """Name the label that is missed most often, or the class with the lowest recall."""
    rates = [each for each in final_rates(rounds) if each.model == main and each.count >= FEW_CASES]
    missed = [each for each in rates if each.metric == "missed" and each.mean > _MISSED]
    if missed:
        most = max(missed, key=lambda each: each.mean)
        lost = round(most.mean * most.count)
        return f"In {lost} of {most.count} {of} with {most.label} it is not found at all."
    recalls = [each for each in rates if each.metric == "recall"]
    if len(recalls) > 1:
        least = min(recalls, key=lambda each: each.mean)
        return f"Recall is lowest for {least.label}: {number(least.mean)} ({cases(least.count)})."
    return ""


def _useless(task: Task, rounds: Sequence[RoundEntry], main: str, scores: Sequence[FinalScore]) -> str:
    """Say that a result is no better than chance, or that a label is never found."""
    if found := chance(task, rounds, main):
        name, share = found
        said = f"{_capital(MODELS[main])} {'are' if main else 'is'} not better than chance"
        return f"{said}: always answering {name} is right in {number(share)}."
    if never_found(rounds):
        lost = [
            f"{each.label} ({cases(each.count)})"
            for each in scores
            if each.model == main and each.label and not each.mean
        ]
        return f"{_listed(lost)} is never found." if lost else ""
    return ""


def _own(change: FinalChange, sites: Sequence[str], of: str) -> str:
    """What a model changes on the same patients: of all together, and the sites at which it is shown."""
    found = change.together
    if found is None:
        return ""
    by_site = change.by_site
    without = [site for site in sites if site not in by_site]
    base = MODELS[change.base]
    shown = {1: "better", -1: "worse", 0: "no difference is shown"}[found.direction]
    few = ", few" if found.count < FEW_CASES else ""
    limits = f" (95 %: {interval(found)})" if found.low is not None else ""
    said = (
        f"{_capital(MODELS[change.model])} against {base}, on the same {found.count} {of}{few}"
        f"{f' (without {_listed(without)})' if without else ''}: {number(found.before)} to "
        f"{number(found.after)}, {found.change:+.3f}{limits}: {shown}."
    )
    parts = []
    for direction, word in ((1, "better"), (-1, "worse")):
        named = [
            f"{site} ({each.change:+.3f}, {cases(each.count)})"
            for site, each in sorted(by_site.items(), key=lambda item: _order(*item))
            if each.direction == direction
        ]
        if named:
            parts.append(f"{word} at {_listed(named)}")
    return f"{said} By site: {', '.join(parts)}." if parts and len(by_site) > 1 else said


def _order(site: str, found: Paired) -> tuple[bool, float, str]:
    """The largest change first, then those of few cases by name."""
    few = found.count < FEW_CASES
    return few, 0.0 if few else -abs(found.change), site


def _next(
    ranks: Sequence[Ranked],
    changes: Sequence[FinalChange],
    gone: Sequence[str],
    silent: Sequence[str],
    of: str,
    main: str,
    *,
    useless: bool,
) -> str:
    """What to do next."""
    steps = []
    if useless:
        steps.append(f"do not serve by {MODELS[main]}: look at labels and settings, train longer, test again")
    if gone:
        steps.append(f"train on with {_listed(gone)} (`--from`), or serve it as one that lacks rounds of it")
    if silent:
        steps.append(f"score it at {_listed(silent)} (`locum accept`)")
    for change in changes:
        for direction, model in ((1, change.model), (-1, change.base)):
            if useless and model == main:
                continue
            at = [
                site
                for site, each in change.by_site.items()
                if each.direction == direction and each.count >= FEW_CASES
            ]
            if at:
                steps.append(f"serve {_listed(at)} by {_SERVES[model][len(at) > 1]}")
    whole = [row for row in ranks if not row.label]
    able = sorted((row for row in whole if not row.few), key=lambda row: row.mean)
    if len(able) > 1 and able[1].mean - able[0].mean > _FAR:
        steps.append(f"look at the cases of {able[0].site}")
    if few := [row.site for row in whole if row.few]:
        steps.append(f"gather at least {FEW_CASES} test {of} at {_listed(few)}")
    if not useless:
        steps.append("serve it (`locum serve --store STORE`)")
    return f"Next: {'; '.join(steps)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sites(count: int) -> str:
    return "one site" if count == 1 else f"{count} sites"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
