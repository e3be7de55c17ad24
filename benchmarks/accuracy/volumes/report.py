"""The page of `volumes`: the arms, the goal, hospitals outside, the loss of slices, and every patient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.harness.cells import Row
from benchmarks.harness.scores import BySeed, difference_of_sites
from benchmarks.harness.tables import mean_and_spread, table

# The set of the question; others are for the loss of slices alone.
SET = "hippocampus_nifti"
# The goal: means over patients and classes, of every seed.
GOAL_DICE, GOAL_HD95, GOAL_SECONDS = 0.885, 1.6, 1200
_BASELINE, _PLANNED = "2-D", "planned"
# Arms that differ by the loss alone: Dice, and cross-entropy beside it.
_LOSSES = ((_BASELINE, "2-D, dice_ce"), ("vessels", "vessels, dice_ce"))
_SEEDS = 3
# patient -> metric -> a value per class, None where it is undefined
Patients = Mapping[str, Mapping[str, Sequence[float | None]]]


def sections(rows: Sequence[Row]) -> list[str]:
    """All sections, from at least one row."""
    members = inside(rows)
    found = [*_outside(rows), *_loss(rows)]
    if members:
        seeds = sorted({row["cell"]["seed"] for row in members})
        patients = {name for row in members for own in row["result"]["models"].values() for name in own}
        about = (
            f"{len(patients)} held-out patients of three sites, on their scans' own grid. Figures are means "
            f"over patients of each class, then over seeds (± their standard deviation); seeds: "
            f"{', '.join(map(str, seeds))}. No recipe, round or model was chosen by these patients. *CPU* is "
            "of planning, training and validation, and of personal models where there are any, of one "
            "thread, or a dash where it was not measured. A distance is undefined where answer or mask "
            "lacks the class: such cases are counted under *none*, and are in no mean."
        )
        head = [about, "## Arms", _arms(members), *_plans(members), *_goal(members)]
        patients_won = _patients(members)
        found = [*head, *found, *(["## Patients", patients_won] if patients_won else [])]
    return [section for section in found if section]


def inside(rows: Sequence[Row]) -> list[Row]:
    """The rows that answer the question: of one set, with every site a member."""
    others = {other for pair in _LOSSES[1:] for other in pair}
    return [row for row in rows if row["cell"]["arm"] not in others and "outside" not in row["cell"]]


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


def _plans(rows: Sequence[Row]) -> list[str]:
    """What the federation planned; the same in every seed, since patients and sites are."""
    plans = {str(row["result"]["plan"]): row["result"]["plan"] for row in rows if "plan" in row["result"]}
    return [
        f"*{_PLANNED}*: {_times(plan['spacing'])} mm, patches of {_times(plan['patch'])} voxels, "
        f"{plan['options']['batch_size']} per step; channels "
        f"{', '.join(map(str, plan['options']['network_arguments']['filters']))}."
        for plan in plans.values()
    ]


def _times(values: Sequence[float]) -> str:
    return " x ".join(f"{value:g}" for value in values)


def _goal(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        cell, own = row["cell"], row["result"]["models"].get("global")
        if not own or not {"patch", "budget"} & cell.keys():
            continue
        score, distance, seconds = level(own, "dice"), level(own, "hd95"), row["result"]["cpu_seconds"]
        met = score >= GOAL_DICE and distance < GOAL_HD95 and seconds is not None and seconds <= GOAL_SECONDS
        figures = [f"{score:.4f}", f"{distance:.2f}", seconds_of([row])]
        lines.append([cell["arm"], cell["seed"], *figures, "yes" if met else "no"])
    if not lines:
        return []
    head = ["arm", "seed", "Dice", "HD95, mm", "CPU s", "met"]
    about = (
        f"At least {GOAL_DICE} mean foreground Dice with HD95 below {GOAL_HD95} mm within "
        f"{GOAL_SECONDS // 60} CPU minutes, each seed:"
    )
    return ["## The goal", about, table(head, lines)]


def _outside(rows: Sequence[Row]) -> list[str]:
    """Sites that took no part, by arm and by what answered."""
    rows = [row for row in rows if "outside" in row["cell"]]
    if not rows:
        return []
    body = []
    for (arm, model), own in _by_arm(rows).items():
        every, held = _merged(own, model), _merged(own, model, held_out=True)
        plain = _merged(own, "global, scanner" if model.endswith(", scanner") else "global")
        change = difference_of_sites(_dice_of(every), _dice_of(plain), [_ALL])
        body.append(
            [
                arm,
                model,
                len(every),
                sum(map(len, held.values())),
                _spread([level(each, "dice") for each in held.values()]),
                _spread([level(each, "hd95") for each in held.values()], "hd95"),
                sum(map(len, every.values())),
                _spread([level(each, "dice") for each in every.values()]),
                _spread([level(each, "hd95") for each in every.values()], "hd95"),
                "" if change is None or model.startswith("global") else str(change.interval),
                seconds_of(own),
            ]
        )
    head = ["arm", "answers", "seeds", "held out", "Dice", "HD95, mm", "all", "Dice, all", "HD95, all"]
    about = (
        "Each site is left out in turn, and the others' model answers its scans without any training there. "
        "*held out* are the patients of the tables above, *all* every patient of the sites that were left "
        f"out so far ({', '.join(sorted({row['cell']['outside'] for row in rows}))}), both counted over "
        "seeds. *scanner*: the scans come through a drawn scanner of severity 3. *auto* is what "
        "a job serves: `blend`, or the global model where the gate refuses it. *change*: from the "
        "global model's Dice on the same scans, all patients (95 %, paired bootstrap)."
    )
    return ["## A hospital outside", about, table([*head, "change", "CPU s"], body)]


def elsewhere(rows: Sequence[Row]) -> list[list[Any]]:
    """Rows that are not `inside`: arm, answer, seeds, and levels of Dice and HD95 on all patients."""
    kept = {id(row) for row in inside(rows)}
    found = []
    for (arm, model), own in _by_arm([row for row in rows if id(row) not in kept]).items():
        merged = _merged(own, model).values()
        levels = [_spread([level(each, metric) for each in merged], metric) for metric in ("dice", "hd95")]
        found.append([arm, model, len(merged), *levels])
    return found


def _merged(rows: Sequence[Row], model: str, *, held_out: bool = False) -> dict[int, Patients]:
    """The patients of all sites of each seed, in one."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        kept = row["result"].get("held_out", ())
        own = row["result"]["models"][model]
        chosen = {name: own[name] for name in own if not held_out or name in kept}
        if chosen:
            found.setdefault(row["cell"]["seed"], {}).update(chosen)
    return dict(found)


# Sites of one set drawn at random: patients are compared as those of one.
_ALL = "all"


def _dice_of(by_seed: Mapping[int, Patients]) -> BySeed:
    """Mean Dice over classes of every patient; NaN of none."""
    return {
        seed: {(_ALL, name): level({name: own}, "dice") for name, own in patients.items()}
        for seed, patients in by_seed.items()
    }


def _loss(rows: Sequence[Row]) -> list[str]:
    """Cross-entropy beside Dice on slices, against Dice alone, and the criterion."""
    body, means = [], []
    for pair in _LOSSES:
        found = [_merged([row for row in rows if row["cell"]["arm"] == arm], "global") for arm in pair]
        shared = sorted(found[0].keys() & found[1].keys())
        plain, beside = map(_dice_of, found)
        change = difference_of_sites(beside, plain, [_ALL])
        if change is None:
            continue
        means.append(change.interval.mean if len(shared) >= _SEEDS else math.nan)
        levels = [
            _spread([level(each[seed], metric) for seed in shared], metric)
            for metric in ("dice", "hd95")
            for each in found
        ]
        each = ", ".join(f"{value:+.3f}" for value in change.each)
        name = next(row["cell"]["set"] for row in rows if row["cell"]["arm"] == pair[0])
        body.append([name, len(shared), *levels, str(change), each, change.verdict])
    if not body:
        return []
    if len(means) < len(_LOSSES) or any(map(math.isnan, means)):
        verdict = f"Not decided: expected {_SEEDS} seeds of both losses on {len(_LOSSES)} sets."
    elif all(mean > 0 for mean in means):
        verdict = "Met: the mean is higher on both sets."
    else:
        verdict = "Not met: the mean is not higher on both sets."
    head = ["set", "seeds", "Dice", "with cross-entropy", "HD95", "with cross-entropy", "change of Dice"]
    about = (
        "Slices by their defaults, with Dice alone and with cross-entropy beside it, paired by patient and "
        "seed (95 % bootstrap over patients, if there are enough). HD95 is in mm, in pixels of photographs. "
        f"Cross-entropy is to become the default if the mean is higher on both sets. {verdict}"
    )
    return ["## The loss of slices", about, table([*head, "each seed", ""], body)]


def _patients(rows: Sequence[Row]) -> str:
    """On how many patients each arm is better than the baseline, seeds averaged."""
    arms = _by_arm(rows)
    means = {
        name: {
            patient: fmean(level({patient: row["result"]["models"][name[1]][patient]}, "dice") for row in own)
            for patient in own[0]["result"]["models"][name[1]]
        }
        for name, own in arms.items()
    }
    base = means.get((_BASELINE, "global"))
    if base is None:
        return ""
    titles = [arm if model == "global" else f"{arm}, {model}" for arm, model in means]
    body = [
        [title, f"{sum(own[each] > base[each] for each in base)} of {len(base)}"]
        for title, own in zip(titles, means.values(), strict=True)
        if own is not base
    ]
    return table(["arm", f"patients better than {_BASELINE}"], body)
