"""The last part of the page of `one_shot`: a client from outside picks a cluster without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.accuracy.one_shot.arms import FOR_ANYBODY
from benchmarks.harness.cells import Row
from benchmarks.harness.tables import mean_and_spread, table
from personalization.fedbicross.picking import cheapest
from personalization.gate import judge
from personalization.gate.picking import PICKING, Pick
from personalization.options.picking import CRITERIA

CHANCE, HINDSIGHT = "by chance", "best in hindsight"


def outside(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Picks without labels against the best cluster in hindsight, and arms that need no picking."""
    several = {
        name: [row for row in rows if len(row["result"]["outside"]["accuracies"]) > 1]
        for name, rows in groups.items()
    }
    several = {name: rows for name, rows in several.items() if rows}
    parts = [
        "## A client from outside",
        "All of its images, none of which any model was trained on. A cluster is picked from these images "
        "without their labels; labels say afterwards what each choice was worth on the same images, so that "
        "the best in hindsight flatters itself. "
        f"{sum(map(len, several.values()))} of {sum(map(len, groups.values()))} federations have several "
        "clusters, so that there is a choice.",
    ]
    if not several:
        return parts
    everything = [row for rows in several.values() for row in rows]
    for what, title in (("accuracies", "Accuracy"), ("balanced", "Balanced accuracy")):
        body = []
        for way in (*CRITERIA, CHANCE, HINDSIGHT, *FOR_ANYBODY):
            lost = [worth(row, HINDSIGHT, what) - worth(row, way, what) for row in everything]
            found = ([worth(row, way, what) for row in rows] for rows in several.values())
            best = np.mean([as_good(row, way, what) for row in everything])
            body.append([way, *map(mean_and_spread, found), mean_and_spread(lost), f"{best:.0%}"])
        parts += [
            f"{title}, mean ± deviation over federations.",
            table(["choice", *several, "lost to the best cluster", "as good as it"], body),
        ]
    return [*parts, *_gate(everything)]


def worth(row: Row, way: str, what: str) -> float:
    """The client's accuracy by one way to choose; `what` is `accuracies` or `balanced`."""
    found = row["result"]["outside"]
    of_clusters = found[what]
    if way == CHANCE:
        return float(np.mean(list(of_clusters.values())))
    if way == HINDSIGHT:
        return float(max(of_clusters.values()))
    if way in FOR_ANYBODY:
        return float(found["anybody"][what][way])
    return float(of_clusters[found["picked"][way]])


def as_good(row: Row, way: str, what: str) -> float:
    """The probability that a way to choose is as accurate as the best cluster."""
    best = worth(row, HINDSIGHT, what)
    if way == CHANCE:
        return float(np.mean([value >= best for value in row["result"]["outside"][what].values()]))
    return float(worth(row, way, what) >= best)


def _gate(rows: Sequence[Row]) -> list[str]:
    """The gate's verdicts on the picks of the default criterion, and the accuracy of these picks."""
    criterion = CRITERIA[0]
    found: dict[str, list[tuple[float, float]]] = {"passed": [], "refused": []}
    for row in rows:
        result = row["result"]["outside"]
        chosen = cheapest(result["costs"][criterion])
        pick = Pick(chosen, result["costs"], stability=result["stability"], source_warnings=0.0)
        picked, best = (worth(row, way, "balanced") for way in (criterion, HINDSIGHT))
        found["passed" if judge(PICKING, pick).passed else "refused"].append((picked, best - picked))
    body = [
        [name, len(each), *(mean_and_spread([pair[i] for pair in each]) for i in (0, 1))]
        for name, each in found.items()
    ]
    return [
        f"What the gate says to the picks by `{criterion}` (without the guard, which would warn of some). "
        "Its limits were set on a phantom, none of these images having a say.",
        table(["gate", "picks", "balanced accuracy", "lost to the best cluster"], body),
    ]
