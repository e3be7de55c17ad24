"""The page of `inside`: Dice per site and arm, paired differences, and every try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import scores as tables
from benchmarks.harness.cells import Row, key
from benchmarks.harness.scores import Scores
from benchmarks.harness.tables import table

ARMS = ("local-only", "global", "personal", "fine-tuned")
COMPARISONS = (
    ("personal", "global"),
    ("personal", "local-only"),
    ("personal", "fine-tuned"),
    ("fine-tuned", "global"),
    ("global", "local-only"),
)


def scores_of(rows: Sequence[Row]) -> Scores:
    """Every patient's Dice by arm and seed, over all folds."""
    scores: Scores = {}
    for row in rows:
        for arm, sites in row["result"]["dice"].items():
            for site, patients in sites.items():
                tables.add(scores, arm, row["cell"]["seed"], site, patients)
    return scores


def sections(rows: Sequence[Row], baseline: Mapping[str, Any]) -> list[str]:
    """The page: the baseline setting's tables, then those of every other setting, called a try."""
    by_setting: dict[str, list[Row]] = {}
    for row in rows:
        by_setting.setdefault(key(_setting_of(row["cell"])), []).append(row)
    main = by_setting.pop(key(baseline), [])
    parts = ["No cell of the profile's own configuration is finished yet."]
    if main:
        parts = [_setting(main), *_tables(scores_of(main))]
    for tried in by_setting.values():
        changes = _changes(baseline, _setting_of(tried[0]["cell"]))
        parts += [f"## Try: {changes}", *_tables(scores_of(tried))]
    return parts


def _setting(rows: Sequence[Row]) -> str:
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
    sites = tables.sites_of(scores)
    body = [
        [site, tables.count_patients(scores, site), *(tables.mean_at(scores[arm], [site]) for arm in arms)]
        for site in sites
    ]
    body.append(["mean of sites", "", *(tables.mean_of_sites(scores[arm], sites) for arm in arms)])
    everyone = tables.count_patients(scores)
    body.append(["all patients", everyone, *(tables.mean_at(scores[arm], sites) for arm in arms)])
    parts = [table(["site", "patients", *arms], body)]
    if undefined := tables.count_undefined(scores):
        parts.append(f"Left out as undefined: {undefined} values over all arms and seeds.")
    differences = tables.differences_table(scores, COMPARISONS)
    return [*parts, differences] if differences else parts
