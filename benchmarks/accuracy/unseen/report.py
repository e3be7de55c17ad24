"""The page of `unseen`: the criteria of the protocol first, then what they rest on.

The unit is a hospital of a set behind a scanner of one severity; its seeds are averaged first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np

from benchmarks.harness.cells import Row
from benchmarks.harness.figures import strip_chart
from benchmarks.harness.tables import table

PHANTOM = "phantom"
POINT = 0.01
# The first seed that is judged by today's gate: the protocol's second amendment.
GATE_CHANGED = 2
# set, severity, hospital
Unit: TypeAlias = tuple[str, int, str]
# unit -> one value per seed
Values: TypeAlias = dict[Unit, list[float]]


def sections(rows: Sequence[Row], figure: str) -> list[str]:
    """All sections for which there are rows; `figure` is the file of the figure."""
    by_part: dict[str, list[Row]] = {}
    for row in rows:
        by_part.setdefault(row["cell"]["part"], []).append(row)
    served, inside = by_part.get("served", []), by_part.get("inside", [])
    paper, reference = by_part.get("paper", []), by_part.get("reference", [])
    found = [_about(rows)]
    groups = _by_gate(served)
    criteria = {
        words: {asked: rest for asked, *rest in _criteria(own, _of_seeds(inside, own), paper)}
        for words, own in (groups or {"": []}).items()
    }
    # By their numbers: the groups need not have the same ones.
    asked = sorted(dict.fromkeys(name for own in criteria.values() for name in own), key=lambda name: name[0])
    if asked:
        head = ["criterion", *(cell for words in criteria for cell in (f"found{words}", "met"))]
        body = [[name, *(c for own in criteria.values() for c in own.get(name, ("", "")))] for name in asked]
        found += ["## Criteria", table(head, body)]
    for words, own in [*groups.items()][:1]:
        found += ["What `auto` served, each hospital and seed:", f"![what is served]({figure})"]
        found += [f"## Outside{words}: what is served, minus the global model", _outside(own)]
        found += [f"## Verdicts{words}", *_gate(own)]
    if served and paper:
        found += ["## Locum's training minus the paper's: the global model as it is"]
        found += [_by_set({"": _training_gains(served, paper)})]
    if inside:
        found += ["## Inside, minus global on the members' test patients", _inside(inside)]
    if reference:
        found += ["## Head-room: a model trained at the hospital, minus that of the others"]
        found += [_by_hospital({"head-room": _head_room(reference)})]
    if "learned" in by_part:
        found += ["## Recipes that are not practised, always served", _by_set(_learned(by_part["learned"]))]
    if "official" in by_part:
        found += ["## The official protocol, a diagnostic", _official(by_part["official"])]
    return found


def _about(rows: Sequence[Row]) -> str:
    seeds = sorted({row["cell"]["seed"] for row in rows})
    return (
        "What was fixed before these were run is in [the protocol](protocol-outside.md). Figures are points "
        "of Dice (hundredths), means over hospitals of the means over seeds, except where it says otherwise. "
        "In brackets is the worst hospital. "
        f"Seeds: {', '.join(map(str, seeds))}. {len(rows)} cells are finished."
    )


def _by_gate(served: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that today's gate judged, then those that the gate before did, by words for a title."""
    today = [row for row in served if row["cell"]["seed"] >= GATE_CHANGED]
    before = [row for row in served if row["cell"]["seed"] < GATE_CHANGED]
    if not (today and before):
        return {"": [*served]} if served else {}
    return {_by("today's gate", today): today, _by("the gate before", before): before}


def _of_seeds(rows: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """Those of the seeds of `others`; all if there are none."""
    seeds = {row["cell"]["seed"] for row in others or rows}
    return [row for row in rows if row["cell"]["seed"] in seeds]


def _by(gate: str, rows: Sequence[Row]) -> str:
    seeds = sorted({row["cell"]["seed"] for row in rows})
    return f" by {gate}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


# ---------------------------------------------------------------------- values


def _values(rows: Iterable[Row], value: Callable[[Mapping[str, Any]], float | None]) -> Values:
    """A value of each `served` row's severities."""
    found: Values = {}
    for row in rows:
        cell = row["cell"]
        for severity, at in row["result"]["at"].items():
            each = value(at)
            if each is not None:
                found.setdefault((cell["set"], int(severity), cell["site"]), []).append(each)
    return found


def _change(arm: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda at: at["arms"][arm][0] if arm in at["arms"] else None


def _of(values: Values, set_: str | None = None, severity: int | None = None) -> dict[Unit, float]:
    """Means over seeds of some units; without a set, of the real ones."""
    return {
        unit: fmean(found)
        for unit, found in values.items()
        if (unit[0] == set_ if set_ else unit[0] != PHANTOM) and severity in (None, unit[1])
    }


def _sets(values: Values) -> list[str]:
    return list(dict.fromkeys(unit[0] for unit in values))


def _severities(values: Values, set_: str) -> list[int]:
    return sorted({unit[1] for unit in values if unit[0] == set_})


# ---------------------------------------------------------------------- criteria


def _criteria(
    served: Sequence[Row], inside: Sequence[Row], paper: Sequence[Row]
) -> Iterable[tuple[str, str, str]]:
    personal = _inside_changes(inside, "personal").items()
    changes = [fmean(found) for (set_, _), found in personal if set_ != PHANTOM]
    if changes:
        yield _criterion(
            "1. inside, personal minus global: mean > 0, no member below -0.5",
            f"mean {_points(fmean(changes))}, worst {_points(min(changes))}",
            met=fmean(changes) > 0 and min(changes) >= -0.005,
        )
    if not served:
        return
    auto = _values(served, _change("auto"))
    for set_, severity, least in _asked(auto):
        found = [*_of(auto, set_, severity).values()]
        where = f"{set_ or 'real sets'} at severity {severity}"
        asked = "> +1" if least else ">= 0"
        mean = fmean(found)
        met = mean > least if least else mean >= 0
        yield _criterion(f"2. {where}: mean {asked}", _points(mean), met=met)
    worst = min(auto, key=lambda unit: fmean(auto[unit]))
    value = fmean(auto[worst])
    yield _criterion(
        "3. no outer hospital loses more than a point",
        f"{_points(value)} ({worst[2]} of {worst[0]} at severity {worst[1]})",
        met=value >= -POINT,
    )
    if paper:
        gains = _training_gains(served, paper)
        for severity, least in ((3, 0.03), (0, -0.005)):
            found = [fmean(gains[unit]) for unit in gains if unit[1] == severity and unit[0] != PHANTOM]
            if found:
                yield _criterion(
                    f"4. training, real sets at severity {severity}: mean {'>' if severity else '>='} "
                    f"{100 * least:+g}",
                    _points(fmean(found)),
                    met=fmean(found) > least,
                )
    # The protocol does not say which candidates: those that `auto` had judged, or all that were tried.
    for which, tried in (("chosen by the playbook", _chosen(served)), ("every one", _tried(served))):
        gainers = [each for each in tried if each["change"] > POINT]
        yield _criterion(
            f"5. more than half of the candidates that gain a point are accepted: {which}",
            f"{_accepted(gainers)} of {len(gainers)}",
            met=2 * _accepted(gainers) > len(gainers),
        )
    harmful = [each for each in _planted(served) if each["change"] < -POINT]
    yield _criterion(
        "5. no planted candidate that loses a point is accepted",
        f"{_accepted(harmful)} of {len(harmful)} accepted",
        met=not _accepted(harmful),
    )
    own, wrong = fmean(map(fmean, auto.values())), fmean(map(fmean, _shuffled(served).values()))
    yield _criterion(
        "6. a playbook with shuffled features loses its edge",
        f"auto {_points(own)}, shuffled {_points(wrong)}; "
        f"harm {_share(_harmed(auto))} and {_share(_harmed(_shuffled(served)))}",
        met=own > wrong and _harmed(auto) <= _harmed(_shuffled(served)),
    )


def _criterion(asked: str, found: str, *, met: bool) -> tuple[str, str, str]:
    return asked, found, "yes" if met else "**no**"


def _asked(values: Values) -> Iterable[tuple[str | None, int, float]]:
    """Set (None: the real ones together), severity, and the mean that is asked for."""
    if PHANTOM in _sets(values):
        yield PHANTOM, 0, POINT
    if any(unit[1] == 3 for unit in values):
        yield None, 3, POINT
    for set_ in _sets(values):
        if set_ != PHANTOM:
            yield from ((set_, severity, 0.0) for severity in _severities(values, set_) if severity < 3)


# ---------------------------------------------------------------------- outside


def _outside(rows: Sequence[Row]) -> str:
    arms = [*dict.fromkeys(arm for row in rows for at in row["result"]["at"].values() for arm in at["arms"])]
    shown = [arm for arm in arms if arm not in ("global", "patients") and not arm.startswith("shuffled")]
    auto, level = _values(rows, _change("auto")), _values(rows, lambda at: at["arms"]["global"])
    passed = _values(rows, lambda at: fmean(cohort["passed"] for cohort in at["cohorts"]))
    body = []
    for set_ in _sets(auto):
        for severity in _severities(auto, set_):
            line = [
                set_,
                severity,
                f"{100 * fmean(_of(level, set_, severity).values()):.1f}",
                _share(fmean(_of(passed, set_, severity).values())),
                _points(min(_of(auto, set_, severity).values())),
            ]
            for arm in shown:
                line.append(_points(fmean(_of(_values(rows, _change(arm)), set_, severity).values())))
            body.append(line)
    return table(["set", "severity", "global", "accepted", "auto, worst", *shown], body)


def figure_of(rows: Sequence[Row]) -> str:
    """What `auto` served to each hospital, in points, by set, severity and gate."""
    parts: dict[str, dict[str, list[float]]] = {}
    for words, own in _by_gate([row for row in rows if row["cell"]["part"] == "served"]).items():
        for (set_, severity, _), values in sorted(_values(own, _change("auto")).items()):
            line = parts.setdefault(set_, {}).setdefault(f"severity {severity}{words}", [])
            line += [100 * value for value in values]
    return strip_chart(parts, "points")


# ---------------------------------------------------------------------- gate


@dataclass(frozen=True)
class _Calibration:
    slope: float
    error: float
    below: float


def _gate(rows: Sequence[Row]) -> list[str]:
    every, chosen, planted = _tried(rows), _chosen(rows), _planted(rows)
    body = []
    accepted = [each for each in chosen if not each["failed"]]
    for name, some in (
        ("chosen by the playbook", chosen),
        ("chosen and accepted", accepted),
        ("every candidate", every),
        ("planted", planted),
    ):
        gained = [each for each in some if each["change"] > POINT]
        lost = [each for each in some if each["change"] < -POINT]
        body.append(
            [
                name,
                len(some),
                f"{_accepted(some)} of {len(some)}",
                f"{_accepted(gained)} of {len(gained)}",
                f"{_accepted(lost)} of {len(lost)}",
                *_shown(_calibration(some) if name != "planted" else None),
            ]
        )
    head = [
        *("candidates", "number", "accepted", "accepted that gain a point", "accepted that lose a point"),
        *("slope", "mean error", "below the bound"),
    ]
    return [
        table(head, body),
        "*Slope*: of the true change on the predicted one; *mean error* of the prediction, in points; *below "
        "the bound*: share of the candidates that did worse than their bound.",
        _of_kinds(planted),
    ]


def _of_kinds(planted: Sequence[Mapping[str, Any]]) -> str:
    """Candidates that are bad on purpose, by what is wrong with them."""
    body = []
    for kind in dict.fromkeys(each["recipe"] for each in planted):
        own = [each for each in planted if each["recipe"] == kind]
        harmful = [each for each in own if each["change"] < -POINT]
        body.append([kind, _points(fmean(e["change"] for e in own)), len(harmful), _accepted(harmful)])
    return table(["planted", "mean change", "harmful", "accepted of these"], body)


def _accepted(some: Sequence[Mapping[str, Any]]) -> int:
    return sum(not each["failed"] for each in some)


def _calibration(some: Sequence[Mapping[str, Any]]) -> _Calibration | None:
    predicted = np.array([each["predicted"] for each in some])
    change = np.array([each["change"] for each in some])
    if len(some) < 2 or not predicted.std():
        return None
    slope = float(np.cov(predicted, change)[0, 1] / predicted.var(ddof=1))
    below = float(np.mean([each["change"] < each["bound"] for each in some]))
    return _Calibration(slope, float(np.abs(predicted - change).mean()), below)


def _shown(found: _Calibration | None) -> tuple[str, str, str]:
    if found is None:
        return "", "", ""
    return f"{found.slope:.2f}", f"{100 * found.error:.1f}", _share(found.below)


def _cohorts(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [cohort for row in rows for at in row["result"]["at"].values() for cohort in at["cohorts"]]


def _tried(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [each for cohort in _cohorts(rows) for each in cohort["tried"]]


def _chosen(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [
        each for cohort in _cohorts(rows) for each in cohort["tried"] if each["recipe"] == cohort["chosen"]
    ]


def _planted(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [each for row in rows for at in row["result"]["at"].values() for each in at["planted"]]


def _shuffled(rows: Sequence[Row]) -> Values:
    def value(at: Mapping[str, Any]) -> float:
        return fmean(found[0] for arm, found in at["arms"].items() if arm.startswith("shuffled"))

    return _values(rows, value)


def _harmed(values: Values) -> float:
    return fmean(fmean(found) < -POINT for found in values.values())


# ---------------------------------------------------------------------- the rest


def _training_gains(served: Sequence[Row], paper: Sequence[Row]) -> Values:
    now = {
        (row["cell"]["set"], int(severity), row["cell"]["site"], row["cell"]["seed"]): at["arms"]["global"]
        for row in served
        for severity, at in row["result"]["at"].items()
    }
    found: Values = {}
    for row in paper:
        cell = row["cell"]
        for severity, before in row["result"].items():
            key = (cell["set"], int(severity), cell["site"])
            if (*key, cell["seed"]) in now:
                found.setdefault(key, []).append(now[(*key, cell["seed"])] - before)
    return found


def _by_set(arms: Mapping[str, Values]) -> str:
    """A line for each set and arm, with its mean and worst hospital by severity."""
    severities = sorted({unit[1] for values in arms.values() for unit in values})
    body = []
    for arm, values in arms.items():
        for set_ in _sets(values):
            each = [[*_of(values, set_, severity).values()] for severity in severities]
            body.append([f"{set_} {arm}".strip(), *map(_worst, each)])
    return table(["set", *(f"severity {severity}" for severity in severities)], body)


def _inside_changes(rows: Sequence[Row], arm: str) -> dict[tuple[str, str], list[float]]:
    """The changes of the members, by set and site."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for site, dice in row["result"].items():
            found.setdefault((row["cell"]["set"], site), []).append(dice[arm] - dice["global"])
    return found


def _inside(rows: Sequence[Row]) -> str:
    return _by_hospital(
        {
            "personal": _inside_changes(rows, "personal"),
            "what `auto` serves": _inside_changes(rows, "auto"),
        }
    )


def _head_room(rows: Sequence[Row]) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        gain = row["result"]["home"] - row["result"]["global"]
        found.setdefault((row["cell"]["set"], row["cell"]["site"]), []).append(gain)
    return found


def _by_hospital(arms: Mapping[str, Mapping[tuple[str, str], Sequence[float]]]) -> str:
    """A line for each set, with the mean and the least of its hospitals."""
    first = next(iter(arms.values()))
    body = []
    for set_ in dict.fromkeys(name for name, _ in first):
        each = [[fmean(v) for (name, _), v in own.items() if name == set_] for own in arms.values()]
        body.append([set_, *map(_worst, each)])
    return table(["set", *arms], body)


def _learned(rows: Sequence[Row]) -> dict[str, Values]:
    values: dict[str, Values] = {}
    for row in rows:
        for severity, arms in row["result"].items():
            for arm, found in arms.items():
                if arm not in ("global", "patients"):
                    unit = (row["cell"]["set"], int(severity), row["cell"]["site"])
                    values.setdefault(arm, {}).setdefault(unit, []).append(found[0])
    return values


def _official(rows: Sequence[Row]) -> str:
    body = []
    for row in rows:
        cell, found = row["cell"], row["result"]
        scores = [found[key] for key in ("running", "batch", "start")] + [found["epochs"][found["best"] - 1]]
        shown = [with_background for with_background, _ in scores]
        body.append(
            [
                cell["set"],
                cell["site"],
                found["models"],
                *(f"{100 * value:.1f}" for value in shown),
                _points(shown[-1] - shown[0]),
                _points(found["locum"][1]),
            ]
        )
    head = [
        *("set", "hospital", "models", "global (eval)", "global, batch statistics", "routing at epoch 0"),
        *("routing at its best epoch by label", "gain as published code would report"),
        "the same candidate's gain as Locum scores it",
    ]
    return (
        "Dice per slice, background included, over slices with a target; seed 0, severity 0. The published "
        "code lets labels choose the slices and the epoch, scores each five neighbouring slices right after "
        "the step on them, and compares with the global model on running statistics. The last column is "
        "what is left of the same candidate's gain in foreground Dice per patient, once it is one fixed "
        "network that serves all scans. *Models*: how many are mixed; with one, only batch norm learns."
        "\n\n" + table(head, body)
    )


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _worst(values: Sequence[float]) -> str:
    """The mean, and the least in brackets."""
    return f"{_points(fmean(values))} ({_points(min(values))})" if values else ""


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"
