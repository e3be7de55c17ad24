"""The page of `benchmarks.inside`: Dice per site and arm, paired differences, and every try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.harness import Rows, key
from benchmarks.tables import mean_and_spread, paired_bootstrap, table, write_page

ARMS = ("local-only", "global", "personal", "fine-tuned")
COMPARISONS = (
    ("personal", "global"),
    ("personal", "local-only"),
    ("personal", "fine-tuned"),
    ("fine-tuned", "global"),
    ("global", "local-only"),
)
Patient: TypeAlias = tuple[str, str]  # site and name
# arm -> seed -> patient -> Dice
Scores: TypeAlias = dict[str, dict[int, dict[Patient, float]]]


def scores_of(rows: Sequence[Mapping[str, Any]]) -> Scores:
    """Every patient's Dice by arm and seed, over all folds. An undefined Dice is NaN."""
    scores: Scores = {}
    for row in rows:
        for arm, sites in row["result"]["dice"].items():
            of_seed = scores.setdefault(arm, {}).setdefault(row["cell"]["seed"], {})
            for site, patients in sites.items():
                of_seed |= {(site, p): math.nan if d is None else d for p, d in patients.items()}
    return scores


def page(path: Path, baseline: Mapping[str, Any], command: str) -> None:
    """Write the page beside the rows: the baseline setting's table, then one per other setting (a try)."""
    by_setting: dict[str, list[dict[str, Any]]] = {}
    for row in Rows(path).read():
        by_setting.setdefault(key(_setting_of(row["cell"])), []).append(row)
    main = by_setting.pop(key(baseline), [])
    sections = ["No cell of the profile's own configuration is finished yet."]
    if main:
        sections = [_setting(main), *_tables(scores_of(main))]
    for rows in by_setting.values():
        changes = _changes(baseline, _setting_of(rows[0]["cell"]))
        sections += [f"## Try: {changes}", *_tables(scores_of(rows))]
    write_page(path.with_suffix(".md"), "Inside personalization", command, path, sections)


def _setting(rows: Sequence[Mapping[str, Any]]) -> str:
    cell = rows[0]["cell"]
    method = ", ".join(f"{name} {value}" for name, value in cell["method"].items())
    done: dict[str, int] = {}
    for row in rows:
        done[row["cell"]["trained"]] = done.get(row["cell"]["trained"], 0) + 1
    finished = ", ".join(f"{count} of {name}" for name, count in done.items())
    return (
        f"Profile `{cell['profile']}`: {cell['size']}x{cell['size']}, {cell['folds']} folds by patient, "
        f"{method}. Fine-tuning: {cell['tuning_rounds']} more epochs from the global model. "
        f"Finished cells (seed and fold): {finished}.\n\n"
        "Foreground Dice per patient on the scan's own grid, all slices of a patient at once; a patient with "
        "neither prediction nor truth is left out and counted. Rounds are chosen on validation patients. "
        "± is the standard deviation over seeds; intervals are 95 %, paired bootstrap over patients (their "
        "differences averaged over seeds first), drawn within sites."
    )


def _setting_of(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in cell.items() if name not in ("trained", "seed", "fold")}


def _changes(baseline: Mapping[str, Any], setting: Mapping[str, Any]) -> str:
    usual = {**baseline, **baseline["method"]}
    found = {**setting, **setting["method"]}
    return ", ".join(f"{n} = {v}" for n, v in found.items() if n != "method" and usual.get(n) != v)


def _tables(scores: Scores) -> list[str]:
    arms = [arm for arm in ARMS if arm in scores]
    sites = sorted({site for arm in arms for seed in scores[arm].values() for site, _ in seed})
    body = [
        [site, _patients(scores, arms, site), *(_cell(scores[arm], {site}) for arm in arms)] for site in sites
    ]
    body.append(["mean of sites", "", *(_mean_of_sites(scores[arm], sites) for arm in arms)])
    body.append(["all patients", _patients(scores, arms), *(_cell(scores[arm], set(sites)) for arm in arms)])
    undefined = sum(math.isnan(v) for arm in arms for seed in scores[arm].values() for v in seed.values())
    parts = [table(["site", "patients", *arms], body)]
    if undefined:
        parts.append(f"Left out as undefined: {undefined} values over all arms and seeds.")
    differences = [
        [f"{first} − {second}", *_differences(scores[first], scores[second], sites)]
        for first, second in COMPARISONS
        if first in scores and second in scores
    ]
    if differences:
        parts.append(table(["difference", *sites, "all patients"], differences))
    return parts


def _patients(scores: Scores, arms: Sequence[str], site: str | None = None) -> int:
    units = {u for arm in arms for seed in scores[arm].values() for u in seed}
    return sum(site is None or unit[0] == site for unit in units)


def _cell(by_seed: Mapping[int, Mapping[Patient, float]], sites: set[str]) -> str:
    """Mean over patients, then mean and spread over seeds."""
    return mean_and_spread([_mean(scores, sites) for scores in by_seed.values()])


def _mean_of_sites(by_seed: Mapping[int, Mapping[Patient, float]], sites: Sequence[str]) -> str:
    means = ([_mean(scores, {site}) for site in sites] for scores in by_seed.values())
    return mean_and_spread([_average(values) for values in means])


def _mean(scores: Mapping[Patient, float], sites: set[str]) -> float:
    return _average([v for (site, _), v in scores.items() if site in sites])


def _average(values: Sequence[float]) -> float:
    """Mean of the defined values; NaN of none."""
    defined = [value for value in values if math.isfinite(value)]
    return float(np.mean(defined)) if defined else math.nan


def _differences(
    first: Mapping[int, Mapping[Patient, float]],
    second: Mapping[int, Mapping[Patient, float]],
    sites: Sequence[str],
) -> list[str]:
    seeds = sorted(first.keys() & second.keys())
    left, right = _over_seeds(first, second, seeds)
    cells = []
    for chosen in (*([site] for site in sites), list(sites)):
        one = {unit: v for unit, v in left.items() if unit[0] in chosen}
        strata = {unit: unit[0] for unit in one}
        cells.append(str(paired_bootstrap(one, right, strata)) if one else "–")
    return cells


def _over_seeds(
    first: Mapping[int, Mapping[Patient, float]],
    second: Mapping[int, Mapping[Patient, float]],
    seeds: Sequence[int],
) -> tuple[dict[Patient, float], dict[Patient, float]]:
    """Each patient's mean over the seeds in which both arms have a defined Dice."""
    pairs: dict[Patient, list[tuple[float, float]]] = {}
    for seed in seeds:
        for unit, value in first[seed].items():
            other = second[seed].get(unit, math.nan)
            if math.isfinite(value) and math.isfinite(other):
                pairs.setdefault(unit, []).append((value, other))
    return (
        {unit: float(np.mean([a for a, _ in values])) for unit, values in pairs.items()},
        {unit: float(np.mean([b for _, b in values])) for unit, values in pairs.items()},
    )
