"""The page of `lens`: the protocol's criteria first, then every set, arm and step by groups of rungs.

The unit is a hospital of a set on a rung; its seeds are averaged first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.accuracy.lens.rungs import AS_THEY_ARE, DETECTOR, DRAWN, GREY, INVERTED, UNDRAWN
from benchmarks.harness.cells import Row
from benchmarks.harness.figures import strip_chart
from benchmarks.harness.tables import table
from model_store.lens import STEPS

POINT = 0.01
INSTANCE, PHANTOM, POLYPS = "phantom, instance norm", "phantom", "polyp_centres"
_ARMS = ("auto", "dose", "lens", "lens then dose", "served", "best", "each scan")
_GROUPS = {
    "as they are": (AS_THEY_ARE,),
    **{f"severity {rung}": (rung,) for rung in DRAWN},
    "seven kinds": UNDRAWN,
    **{rung: (rung,) for rung in (INVERTED, DETECTOR, GREY)},
}
_STEPS = tuple(f"{how} {step}" for how in ("only", "without") for step in STEPS)
# set, rung, hospital
Unit = tuple[str, str, str]


def sections(rows: Sequence[Row], planned: Mapping[str, int], command: str, figure: str) -> list[str]:
    """All sections for which there are rows; `planned` has the number of seeds of each set, and `figure` the
    file of the figure."""
    seeds = sorted({row["cell"]["seed"] for row in rows})
    found = [
        "[The protocol](protocol-lens.md) was fixed before anything was run. Figures are points of Dice "
        "(hundredths; of balanced accuracy for polyp_centres) against the global model, means over hospitals "
        f"of the means over seeds. Seeds: {', '.join(map(str, seeds)) or 'none'}. {len(rows)} cells are "
        "finished."
    ]
    if not rows:
        return found
    found += ["## Criteria of what is served", table(["criterion", "found", "met"], [*_criteria(rows)])]
    found += [
        "What is served, each hospital and seed:",
        f"![what is served]({figure})",
        "## What is served",
        "In brackets the worst hospital on a rung of the group.",
        _served(rows),
        "## Every arm",
        "Means of the sets that have the arm.",
        _arms(rows, _ARMS),
    ]
    if any(row["cell"]["ablation"] for row in rows):
        own = [row for row in rows if row["cell"]["ablation"]]
        found += ["## Each step alone, and left out", _arms(own, ("lens", *_STEPS))]
    found += ["## The gate", *_gate(rows)]
    lacking = [
        f"- {name}: `{command} --only set={name.replace(' ', '?')}`"
        for name, count in planned.items()
        if len({(row["cell"]["seed"]) for row in rows if row["cell"]["set"] == name}) < count
    ]
    if lacking:
        found += ["## Not computed yet", "\n".join(lacking)]
    return found


def changes(rows: Iterable[Row], arm: str, rungs: Iterable[str] | None = None) -> dict[Unit, float]:
    """Mean change over seeds of every unit that has the arm."""
    wanted = None if rungs is None else {*rungs}
    found: dict[Unit, list[float]] = {}
    for row in rows:
        cell = row["cell"]
        for rung, at in row["result"]["at"].items():
            if arm in at["arms"] and (wanted is None or rung in wanted):
                found.setdefault((cell["set"], rung, cell["site"]), []).append(at["arms"][arm][0])
    return {unit: fmean(values) for unit, values in found.items()}


def of_sets(rows: Sequence[Row], arm: str, rungs: Sequence[str]) -> dict[str, float]:
    """Mean over the hospitals and rungs of each set."""
    found: dict[str, list[float]] = {}
    for (name, _, _), change in changes(rows, arm, rungs).items():
        found.setdefault(name, []).append(change)
    return {name: fmean(values) for name, values in found.items()}


def _criteria(rows: Sequence[Row]) -> Iterable[list[str]]:
    served = changes(rows, "served")
    here = of_sets(rows, "served", (AS_THEY_ARE,))
    worst = min(((change, unit) for unit, change in served.items() if unit[1] == AS_THEY_ARE), default=None)
    if worst is not None:
        low = min(here, key=here.__getitem__)
        yield [
            "1. as they are: no set below -0.1, no hospital below -0.5",
            f"{_points(here[low])} ({low}), {_points(worst[0])} ({worst[1][2]} of {worst[1][0]})",
            _met(here[low] >= -0.001 and worst[0] >= -0.005),
        ]
    for name, rungs, least in (
        ("2. severity 2: at least +3", ("2",), 0.03),
        ("2. severity 3: at least +8", ("3",), 0.08),
        ("3. the seven kinds: at least +5", UNDRAWN, 0.05),
    ):
        if found := of_sets(rows, "served", rungs):
            value = fmean(found.values())
            yield [name, f"{_points(value)} over {len(found)} sets", _met(value >= least)]
    apart = {
        name: _level(rows, name, INVERTED) - _level(rows, name, AS_THEY_ARE)
        for name in here
        if name != POLYPS and _has(rows, name, INVERTED)
    }
    if apart:
        low = min(apart, key=apart.__getitem__)
        yield [
            "4. inverted: within 3 points of as they are",
            f"{_points(apart[low])} ({low})",
            _met(apart[low] >= -0.03),
        ]
    both = [of_sets(rows, "served", (*DRAWN, DETECTOR, *UNDRAWN)).get(name) for name in (PHANTOM, INSTANCE)]
    if both[0] is not None and both[1] is not None:
        yield [
            "5. instance norm gains as batch norm does, within 1 point",
            f"{_points(both[1])} and {_points(both[0])}",
            _met(abs(both[1] - both[0]) <= POINT),
        ]
    if served:
        change, unit = min((change, unit) for unit, change in served.items())
        harmed = sum(value < -POINT for value in served.values())
        yield [
            "6. no hospital below -1 on any rung",
            f"{_points(change)} ({unit[2]} of {unit[0]}, {unit[1]}); {harmed} of {len(served)} below",
            _met(change >= -POINT),
        ]
    planted = [each for row in rows for at in row["result"]["at"].values() for each in at["planted"]]
    bad = [each for each in planted if each["change"] < -POINT]
    if bad:
        passed = [each for each in bad if each["served"] in ("lens", "lens and dose")]
        yield [
            "7. planted candidates that lose a point: at most 1 % accepted",
            f"{len(passed)} of {len(bad)}",
            _met(len(passed) <= 0.01 * len(bad)),
        ]
    good = [
        (facts["served"], facts["change"])
        for facts in _cohorts(rows)
        if max(facts["change"].get(arm, 0.0) for arm in ("lens", "lens then dose")) >= POINT
    ]
    if good:
        accepted = sum(name in ("lens", "lens and dose") for name, _ in good)
        yield [
            "8. candidates that gain a point: at least 85 % accepted",
            f"{accepted} of {len(good)}",
            _met(accepted >= 0.85 * len(good)),
        ]
    draws = [max(shifts.values()) for row in rows for shifts in row["result"]["own"].values()]
    if draws:
        usual = sum(shift <= 1 for shift in draws) / len(draws)
        yield [
            "9. R of a member's own scans at most 1 in 90 % of the draws",
            f"{100 * usual:.0f} % of {len(draws)}",
            _met(usual >= 0.9),
        ]


def _cohorts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [facts for row in rows for at in row["result"]["at"].values() for facts in at["cohorts"]]


def _has(rows: Sequence[Row], name: str, rung: str) -> bool:
    return any(row["cell"]["set"] == name and rung in row["result"]["at"] for row in rows)


def _level(rows: Sequence[Row], name: str, rung: str) -> float:
    """Mean score of what is served, over hospitals and seeds."""
    arms = [
        row["result"]["at"][rung]["arms"]
        for row in rows
        if row["cell"]["set"] == name and rung in row["result"]["at"]
    ]
    return fmean(each["global"] + each["served"][0] for each in arms)


def figure_of(rows: Sequence[Row]) -> str:
    """What is served to each hospital, in points, by set and rung."""
    parts: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for rung, at in row["result"]["at"].items():
            own = parts.setdefault(row["cell"]["set"], {}).setdefault(_name(rung), [])
            own.append(100 * at["arms"]["served"][0])
    return strip_chart(parts, "points")


def _name(rung: str) -> str:
    return rung if rung in UNDRAWN else next(name for name, rungs in _GROUPS.items() if rung in rungs)


def _served(rows: Sequence[Row]) -> str:
    body = []
    for name in dict.fromkeys(row["cell"]["set"] for row in rows):
        own = [row for row in rows if row["cell"]["set"] == name]
        line = [name, str(len({row["cell"]["seed"] for row in own}))]
        for rungs in _GROUPS.values():
            found = changes(own, "served", rungs).values()
            line.append(f"{_points(fmean(found))} ({_points(min(found))})" if found else "")
        body.append(line)
    return table(["set", "seeds", *_GROUPS], body)


def _arms(rows: Sequence[Row], arms: Iterable[str]) -> str:
    body = []
    for arm in arms:
        means = [of_sets(rows, arm, rungs).values() for rungs in _GROUPS.values()]
        body.append([arm, *(_points(fmean(found)) if found else "" for found in means)])
    return table(["arm", *_GROUPS], body)


def _gate(rows: Sequence[Row]) -> list[str]:
    """How often each check refuses a gain and a loss."""
    refused: dict[str, list[float]] = {}
    for facts in _cohorts(rows):
        if facts["lens gate"] is not None:
            for name in facts["lens gate"]["failed"]:
                refused.setdefault(name, []).append(facts["change"]["lens"])
    body = [
        [name, str(len(found)), str(sum(v >= POINT for v in found)), str(sum(v <= -POINT for v in found))]
        for name, found in sorted(refused.items())
    ]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for at in row["result"]["at"].values():
            for each in at["planted"]:
                kinds.setdefault(each["kind"], []).append(each)
    planted = []
    for kind, found in sorted(kinds.items()):
        bad = [each for each in found if each["change"] < -POINT]
        passed = sum(each["served"] in ("lens", "lens and dose") for each in bad)
        planted.append([kind, str(len(found)), str(len(bad)), str(passed)])
    parts = []
    if doses := [facts for facts in _cohorts(rows) if facts["dose"] is not None]:
        bad = [facts for facts in doses if facts["change"]["dose"] < -POINT]
        accepted = sum(not facts["dose"][2] for facts in bad)
        still = sum(facts["change"]["served"] < -POINT for facts in bad)
        parts.append(
            f"Of {len(doses)} cohorts {len(bad)} lose more than a point by the dose of today without a lens: "
            f"its own gate accepted {accepted} of these, and what is served now loses a point at {still}."
        )
    if body:
        parts.append(table(["check", "refused a lens", "that gains a point", "that loses one"], body))
    if planted:
        parts.append(table(["planted", "candidates", "that lose a point", "accepted of these"], planted))
    return parts or ["No lens was refused."]


def _points(change: float) -> str:
    return f"{100 * change:+.1f}"


def _met(met: bool) -> str:
    return "yes" if met else "**no**"
