"""The page of `volumes`: the arms side by side, the goal, and every held-out patient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.harness.cells import Row
from benchmarks.harness.tables import mean_and_spread, table

# The set of the question; others are for the loss of slices alone.
SET = "hippocampus_nifti"
# The goal: means over patients and classes, of every seed.
GOAL_DICE, GOAL_HD95, GOAL_SECONDS = 0.885, 1.6, 1200
_BASELINE = "2-D"
# patient -> metric -> a value per class, None where it is undefined
Patients = Mapping[str, Mapping[str, Sequence[float | None]]]


def sections(rows: Sequence[Row]) -> list[str]:
    """All sections, from at least one row."""
    seeds = sorted({row["cell"]["seed"] for row in rows})
    patients = {name for row in rows for name in row["result"]["models"]["global"]}
    about = (
        f"{len(patients)} held-out patients of three sites, on their scans' own grid. Figures are means over "
        f"patients of each class, then over seeds (± their standard deviation); seeds: "
        f"{', '.join(map(str, seeds))}. No recipe, round or model was chosen by these patients. *CPU* is of "
        "training and validation, of one thread, or a dash where it was not measured. A distance is "
        "undefined where answer or mask lacks the "
        "class: such cases are counted under *none*, and are in no mean."
    )
    found = [about, "## Arms", _arms(rows), *_goal(rows), "## Patients", _patients(rows)]
    return [section for section in found if section]


def level(patients: Patients, metric: str) -> float:
    """The mean over patients of the mean over classes in which the metric is defined; NaN of none."""
    means = [fmean(values) for own in patients.values() if (values := _defined(own[metric]))]
    return fmean(means) if means else math.nan


def seconds_of(rows: Sequence[Row]) -> str:
    """The mean of the CPU seconds of the rows that measured them; a dash of none."""
    found = _defined(row["result"]["cpu_seconds"] for row in rows)
    return f"{fmean(found):.0f}" if found else "–"


def _defined(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _by_arm(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each arm and model, in order."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        for model in row["result"]["models"]:
            found.setdefault((row["cell"]["arm"], model), []).append(row)
    return found


def _arms(rows: Sequence[Row]) -> str:
    labels = rows[0]["result"]["labels"]
    head = ["arm", "model", "seeds", "Dice", *(f"Dice, {label}" for label in labels)]
    head += [f"HD95 mm, {label}" for label in labels]
    head += ["average distance, mm", "surface Dice", "none", "parameters", "CPU s"]
    body = []
    for (arm, model), own in _by_arm(rows).items():
        scores = [row["result"]["models"][model] for row in own]
        line: list[Any] = [arm, model, len(own), _spread([level(each, "dice") for each in scores])]
        for metric in ("dice", "hd95"):
            for index in range(len(labels)):
                values = [_defined(case[metric][index] for case in each.values()) for each in scores]
                line.append(_spread([fmean(found) for found in values if found], metric))
        line += [_spread([level(each, metric) for each in scores], metric) for metric in ("assd", "nsd")]
        lacking = sum(value is None for each in scores for case in each.values() for value in case["hd95"])
        result = own[0]["result"]
        body.append([*line, lacking, f"{result['parameters']:,}", seconds_of(own)])
    return table(head, body)


def _spread(values: Sequence[float], metric: str = "dice") -> str:
    return mean_and_spread(values, 3 if metric in ("dice", "nsd") else 2)


def _goal(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        cell, own = row["cell"], row["result"]["models"]["global"]
        if "patch" not in cell:
            continue
        score, distance, seconds = level(own, "dice"), level(own, "hd95"), row["result"]["cpu_seconds"]
        met = score >= GOAL_DICE and distance < GOAL_HD95 and seconds is not None and seconds <= GOAL_SECONDS
        figures = [f"{score:.3f}", f"{distance:.2f}", seconds_of([row])]
        lines.append([cell["arm"], cell["seed"], *figures, "yes" if met else "no"])
    if not lines:
        return []
    head = ["arm", "seed", "Dice", "HD95, mm", "CPU s", "met"]
    about = (
        f"At least {GOAL_DICE} mean foreground Dice with HD95 below {GOAL_HD95} mm within "
        f"{GOAL_SECONDS // 60} CPU minutes, each seed:"
    )
    return ["## The goal", about, table(head, lines)]


def _patients(rows: Sequence[Row]) -> str:
    """Dice of every patient by arm, seeds averaged, and on how many an arm is better than the baseline."""
    arms = _by_arm(rows)
    means = {
        name: {
            patient: fmean(fmean(_defined(row["result"]["models"][name[1]][patient]["dice"])) for row in own)
            for patient in own[0]["result"]["models"][name[1]]
        }
        for name, own in arms.items()
    }
    base = means.get((_BASELINE, "global"))
    patients = sorted({patient for own in means.values() for patient in own})
    titles = [arm if model == "global" else f"{arm}, {model}" for arm, model in means]
    body: list[list[Any]] = [
        [patient, *(f"{own[patient]:.3f}" if patient in own else "" for own in means.values())]
        for patient in patients
    ]
    if base:
        better = [
            "" if own is base else f"{sum(own[each] > base[each] for each in base)} of {len(base)}"
            for own in means.values()
        ]
        body.append([f"better than {_BASELINE}", *better])
    return table(["patient", *titles], body)
