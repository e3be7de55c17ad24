"""The page of `dose`: the criteria of the protocol's third amendment first, then what they rest on.

The unit is a hospital of a set on a rung (of the ladder, or a kind of shift); its seeds are averaged first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from benchmarks.accuracy.dose import masks
from benchmarks.accuracy.dose.kinds import KINDS
from benchmarks.harness.cells import Row
from benchmarks.harness.tables import table

PHANTOM, POLYPS = "phantom", "polyp_centres"
POINT = 0.01
LADDER_RUNGS = ("0", "1", "2", "3")
_GROUPS = {**{f"severity {rung}": (rung,) for rung in LADDER_RUNGS}, "seven kinds": tuple(KINDS)}
NOT_ARMS = ("global", "patients")
# set, rung, hospital
Unit: TypeAlias = tuple[str, str, str]
# unit -> one value per seed
Values: TypeAlias = dict[Unit, list[float]]
At: TypeAlias = Mapping[str, Any]


def changes(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Set -> rung -> what `auto` changes in points, by hospital and seed, as `_now` says."""
    found: dict[str, dict[str, list[float]]] = {}
    served = [row for row in _segmented(rows) if row["cell"]["part"] == "served"]
    for (set_, rung, _), values in _values(_now(served, "before"), _change("auto")).items():
        found.setdefault(set_, {}).setdefault(_rung(rung), []).extend(100 * each for each in values)
    return found


def sections(rows: Sequence[Row], figure: str) -> list[str]:
    """All sections for which there are rows. `figure` is the file of the figure, or nothing."""
    with_masks = [row for row in rows if row["cell"]["part"] == "masks"]
    about, rows = _about(rows), [row for row in rows if row["cell"]["part"] == "served"]
    by_training = {name: own for name in ("before", "after") if (own := _now(rows, name))}
    found = [about]
    criteria = {
        name: {asked: rest for asked, *rest in _criteria(_segmented(own))}
        for name, own in by_training.items()
    }
    # By their numbers: the trainings need not have the same ones.
    asked = sorted({name for each in criteria.values() for name in each})
    if asked:
        head = ["criterion", *(cell for name in criteria for cell in (name, "met"))]
        body = [
            [name, *(cell for each in criteria.values() for cell in each.get(name, ("", "")))]
            for name in asked
        ]
        found += ["## Criteria of what is served", table(head, body)]
    if figure:
        found += [
            "Each hospital and seed, after the usual training (before), in points against the global model:",
            f"![what `auto` changes]({figure})",
        ]
    after, before = ([r for r in rows if r["cell"]["training"] == name] for name in ("after", "before"))
    if after and before:
        training = [*_training_criteria(_segmented(after), _segmented(before))]
        found += ["## Criteria of the training", table(["criterion", "found", "met"], training)]
    # The usual training in detail: the other is off by default, and its criteria are above.
    for name, own in [*by_training.items()][:1]:
        found += [f"## Served, {name}: minus the global model", _served(own)]
        if segmented := _segmented(own):
            found += [f"## The gate, {name}", _gate(segmented)]
    return [*found, *masks.section(with_masks)]


def not_computed(
    rows: Sequence[Row], planned: Mapping[tuple[str, str, str], Sequence[int]], command: str
) -> list[str]:
    """What is planned and has no row, with the commands that compute it; by part, training and set.

    Hospitals are known from the rows: a set that has none is listed whole.
    """
    sites: dict[str, set[str]] = {}
    done: dict[tuple[str, str, str, int], set[str]] = {}
    for cell in (row["cell"] for row in rows):
        sites.setdefault(cell["set"], set()).add(cell["site"])
        place = (cell["part"], cell["training"], cell["set"], cell["seed"])
        done.setdefault(place, set()).add(cell["site"])
    lines = []
    for (part, training, set_), seeds in planned.items():
        lacking = [
            str(seed)
            for seed in seeds
            if not sites.get(set_) or done.get((part, training, set_, seed), set()) < sites[set_]
        ]
        if lacking:
            only = f"--only part={part} --only training={training} --only set={set_}"
            which = f"seed{'s' * (len(lacking) > 1)} {', '.join(lacking)}"
            lines.append(f"- `{part}`, training {training}, {set_}, {which}:\n  `{command} {only}`")
    return ["## Not computed yet", "\n".join(lines)] if lines else []


def _about(rows: Sequence[Row]) -> str:
    seeds = sorted({row["cell"]["seed"] for row in rows})
    devices = sorted({row["result"]["device"] for row in rows})
    return (
        "The third amendment of [the protocol](protocol-outside.md) was fixed before anything was run; the "
        "fourth to the eighth changed gate and dose, and say what was known by then. Figures are points of "
        "Dice (hundredths; of balanced accuracy for polyp_centres), means over hospitals of the means over "
        "seeds. *After* and *before* are the trainings, with batches of one kind and without. The rows also "
        "have cells of the first dose, which this page leaves out but for the criteria of the training. A "
        "cell that was finished before an amendment of the gate keeps its verdicts. "
        f"Seeds: {', '.join(map(str, seeds))}. {len(rows)} cells are finished. "
        f"Trained on: {', '.join(devices)}."
    )


def _now(rows: Sequence[Row], training: str) -> list[Row]:
    """The rows of a training with the dose that is served now."""
    return [row for row in rows if row["cell"]["training"] == training and of_now(row)]


def _segmented(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["cell"]["set"] != POLYPS]


# ---------------------------------------------------------------------- values


def _values(rows: Iterable[Row], value: Callable[[At], float | None]) -> Values:
    found: Values = {}
    for row in rows:
        for rung, at in row["result"]["at"].items():
            each = value(at)
            if each is not None:
                found.setdefault((row["cell"]["set"], rung, row["cell"]["site"]), []).append(each)
    return found


def _level(at: At) -> float:
    return float(at["arms"]["global"])


def _change(arm: str) -> Callable[[At], float | None]:
    return lambda at: at["arms"][arm][0] if arm in at["arms"] else None


def _mean(values: Values, set_: str, rung: str) -> float:
    """Mean over hospitals of the means over seeds."""
    return fmean(fmean(found) for unit, found in values.items() if unit[:2] == (set_, rung))


def _worst(values: Values, set_: str, rung: str) -> float:
    return min(fmean(found) for unit, found in values.items() if unit[:2] == (set_, rung))


def _places(values: Values) -> list[tuple[str, str]]:
    """Sets and rungs, in the order of the rows."""
    return list(dict.fromkeys((unit[0], unit[1]) for unit in values))


def _arms(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(arm for row in rows for at in row["result"]["at"].values() for arm in at["arms"])
    return [name for name in names if name not in NOT_ARMS]


def _paired(after: Sequence[Row], before: Sequence[Row]) -> Values:
    """The global model after minus before, of the seeds that have both."""
    earlier = {
        (row["cell"]["set"], rung, row["cell"]["site"], row["cell"]["seed"]): _level(at)
        for row in before
        for rung, at in row["result"]["at"].items()
    }
    found: Values = {}
    for row in after:
        for rung, at in row["result"]["at"].items():
            unit = (row["cell"]["set"], rung, row["cell"]["site"])
            if (*unit, row["cell"]["seed"]) in earlier:
                gain = _level(at) - earlier[*unit, row["cell"]["seed"]]
                found.setdefault(unit, []).append(gain)
    return found


def _home(after: Sequence[Row], before: Sequence[Row]) -> dict[str, float]:
    """By set: the members' Dice on their own test patients, after minus before."""
    earlier = {(r["cell"]["set"], r["cell"]["site"], r["cell"]["seed"]): r["result"]["home"] for r in before}
    gains: dict[str, dict[str, list[float]]] = {}
    for row in after:
        cell = row["cell"]
        then = earlier.get((cell["set"], cell["site"], cell["seed"]), {})
        for member, level in row["result"]["home"].items():
            if member in then:
                gains.setdefault(cell["set"], {}).setdefault(member, []).append(level - then[member])
    return {set_: fmean(map(fmean, members.values())) for set_, members in gains.items()}


# ---------------------------------------------------------------------- criteria


def _criteria(rows: Sequence[Row]) -> Iterable[tuple[str, str, str]]:
    auto = _values(rows, _change("auto"))
    places = _places(auto)
    real = list(dict.fromkeys(set_ for set_, _ in places if set_ != PHANTOM))
    for set_, rung in places:
        if rung in ("0", "1") and set_ != PHANTOM:
            mean = _mean(auto, set_, rung)
            yield _criterion(f"1. {set_} at severity {rung}: mean >= -0.1", _points(mean), met=mean >= -0.001)
    for rung, least in (("2", 0.02), ("3", 0.05)):
        if real and all((set_, rung) in places for set_ in real):
            mean = fmean(_mean(auto, set_, rung) for set_ in real)
            arms = [name for name in _arms(rows) if name != "auto"]
            best = max(fmean(_mean(_values(rows, _change(arm)), s, rung) for s in real) for arm in arms)
            yield _criterion(
                f"2. real sets at severity {rung}: >= {100 * least:+g}, or a point below the best arm",
                f"{_points(mean)}, best arm {_points(best)}",
                met=mean >= least or mean >= best - POINT,
            )
    if (PHANTOM, "0") in places:
        mean = _mean(auto, PHANTOM, "0")
        yield _criterion("3. phantom: mean >= +1", _points(mean), met=mean >= POINT)
    if auto:
        unit = min(auto, key=lambda each: fmean(auto[each]))
        worst = fmean(auto[unit])
        yield _criterion(
            "4. no hospital below -1, on any rung or kind",
            f"{_points(worst)} ({unit[2]} of {unit[0]}, {_rung(unit[1])})",
            met=worst >= -POINT,
        )
        harmful = [each for each in _planted(rows) if each["change"] < -POINT]
        share = _accepted(harmful) / len(harmful) if harmful else 0.0
        yield _criterion(
            "5. planted candidates that lose a point: at most 1 % accepted",
            f"{_accepted(harmful)} of {len(harmful)}",
            met=share <= 0.01,
        )
        gainers = [each for each in _cohorts(rows) if each["change"] > POINT]
        yield _criterion(
            "6. candidates that gain a point: at least 70 % accepted",
            f"{_accepted(gainers)} of {len(gainers)}",
            met=not gainers or _accepted(gainers) >= 0.7 * len(gainers),
        )


def _training_criteria(after: Sequence[Row], before: Sequence[Row]) -> Iterable[tuple[str, str, str]]:
    gains = _paired(after, before)
    places = _places(gains)
    real = [set_ for set_, _ in places if set_ != PHANTOM]
    if gains:
        for words, rungs in (
            ("severity 3", ("3",)),
            (
                "kinds that are not drawn",
                tuple(r for r in dict.fromkeys(r for _, r in places) if r not in LADDER_RUNGS),
            ),
        ):
            found = [_mean(gains, set_, rung) for set_, rung in places if set_ in real and rung in rungs]
            if found:
                yield _criterion(
                    f"7. training, {words}: mean of the real sets >= +5",
                    _points(fmean(found)),
                    met=fmean(found) >= 0.05,
                )
        for set_, rung in places:
            if rung == "0":
                mean = _mean(gains, set_, rung)
                yield _criterion(
                    f"8. training, {set_} at severity 0: >= -0.2", _points(mean), met=mean >= -0.002
                )
        for set_, mean in _home(after, before).items():
            yield _criterion(f"8. training, {set_} at home: >= -0.3", _points(mean), met=mean >= -0.003)


def _criterion(asked: str, found: str, *, met: bool) -> tuple[str, str, str]:
    return asked, found, "yes" if met else "**no**"


# ---------------------------------------------------------------------- tables


def _served(rows: Sequence[Row]) -> str:
    level = _values(rows, _level)
    doses = _values(rows, lambda at: fmean(cohort["dose"] for cohort in at["cohorts"]))
    shifts = _values(rows, lambda at: fmean(cohort["shift"] for cohort in at["cohorts"]))
    changes = {arm: _values(rows, _change(arm)) for arm in _arms(rows)}
    body = []
    for set_ in dict.fromkeys(unit[0] for unit in level):
        for name, rungs in _GROUPS.items():
            there = [rung for s, rung in _places(level) if s == set_ and rung in rungs]
            if not there:
                continue
            line: list[Any] = [set_, name]
            for values, form in ((level, "{:.1f}"), (shifts, "{:.1f}"), (doses, "{:.2f}")):
                mean = fmean(_mean(values, set_, rung) for rung in there)
                line.append(form.format(100 * mean if values is level else mean))
            for found in changes.values():
                own = [rung for rung in there if (set_, rung) in _places(found)]
                line.append(
                    f"{_points(fmean(_mean(found, set_, rung) for rung in own))} "
                    f"({_points(min(_worst(found, set_, rung) for rung in own))})"
                    if own
                    else ""
                )
            body.append(line)
    note = "*R*: the hospital's shift over the natural one; *a*: the dose; in brackets the worst hospital."
    return f"{note}\n\n{table(['set', 'rung', 'global', 'R', 'a', *changes], body)}"


def _gate(rows: Sequence[Row]) -> str:
    kinds = {"what `auto` makes of a cohort": _cohorts(rows)}
    for each in _planted(rows):
        kinds.setdefault(f"planted: {each['kind']}", []).append(each)
    body = []
    for kind, found in kinds.items():
        gained = [each for each in found if each["change"] > POINT]
        lost = [each for each in found if each["change"] < -POINT]
        body.append([kind, *(f"{_accepted(some)} of {len(some)}" for some in (found, gained, lost))])
    head = ["candidate", "accepted", "accepted of those that gain a point", "accepted of those that lose one"]
    return table(head, body)


def _cohorts(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [cohort for row in rows for at in row["result"]["at"].values() for cohort in at["cohorts"]]


def _planted(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [each for row in rows for at in row["result"]["at"].values() for each in at["planted"]]


def of_now(row: Row) -> bool:
    """Whether a cell has the dose of the seventh amendment, since which rows tell the doses by thirds."""
    return all("doses" in cohort for cohort in _cohorts([row]))


def _accepted(some: Sequence[Mapping[str, Any]]) -> int:
    return sum(not each["failed"] for each in some)


def _rung(rung: str) -> str:
    return f"severity {rung}" if rung in LADDER_RUNGS else rung


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"
