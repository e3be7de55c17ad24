"""The page of `one_shot`: accuracies, where federation helps, w, and the client from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.one_shot.arms import ARMS, FEDAVG, LITERAL, LOCAL, LONGER, NO_CLUSTERS, TUNED, WHOLE
from benchmarks.accuracy.one_shot.outside import outside
from benchmarks.accuracy.one_shot.scores import (
    balanced_of_all,
    difference_of_all,
    own_accuracies,
    own_balanced,
    own_difference,
    right_of_all,
)
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.tables import Interval, mean_and_spread, table, verdict

Differences = Callable[[Sequence[Row], str, str], tuple[Interval, list[float]]]
# The least share of one class in a client's training images that counts as nearly all of one class.
ONE_SIDED = 0.8


def sections(rows: Sequence[Row], cells: Sequence[Cell]) -> list[str]:
    """The page; `rows` are the finished ones of `cells`."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(setting(row), []).append(row)
    return [
        about(rows, len(cells)),
        *own(groups),
        *everybody(groups),
        *where(rows),
        *weights(rows),
        *synthesis(groups),
        *outside(groups),
    ]


def setting(row: Row) -> str:
    """The set and the parameter of its Dirichlet division."""
    return f"{row['cell']['set']}, α {row['cell']['alpha']}"


def about(rows: Sequence[Row], cells: int) -> str:
    """The settings, and how to read the tables."""
    configurations = []
    for name in dict.fromkeys(row["cell"]["set"] for row in rows):
        cell = next(row["cell"] for row in rows if row["cell"]["set"] == name)
        method = ", ".join(f"{field} {value}" for field, value in cell["method"].items())
        configurations.append(f"`{name}`: {method}.")
    cell = rows[0]["cell"]
    literal = ", ".join(f"{field} {value}" for field, value in cell["printed"].items())
    return "\n\n".join(
        [
            f"Profile `{cell['profile']}`, {cell['clients']} clients and one outside; {len(rows)} of {cells} "
            "cells (set, α, seed) are finished. A seed is another division among the clients and another "
            "training.",
            *configurations,
            f"`{LITERAL}` is the letter of the paper at these sizes ({literal}). `{NO_CLUSTERS}` has one "
            f"cluster and so no w either. `{LONGER}`, `{TUNED}` and whatever has Stage 3 train for the same "
            "epochs on a client's own images once the upload is done. Distillation starts from the average "
            "of the uploads. The test images of `wbc5_28_shift` are of another camera than all others: a "
            "client's own there are its classes, not its look.",
            "± is the standard deviation over seeds. Intervals are 95 %, bootstrap over test images: they "
            "know nothing of other trainings. *Helps* and *harms* are said where the interval leaves zero "
            "out and every seed agrees; nothing is corrected for the number of comparisons.",
        ]
    )


def own(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Each client's model on the client's own part of the test images."""
    return [
        "## At home",
        "Test images were dealt to clients by the shares of classes that their training images have; each "
        "is answered by the model of its client. Mean over clients.",
        *_measured(
            groups,
            {
                "Accuracy.": lambda row, arm: float(np.mean(own_accuracies(row, arm))),
                "Accuracy of the client with the least.": lambda row, arm: min(own_accuracies(row, arm)),
                "Balanced accuracy.": lambda row, arm: float(np.mean(own_balanced(row, arm))),
            },
        ),
        f"Less `{LOCAL}`, the model that a client had before anything was uploaded. Accuracy.",
        _differences(groups, [(arm, LOCAL) for arm in ARMS if arm != LOCAL], own_difference),
        f"`{WHOLE}` less what else could be done, and less what it is made of. Accuracy.",
        _differences(groups, [(WHOLE, arm) for arm in ARMS if arm not in (WHOLE, LOCAL)], own_difference),
    ]


def everybody(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Every client's model on all test images."""
    return [
        "## On everybody's images",
        "All test images, answered by the models of all clients. Mean over these.",
        *_measured(
            groups,
            {
                "Accuracy.": lambda row, arm: float(right_of_all(row, arm).mean()),
                "Balanced accuracy.": balanced_of_all,
            },
        ),
        f"`{WHOLE}` less each other. Accuracy.",
        _differences(groups, [(WHOLE, arm) for arm in ARMS if arm != WHOLE], difference_of_all),
    ]


def _measured(
    groups: Mapping[str, Sequence[Row]], measures: Mapping[str, Callable[[Row, str], float]]
) -> list[str]:
    parts = []
    for name, measure in measures.items():
        body = [
            [arm, *(mean_and_spread([measure(row, arm) for row in rows]) for rows in groups.values())]
            for arm in ARMS
        ]
        parts += [name, table(["arm", *groups], body)]
    return parts


def _differences(
    groups: Mapping[str, Sequence[Row]], pairs: Sequence[tuple[str, str]], measure: Differences
) -> str:
    body = []
    for first, second in pairs:
        found = [measure(rows, first, second) for rows in groups.values()]
        body.append([f"{first} − {second}", *(f"{each[0]} {verdict(*each)}" for each in found)])
    return table(["difference", *groups], body)


def where(rows: Sequence[Row]) -> list[str]:
    """Which clients gain at home, by the balance and the number of their images."""
    arms = (LONGER, FEDAVG, TUNED, WHOLE)
    body = []
    for name in dict.fromkeys(row["cell"]["set"] for row in rows):
        kinds: dict[str, dict[str, list[float]]] = {}
        for row in rows:
            if row["cell"]["set"] != name:
                continue
            accuracies = {arm: own_accuracies(row, arm) for arm in (LOCAL, *arms)}
            for index, counts in enumerate(row["result"]["clients"].values()):
                one_sided = max(counts) >= ONE_SIDED * sum(counts)
                kind = "nearly all of one class" if one_sided else "mixed"
                kind += ", under 100 images" if sum(counts) < 100 else ", 100 images and more"
                of_kind = kinds.setdefault(kind, {arm: [] for arm in accuracies})
                for arm, values in accuracies.items():
                    of_kind[arm].append(values[index])
        for kind, found in sorted(kinds.items()):
            alone = found[LOCAL]
            line = [f"{name}: {kind}", len(alone), mean_and_spread(alone)]
            for arm in arms:
                gains = np.subtract(found[arm], alone)
                line.append(f"{gains.mean():+.3f} ({(gains > 0).sum()} up, {(gains < 0).sum()} down)")
            body.append(line)
    return [
        "## Who gains?",
        f"Clients of all seeds and α by their training images; accuracy at home of `{LOCAL}`, ± over "
        "clients, and what other arms add to it, with how many clients gain and lose. A client counts as "
        f"nearly all of one class from {ONE_SIDED:.0%} on.",
        table(["clients", "count", LOCAL, *arms], body),
    ]


def weights(rows: Sequence[Row]) -> list[str]:
    """The learned w, and its change when the paper is taken literally."""
    body = []
    for row in rows:
        found = row["result"]["clusters"]
        mixing = _matrix(found)
        count = len(mixing)
        sizes = [list(found["assignment"].values()).count(name) for name in found["mixing"]]
        tried = found["silhouettes"]
        body.append(
            [
                setting(row),
                row["cell"]["seed"],
                count,
                "+".join(map(str, sorted(sizes, reverse=True))),
                f"{max(tried.values()):.3f}" if tried else "–",
                f"{_moved(mixing):.3f}" if count > 1 else "–",
                f"{np.diag(mixing).mean():.3f}" if count > 1 else "–",
                f"{1 / count:.3f}",
            ]
        )
    printed = [_moved(_matrix(row["result"]["clusters as printed"])) for row in rows]
    header = ["setting", "seed", "K", "sizes", "silhouette", "max abs(w − 1/K)", "own weight", "1/K"]
    return [
        "## What became of w?",
        "With normalised outer steps w leaves 1/K by construction: the entry with the steepest slope moves "
        "by the outer rate in every outer step. What the data decide is where it goes. *Own weight* is what "
        "a cluster's model learns from its own cluster, and it is its own images that w is validated on. "
        f"By the letter of the paper (`{LITERAL}`), with plain steps, w left 1/K by {min(printed):.2f} to "
        f"{max(printed):.2f}. One cluster has no w. The silhouette is the best that was found.",
        table(header, body),
    ]


def _matrix(clusters: Mapping[str, Any]) -> NDArray[np.float64]:
    """w [K, K]: how much each cluster learned from each."""
    return np.array([list(each.values()) for each in clusters["mixing"].values()])


def _moved(mixing: NDArray[np.float64]) -> float:
    """The largest change of an entry from its start, 1/K."""
    return float(np.abs(mixing - 1 / len(mixing)).max())


def synthesis(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Whether the synthesised images are of their intended class."""
    body = []
    for name, rows in groups.items():
        ends = [entry for row in rows for entry in row["result"]["synthesis"]]
        classes = len(next(iter(rows[0]["result"]["clients"].values())))
        terms = ("cross_entropy", "total_variation", "batch_norm")
        body.append(
            [
                name,
                *(mean_and_spread([entry[term] for entry in ends], 2) for term in terms),
                f"{math.log(classes):.2f}",
            ]
        )
    return [
        "## What was synthesised?",
        "Terms of the images' loss over the last steps of a trajectory, not weighted; ± over trajectories. A "
        "cross-entropy above that of a guess means that the images are not of the class that was asked for: "
        "they are made by batch norm's statistics alone.",
        table(["setting", "cross-entropy", "total variation", "batch norm", "a guess's cross-entropy"], body),
    ]
