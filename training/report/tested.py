"""The report's section on the test: scores by site and label, worst site first, and paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from model_store.task import Task
from personalization.metrics import METRICS, metrics_of
from training.data.cases import FEW_CASES
from training.engine.history import (
    FinalChange,
    FinalRate,
    FinalScore,
    RoundEntry,
    final_changes,
    final_distances,
    final_rates,
    final_scores,
)
from training.paired import Paired
from training.report.charts import Change, forest_chart
from training.verdict import MODELS, chance, ranked

# Which model a row is of.
MODEL_NAMES = {"": "shared by all sites", "cluster": "of its cluster", "personal": "the site's own"}
_OF_ALL = {
    "": "the shared model",
    "cluster": "each site's cluster's model",
    "personal": "each site's own model",
}
ALL_SITES, ALL_LABELS = "all sites", "all"
_SHOWN = {1: "better", 0: "no difference shown", -1: "worse"}


def content(task: Task, rounds: Sequence[RoundEntry]) -> dict[str, Any] | None:
    """Collect the variables of `tested.html`; None of a run without scores."""
    scores = final_scores(rounds)
    tests = [score for score in scores if score.split == "test"]
    if not scores:
        return None
    main = next((model for model in MODELS if any(score.model == model for score in tests or scores)), "")
    sites = list(dict.fromkeys(row.site for row in ranked(tests, main)))
    # A site without the main model's score, and one without a test patient.
    sites += sorted({site for score in scores for site in score.sites}.difference(sites))
    rates, title = final_rates(rounds), METRICS[metrics_of(task.kind)[0].name].title
    whole = next(iter(task.labels)) if len(task.labels) == 1 else ALL_LABELS
    by_chance = chance(task, rounds, main)
    return {
        "metric": title,
        "of": "patients" if task.labels else "images",
        "main": _OF_ALL[main],
        "scores": _score_rows(task, scores, rates, main, sites),
        "changes": [_change(change, sites, title, whole) for change in _by_model(final_changes(rounds))],
        "distances": _distance_rows(rounds, scores, main, sites),
        "classes": _class_rows(task, rates, main, sites),
        "chance": by_chance,
    }


def _figure(found: FinalScore | FinalRate | None, site: str) -> tuple[float, int] | None:
    """Mean and number at a site, or of all sites."""
    if found is None:
        return None
    if site == ALL_SITES:
        return (found.mean, found.count) if found.count else None
    return found.sites.get(site)


def _score_rows(
    task: Task, scores: Sequence[FinalScore], rates: Sequence[FinalRate], main: str, sites: Sequence[str]
) -> list[dict[str, Any]]:
    """All sites together, of the main model, then site by site, of all models; the worst label first.

    The models of a site are scored on the same patients; those of all sites may not be.
    """
    by_name = {(score.model, score.split, score.label): score for score in scores}
    missed = {(rate.model, rate.label): rate for rate in rates if rate.metric == "missed"}
    models = [model for model in MODEL_NAMES if any(score.model == model for score in scores)]
    # One label is all labels.
    labels = [*task.labels] if len(task.labels) > 1 else []
    only = next(iter(task.labels), "") if not labels else ""
    rows = []
    for site in (ALL_SITES, *sites):
        tests = {label: _figure(by_name.get((main, "test", label)), site) for label in labels}
        for label in ("", *sorted(labels, key=lambda each: _worst_first(tests[each], each))):
            for model in models if site != ALL_SITES else (main,):
                test = _figure(by_name.get((model, "test", label)), site)
                # The mean over validation patients of all foreground is that of its label where one is.
                val = _figure(by_name.get((model, "val", label or only)), site)
                lost = _figure(missed.get((model, label or only)), site)
                if test or val:
                    rows.append(
                        {
                            "site": site,
                            "label": label or (only or ALL_LABELS),
                            "model": MODEL_NAMES[model],
                            "test": test,
                            "val": val,
                            "missed": (round(lost[0] * lost[1]), lost[1]) if lost else None,
                            "worst": site == next(iter(sites), "") and model == main and not label,
                        }
                    )
    return rows


def _worst_first(found: tuple[float, int] | None, name: str) -> tuple[Any, ...]:
    """The order of a figure: the lowest first, then those of few cases by name."""
    if found is None or found[1] < FEW_CASES:
        return (True, 0.0, name)
    return (False, found[0], name)


def _by_model(changes: Sequence[FinalChange]) -> list[list[FinalChange]]:
    models = dict.fromkeys((change.model, change.base) for change in changes)
    return [[each for each in changes if (each.model, each.base) == pair] for pair in models]


def _change(
    changes: Sequence[FinalChange], sites: Sequence[str], title: str, all_labels: str
) -> dict[str, Any]:
    """What one model changes against another on the same patients: a table, and a figure of all labels."""
    if len(changes) == 2:
        changes = changes[:1]  # one label is all labels
    rows = []
    for change in changes:
        rows += [
            {"site": site, "label": change.label or all_labels, "found": found, "said": said(found)}
            for site, found in {ALL_SITES: change.together, **in_order(change.by_site, sites)}.items()
            if found
        ]
    rows.sort(key=lambda row: [ALL_SITES, *sites].index(row["site"]))
    whole = next((change for change in changes if not change.label), None)
    drawn = [
        Change(f"{site} (few)" if found.count < FEW_CASES else site, found.change, found.low, found.high)
        for site, found in (in_order(whole.by_site, sites) if whole else {}).items()
    ]
    first = changes[0]
    return {
        "model": MODELS[first.model],
        "base": MODELS[first.base],
        "rows": rows,
        # The SVG is drawn here from numbers, and names that matplotlib escapes.
        "svg": Markup(forest_chart(drawn, title)) if drawn else None,
    }


def said(found: Paired) -> str:
    """What an interval shows, in a word or two; empty without one."""
    return "" if found.low is None else _SHOWN[found.direction]


def in_order(found: Mapping[str, Any], sites: Sequence[str]) -> dict[str, Any]:
    """What sites have, in the order of the sites."""
    return {site: found[site] for site in sites if site in found}


def _distance_rows(
    rounds: Sequence[RoundEntry], scores: Sequence[FinalScore], main: str, sites: Sequence[str]
) -> list[dict[str, Any]]:
    """The surface metrics by site, label and model, with the patients that have no surface to measure."""
    scored = {(score.model, score.label): score for score in scores if score.split == "test"}
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for distance in final_distances(rounds):
        whole = {ALL_SITES: (distance.mean, distance.count)} if distance.model == main else {}
        for site, (mean, count) in {**whole, **distance.sites}.items():
            of = _figure(scored.get((distance.model, distance.label)), site)
            row = rows.setdefault(
                (site, distance.label, distance.model, distance.unit),
                {
                    "site": site,
                    "label": distance.label,
                    "model": MODEL_NAMES[distance.model],
                    "unit": distance.unit,
                    "count": count,
                    "absent": of[1] - count if of else 0,
                },
            )
            row[distance.metric] = mean
    order = [ALL_SITES, *sites]
    names = list(MODEL_NAMES)
    keys = sorted(rows, key=lambda key: (order.index(key[0]), key[1], names.index(key[2]), key[3]))
    return [rows[key] for key in keys]


def _class_rows(
    task: Task, rates: Sequence[FinalRate], main: str, sites: Sequence[str]
) -> list[dict[str, Any]]:
    """Recall and precision by site, class and model: the class with the lowest recall first."""
    by_name = {(rate.model, rate.metric, rate.label): rate for rate in rates}
    rows = []
    for site in (ALL_SITES, *sites) if not task.labels else ():
        found = {name: _figure(by_name.get((main, "recall", name)), site) for name in task.class_names}
        for name in sorted(task.class_names, key=lambda each: _worst_first(found[each], each)):
            for model in MODEL_NAMES if site != ALL_SITES else (main,):
                recall, precision = (
                    _figure(by_name.get((model, metric, name)), site) for metric in ("recall", "precision")
                )
                if recall or precision:
                    rows.append(
                        {
                            "site": site,
                            "class": name,
                            "model": MODEL_NAMES[model],
                            "recall": recall,
                            "precision": precision,
                        }
                    )
    return rows
