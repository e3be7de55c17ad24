"""The page of `inside`: Dice per site and arm, paired differences, and every try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import scores as tables
from benchmarks.harness.cells import Rows, key
from benchmarks.harness.scores import Scores
from benchmarks.harness.tables import table, write_page

ARMS = ("local-only", "global", "personal", "fine-tuned")
COMPARISONS = (
    ("personal", "global"),
    ("personal", "local-only"),
    ("personal", "fine-tuned"),
    ("fine-tuned", "global"),
    ("global", "local-only"),
)


def scores_of(rows: Sequence[Mapping[str, Any]]) -> Scores:
    """Every patient's Dice by arm and seed, over all folds."""
    scores: Scores = {}
    for row in rows:
        for arm, sites in row["result"]["dice"].items():
            for site, patients in sites.items():
                tables.add(scores, arm, row["cell"]["seed"], site, patients)
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
