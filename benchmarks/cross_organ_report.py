"""The page of `benchmarks.cross_organ`: Dice inside, false alarms, what earns its keep, and outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import scores as tables
from benchmarks.cross_organ_arms import (
    ARMS,
    FEDAVG,
    LOCAL,
    NO_ADAPTER,
    NO_DCA,
    NO_PBL,
    SCRATCH,
    TUNED,
    WHOLE,
    ZERO_SHOT,
)
from benchmarks.harness import Cell, Rows
from benchmarks.scores import Scores
from benchmarks.tables import mean_and_spread, table, write_page

COMPARISONS = (
    *((WHOLE, arm) for arm in ARMS if arm != WHOLE),
    (FEDAVG, LOCAL),
    (TUNED, FEDAVG),
    (TUNED, LOCAL),
)
PARTS = ((NO_DCA, "cross-attention"), (NO_ADAPTER, "adapter"), (NO_PBL, "perturbed loss"))
STARTS = (WHOLE, FEDAVG, SCRATCH)
Value = Callable[..., float | None]


def page(path: Path, cells: Sequence[Cell], command: str) -> None:
    """Write the page beside the rows, from those of `cells`."""
    rows = Rows(path).of(cells)
    sections = ["No cell of the profile's configuration is finished yet."]
    if rows:
        sections = [about(rows, len(cells)), *inside(rows), *plateau(rows), *outside(rows)]
    write_page(path.with_suffix(".md"), "Across organs", command, path, sections)


def about(rows: Sequence[Mapping[str, Any]], cells: int) -> str:
    """What was run, and how to read it."""
    cell = rows[0]["cell"]
    method = ", ".join(f"{name} {value}" for name, value in cell["method"].items())
    train, val = cell["most"]
    return (
        f"Profile `{cell['profile']}`: {cell['size']}x{cell['size']}, at most {train} training and {val} "
        f"validation images per site, {method}. {len(rows)} of {cells} cells (seed and what is trained) are "
        "finished. All arms take as many steps at every site as FedOAP's two stages; local-only, FedAvg, "
        "FedPer, FedRep and FedBN keep their last round, a second stage its best on validation patients.\n\n"
        "Dice of each image with a tumour, on its own grid, the mean over a patient's images; patients are "
        "named by the set, else an image or a block of numbers stands for one. ± is the standard deviation "
        "over seeds, which have other splits; intervals are 95 %, paired bootstrap over patients (their "
        "differences averaged over seeds first), drawn within sites."
    )


def dice_scores(rows: Sequence[Mapping[str, Any]], place: str = "inside", budget: str = "") -> Scores:
    """Mean Dice of every patient with a tumour, by arm; `outside`, after training on so many images."""
    return _scores(rows, place, budget, _dice)


def alarm_scores(rows: Sequence[Mapping[str, Any]]) -> Scores:
    """The share of every patient's images without a tumour in which one is found."""
    return _scores(rows, "inside", "", _alarms)


def _dice(dice: float | None, *_: int) -> float | None:
    return dice


def _alarms(_: float | None, bearing: int, alarms: int, empty: int) -> float | None:  # noqa: ARG001  # as rows
    return alarms / empty if empty else None


def _scores(rows: Sequence[Mapping[str, Any]], place: str, budget: str, value: Value) -> Scores:
    scores: Scores = {}
    for row in rows:
        for arm, sites in row["result"][place].items():
            for site, found in sites.items():
                patients = found.get(budget, {}) if place == "outside" else found
                values = {patient: value(*numbers) for patient, numbers in patients.items()}
                defined = {patient: v for patient, v in values.items() if v is not None}
                if defined:
                    tables.add(scores, arm, row["cell"]["seed"], site, defined)
    return scores


def inside(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every arm at every site, the differences, the parts of FedOAP, and false alarms."""
    scores = dice_scores(rows)
    arms = [arm for arm in ARMS if arm in scores]
    if not arms:
        return []
    sites = tables.sites_of(scores)
    body = [
        [
            arm,
            *(tables.mean_at(scores[arm], [site]) for site in sites),
            tables.mean_of_sites(scores[arm], sites),
        ]
        for arm in arms
    ]
    counts = ", ".join(f"{tables.count_patients(scores, site)} of {site}" for site in sites)
    parts = ["## Inside", f"Patients tested, over all seeds: {counts}."]
    parts.append(table(["arm", *sites, "mean of sites"], body))
    if differences := tables.differences_table(scores, COMPARISONS):
        parts.append(differences)
    parts += [*keep(scores), *alarms(rows)]
    return parts


def keep(scores: Scores) -> list[str]:
    """Each part of FedOAP in a word: what the arm without it lacks, over all patients."""
    sites = tables.sites_of(scores)
    lines = []
    for arm, name in PARTS:
        if (
            WHOLE in scores
            and arm in scores
            and (found := tables.difference(scores[WHOLE], scores[arm], sites))
        ):
            word = (
                "earns its keep"
                if found.low > 0
                else "does harm"
                if found.high < 0
                else "is not shown to help"
            )
            lines.append(f"- The {name} {word}: {found} Dice.")
    return ["Which parts earn their keep, over all patients:", "\n".join(lines)] if lines else []


def alarms(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """False alarms on images without a tumour; the sites that have such images."""
    scores = alarm_scores(rows)
    sites = tables.sites_of(scores)
    if not sites:
        return []
    body = [[arm, *(tables.mean_at(scores[arm], [site]) for site in sites)] for arm in ARMS if arm in scores]
    return [
        "False positives: share of the images without a tumour in which more than specks (a thousandth of "
        "the image) of one is found, the mean over patients. Other sites have no such images.",
        table(["arm", *sites], body),
    ]


def plateau(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far validation Dice still rose at the end of training."""
    body = []
    for arm in ARMS:
        curves = [
            curve for row in rows for curve in row["result"]["curves"].get(arm, {}).values() if len(curve) > 1
        ]
        if curves:
            last = [curve[-1] for curve in curves]
            rises = [curve[-1] - curve[len(curve) // 2] for curve in curves]
            body.append([arm, len(curves), mean_and_spread(last), f"{np.mean(rises):+.3f}"])
    if not body:
        return []
    return [
        "## Was it a plateau?",
        "Dice on validation patients at the end, and its rise since the middle of training, over sites and "
        "seeds. Where it still rises, arms are compared at equal steps, not at their best.",
        table(["arm", "curves", "at the end", "rise since the middle"], body),
    ]


def outside(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sites from outside, by what they begin with and how many images they label."""
    budgets = [ZERO_SHOT, *map(str, rows[0]["cell"]["budgets"])]
    by_budget = {budget: dice_scores(rows, "outside", budget) for budget in budgets}
    sites = sorted({site for scores in by_budget.values() for site in tables.sites_of(scores)})
    if not sites:
        return []
    parts = [
        "## From outside",
        "Dice on test images of hospitals that no federation had: as they come, and after at least "
        f"{rows[0]['cell']['joining_steps']} steps on a few labelled images, a fifth of them to choose the "
        f"epoch by. {WHOLE} is trained with the perturbed loss, the others with the plain one; {FEDAVG} "
        f"is that of `{TUNED}`, of as many rounds. Test images are those that no budget uses.",
    ]
    names = {budget: "zero-shot" if budget == ZERO_SHOT else f"{budget} images" for budget in budgets}
    for site in sites:
        body = [
            [start, *(_at(by_budget[budget], start, site) for budget in budgets)]
            for start in STARTS
            if any(start in scores for scores in by_budget.values())
        ]
        parts += [f"### {site}", table(["begins with", *names.values()], body)]
        pairs = []
        for first, second in ((WHOLE, FEDAVG), (WHOLE, SCRATCH), (FEDAVG, SCRATCH)):
            found = [_difference(by_budget[budget], first, second, site) for budget in budgets]
            if any(each != "–" for each in found):
                pairs.append([f"{first} − {second}", *found])
        if pairs:
            parts.append(table(["difference", *names.values()], pairs))
    return parts


def _at(scores: Scores, arm: str, site: str) -> str:
    return tables.mean_at(scores[arm], [site]) if arm in scores else "–"


def _difference(scores: Scores, first: str, second: str, site: str) -> str:
    if first not in scores or second not in scores:
        return "–"
    return str(tables.difference(scores[first], scores[second], [site]) or "–")
