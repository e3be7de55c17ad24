"""Check whether the arms of `cross_organ` were trained to a plateau of Dice in validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.accuracy.cross_organ.arms import ARMS, CONTROLS
from benchmarks.harness.cells import Row
from benchmarks.harness.tables import mean_and_spread, table

# stage -> points (round, Dice)
Curve = Mapping[str, Sequence[tuple[int, float]]]
# The upper limit of a plateau: what twice the rounds gain in Dice at every site.
GAIN = 0.01


def plateau(rows: Sequence[Row]) -> list[str]:
    """How far validation Dice still rose in each stage, and what twice the rounds gained."""
    body = []
    for arm in ARMS:
        curves = _curves(rows, arm)
        if ends := [end(curve) for by_seed in curves.values() for curve in by_seed.values()]:
            rises = [_largest(curves, first_rise), _largest(curves, second_rise)]
            body.append([arm, mean_and_spread(ends), *rises])
    if not body:
        return []
    return [
        "## Was it a plateau?",
        "Dice on validation patients at the end, over sites and seeds; its rise since the middle of stage 1, "
        "and over stage 2, each the mean over seeds at the site where it is largest. A cosine to nothing "
        "flattens any curve: a rise shows that training was too short, and none does not show that it was "
        "long enough.",
        table(["arm", "at the end", "stage 1, largest rise", "stage 2, largest rise"], body),
        *controls(rows),
    ]


def controls(rows: Sequence[Row]) -> list[str]:
    """Dice in validation that twice the rounds gained at each site, and whether that is a plateau."""
    found = [(longer, _curves(rows, longer), _curves(rows, arm)) for longer, arm in CONTROLS.items()]
    sites = sorted({site for _, long, base in found for site in long.keys() & base.keys()})
    body = []
    counts = set()
    for longer, long, base in found:
        gains: dict[str, float] = {}
        for site in sites:
            seeds = long.get(site, {}).keys() & base.get(site, {}).keys()
            if seeds:
                counts.add(len(seeds))
                gains[site] = float(np.mean([end(long[site][s]) - end(base[site][s]) for s in seeds]))
        if gains:
            word = "a plateau" if len(gains) == len(sites) and max(gains.values()) < GAIN else "no plateau"
            mean = f"{np.mean(list(gains.values())):+.3f}" if len(gains) == len(sites) else "–"
            shown = (f"{gains[site]:+.3f}" if site in gains else "–" for site in sites)
            body.append([longer, *shown, mean, word])
    if not body:
        return ["What twice the rounds would gain is not computed yet: nothing here is called a plateau."]
    return [
        f"What twice the rounds gained in validation, the mean over {' or '.join(map(str, sorted(counts)))} "
        f"{'seed' if counts == {1} else 'seeds'}. *A plateau* is said where that is under "
        f"{GAIN} at every site; elsewhere arms are compared at equal steps, not at their best.",
        table(["trained", *sites, "mean of sites", ""], body),
    ]


def end(curve: Curve) -> float:
    """The last Dice of a curve."""
    return curve[max(curve)][-1][1]


def first_rise(curve: Curve) -> float | None:
    """From the first point in the second half of stage 1's rounds to the end of stage 1."""
    points = curve["1"]
    middle = next(dice for number, dice in points if 2 * number >= points[-1][0])
    return points[-1][1] - middle if len(points) > 1 else None


def second_rise(curve: Curve) -> float | None:
    """From the end of stage 1 to the end of stage 2; None without one."""
    return curve["2"][-1][1] - curve["1"][-1][1] if "2" in curve else None


def _largest(curves: Mapping[str, Mapping[int, Curve]], rise: Callable[[Curve], float | None]) -> str:
    """The largest over sites of the mean over seeds, and where it is: a mean over sites hides signs."""
    means = {}
    for site, by_seed in curves.items():
        rises = [found for curve in by_seed.values() if (found := rise(curve)) is not None]
        if rises:
            means[site] = float(np.mean(rises))
    if not means:
        return "–"
    site = max(means, key=means.__getitem__)
    return f"{means[site]:+.3f} ({site})"


def _curves(rows: Sequence[Row], arm: str) -> dict[str, dict[int, Curve]]:
    """An arm's curves, by site and seed."""
    found: dict[str, dict[int, Curve]] = {}
    for row in rows:
        for site, curve in row["result"]["curves"].get(arm, {}).items():
            found.setdefault(site, {})[row["cell"]["seed"]] = curve
    return found
