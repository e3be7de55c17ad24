"""The page of `picking`: the accuracy that each criterion loses, and the gate's verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.cells import Row
from benchmarks.harness.tables import mean_and_spread, table
from personalization.fedbicross.picking import cheapest
from personalization.gate import judge
from personalization.gate.picking import PICKING, Pick
from personalization.options.picking import CRITERIA

HINDSIGHT, CHANCE = "best in hindsight", "by chance"


def regrets(row: Row) -> list[dict[str, list[float]]]:
    """For each outside hospital, how much accuracy each way to choose loses to the best cluster.

    A list of equally likely losses: one for a criterion, one per cluster for chance. `HINDSIGHT` has what the
    best cluster's accuracy is.
    """
    lost = []
    for each in row["result"]["hospitals"].values():
        accuracies = each["accuracies"]
        best = max(accuracies.values())
        found = {name: [best - accuracies[cheapest(costs)]] for name, costs in each["costs"].items()}
        lost.append(found | {CHANCE: [best - a for a in accuracies.values()], HINDSIGHT: [best]})
    return lost


def sections(rows: Sequence[Row]) -> list[str]:
    """The tables: the hospital left out, the strangers, and the gate."""
    several = [row for row in rows if len(set(row["result"]["assignment"].values())) > 1]
    parts = [
        f"{len(rows)} federations, {len(several)} of them with several clusters: only those have anything "
        "to choose. Accuracy lost to the best cluster in hindsight, mean ± deviation over federations and "
        "hospitals, and how often the best cluster (or one as good) was picked."
    ]
    for title, which in (("The hospital that was left out", slice(0, 1)), ("Strangers", slice(1, None))):
        lost = [each for row in several for each in regrets(row)[which]]
        if not lost:
            continue
        body = [
            [
                name,
                mean_and_spread([float(np.mean(each[name])) for each in lost]),
                f"{max(max(each[name]) for each in lost):.3f}",
                f"{np.mean([np.mean([loss <= 0 for loss in each[name]]) for each in lost]):.0%}",
            ]
            for name in (*CRITERIA, CHANCE)
        ]
        best = mean_and_spread([each[HINDSIGHT][0] for each in lost])
        parts += [
            f"{title}: {len(lost)} choices. The best cluster's accuracy is {best}.",
            table(["criterion", "accuracy lost", "at most", "best picked"], body),
        ]
    return [*parts, *_gate([each for row in several for each in row["result"]["hospitals"].values()])]


def _gate(hospitals: Sequence[Mapping[str, Any]]) -> list[str]:
    """The gate's verdicts on the picks of the default criterion, and the accuracy of these picks."""
    criterion = CRITERIA[0]
    right: dict[str, list[float]] = {"passed": [], "refused": []}
    for each in hospitals:
        chosen = cheapest(each["costs"][criterion])
        pick = Pick(chosen, each["costs"], stability=each["stability"][criterion], source_warnings=0.0)
        verdict = judge(PICKING, pick)
        right["passed" if verdict.passed else "refused"].append(each["accuracies"][chosen])
    body = [
        [name, len(found), mean_and_spread(found), sum(accuracy < 0.5 for accuracy in found)]
        for name, found in right.items()
    ]
    return [
        f"What the gate says to the picks by `{criterion}`, all hospitals together (without the guard, which "
        "would warn of some). The criterion and the gate's thresholds were chosen on this phantom, so that "
        "it flatters both:",
        table(["gate", "picks", "accuracy", "below 0.5"], body),
    ]
