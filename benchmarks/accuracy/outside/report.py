"""The page of `outside`: Dice of every arm at every site left out, differences, gate, tries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.accuracy.outside.gate_report import gate_sections
from benchmarks.accuracy.outside.scores import BAKED, GLOBAL, at, complete, scores_of
from benchmarks.accuracy.outside.tries import tries_sections
from benchmarks.harness import scores as tables
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.scores import Scores
from benchmarks.harness.tables import table

FIRST = (
    *(GLOBAL, "global (test)", BAKED),
    *("average (running)", "average (test)", "average (baked)", "uniform (test)", "uniform (baked)"),
)
LAST = ("ensemble (running)", "ensemble (test)", "ensemble (baked)", "tent", "tent (baked)")
REFERENCES = (GLOBAL, BAKED, "ensemble (test)", "ensemble (baked)", "tent (baked)")
MODES = {
    "transductive": "learned on all patients of the site, who are reported",
    "inductive": "learned on one half of the patients, the other half reported, in turn",
}


def sections(rows: Sequence[Row], usual_of: Callable[[Cell], Mapping[str, Any]]) -> list[str]:
    """The page: a part per setting, its tries last.

    `usual_of` gives the adaptation of a cell's arms in the profile; a row that differs from it is a try.
    """
    usual: dict[str, list[Row]] = {}
    tries: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        cell = row["cell"]
        changes = ", ".join(changed_settings(usual_of(cell), cell))
        if changes:
            tries.setdefault(_base(cell), {}).setdefault(changes, []).append(row)
        else:
            usual.setdefault(_base(cell), []).append(row)
    parts: list[str] = []
    for base, finished in sorted(usual.items()):
        parts += [f"## {finished[0]['cell']['set']}", _about(finished), *_tables(finished)]
        for mode, meaning in MODES.items() if base in tries else ():
            parts += [
                f"### Tries, {mode}: {meaning}",
                "Routing otherwise than above, merged. Differences on the same sites and seeds.",
                *tries_sections(tries[base], finished, mode),
            ]
    return parts or ["No cell is finished yet."]


def _tables(rows: Sequence[Row]) -> list[str]:
    sections = []
    for mode, meaning in MODES.items():
        scores = scores_of(rows, mode)
        if scores:
            sections += [f"### {mode.capitalize()}: {meaning}", _by_arm(scores)]
            if differences := tables.differences_table(scores, list(_comparisons(scores))):
                sections.append(differences)
            if undefined := tables.count_undefined(scores):
                sections.append(f"Left out as undefined: {undefined} values over all arms and seeds.")
    return sections + gate_sections([line for row in rows for line in _gate_of(row)])


def _by_arm(scores: Scores) -> str:
    """A row per arm. The mean of sites is over seeds with every site, so that means are comparable."""
    sites = tables.sites_of(scores)
    body = [
        [
            arm,
            *(tables.mean_at(at(scores[arm], site), [site]) for site in sites),
            tables.mean_of_sites(complete(scores[arm], sites), sites),
            len(complete(scores[arm], sites)),
        ]
        for arm in _ordered(scores)
    ]
    header = ["Dice", *(f"{site} ({tables.count_patients(scores, site)})" for site in sites)]
    return table([*header, "mean of sites", "seeds"], body)


def _ordered(scores: Scores) -> list[str]:
    middle = sorted(arm for arm in scores if arm not in (*FIRST, *LAST))
    return [arm for arm in (*FIRST, *middle, *LAST) if arm in scores]


def _comparisons(scores: Scores) -> Iterator[tuple[str, str]]:
    """Merged routing against the simpler arms, and these against each other."""
    for arm in _ordered(scores):
        if arm.startswith("routing ") and arm.endswith("(merged)"):
            yield from ((arm, reference) for reference in REFERENCES)
    yield "global (test)", GLOBAL
    yield BAKED, GLOBAL
    yield "ensemble (test)", GLOBAL
    yield "ensemble (baked)", GLOBAL
    yield "tent", GLOBAL
    yield "tent (baked)", GLOBAL


def _gate_of(row: Row) -> Iterator[dict[str, Any]]:
    where = {name: row["cell"][name] for name in ("site", "seed")}
    planted = row["cell"]["arms"] == "planted"
    for line in row["result"].get("gate", []):
        yield {**line, **where, "planted": planted and line["candidate"] != "few scans"}


def _about(rows: Sequence[Row]) -> str:
    cell = rows[0]["cell"]
    method = ", ".join(f"{name} {value}" for name, value in cell["method"].items())
    done = Counter(row["cell"]["arms"] for row in rows)
    finished = ", ".join(f"{count} of {arms}" for arms, count in sorted(done.items()))
    return (
        f"Profile `{cell['profile']}`: federations of all sites but one ({method}); at the site left out "
        f"{cell['adaptation']['epochs']} epochs, on about {cell['images']} slices at most, taken evenly from "
        f"those of all who are learned from. Finished cells (site and seed): {finished}.\n\n"
        "Foreground Dice per patient on the scan's own grid; no label is used but for this table. Batch "
        "norm: *running* statistics of training, *test* those of batches of the hospital's scans, *baked* "
        "those of all scans that were learned from. *Merged* is one plain network, which is what is served. "
        "± is the standard deviation over seeds; intervals are 95 %, paired bootstrap over patients (their "
        "differences averaged over seeds first), drawn within sites."
    )


def _base(cell: Cell) -> str:
    return json.dumps([cell[name] for name in ("set", "profile", "size", "images", "method")])


def changed_settings(usual: Mapping[str, Any], cell: Cell) -> list[str]:
    """The settings of the adaptation that differ from the profile's; the loss only when nothing else does."""
    found = cell["adaptation"]
    changed = [f"{name} = {value}" for name, value in found.items() if usual.get(name) != value]
    return [change for change in changed if not change.startswith("loss") or len(changed) == 1]
