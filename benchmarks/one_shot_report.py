"""The page of `benchmarks.one_shot`: accuracies, where federation helps, w, and the client from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import scores as tables
from benchmarks.harness import Cell, Rows
from benchmarks.one_shot_arms import ARMS, FEDAVG, FOR_ANYBODY, LITERAL, LOCAL, NO_STAGE_3, TUNED, WHOLE
from benchmarks.scores import Scores
from benchmarks.tables import mean_and_spread, table, write_page

COMPARISONS = tuple((WHOLE, arm) for arm in ARMS if arm != WHOLE)
AGAINST_LOCAL = tuple((arm, LOCAL) for arm in ARMS if arm != LOCAL)
# Below it a weight counts as where it began, 1/K.
MOVED = 0.01
Measure = Callable[[Mapping[str, Any], str], float]


def page(path: Path, cells: Sequence[Cell], command: str) -> None:
    """Write the page beside the rows, from those of `cells`."""
    rows = Rows(path).of(cells)
    sections = ["No cell of the profile's configuration is finished yet."]
    if rows:
        sections = [about(rows, len(cells)), *accuracies(rows), *helps(rows), *weights(rows), *outside(rows)]
    write_page(path.with_suffix(".md"), "One-shot federation", command, path, sections)


def setting(row: Mapping[str, Any]) -> str:
    """The set and how unevenly it is shared out."""
    return f"{row['cell']['set']}, α {row['cell']['alpha']}"


def about(rows: Sequence[Mapping[str, Any]], cells: int) -> str:
    """What was run, and how to read it."""
    configurations = []
    for name in dict.fromkeys(row["cell"]["set"] for row in rows):
        cell = next(row["cell"] for row in rows if row["cell"]["set"] == name)
        method = ", ".join(f"{field} {value}" for field, value in cell["method"].items())
        configurations.append(f"`{name}`: {method}.")
    cell = rows[0]["cell"]
    return "\n\n".join(
        [
            f"Profile `{cell['profile']}`, {cell['clients']} clients and one outside; {len(rows)} of {cells} "
            "cells (set, α, seed) are finished.",
            *configurations,
            "Accuracies are of the test images. *Own*: every image by the model of the client that it was "
            "dealt to, by the shares of classes that its training images have. *Global*: every image by the "
            "models of all clients, the mean over these. Balanced accuracy is the mean over the classes that "
            "are there, of each client and then over clients. ± is the standard deviation over seeds; "
            "intervals are 95 %, paired bootstrap over test images (differences averaged over seeds first): "
            "they know nothing of other trainings, so read them beside the ±.",
        ]
    )


def own_scores(rows: Sequence[Mapping[str, Any]]) -> Scores:
    """1 or 0 for every image, by the model of the client it belongs to."""
    scores: Scores = {}
    for row in rows:
        result = row["result"]
        for arm, classes in result["own"].items():
            found = enumerate(zip(classes, result["labels"], strict=True))
            right = {f"{i:06d}": float(said == label) for i, (said, label) in found if said != "-"}
            tables.add(scores, arm, row["cell"]["seed"], setting(row), right)
    return scores


def global_scores(rows: Sequence[Mapping[str, Any]]) -> Scores:
    """The share of the clients' models that are right, for every image."""
    scores: Scores = {}
    for row in rows:
        for arm, right in row["result"]["right"].items():
            shares = {f"{i:06d}": int(n) / row["cell"]["clients"] for i, n in enumerate(right)}
            tables.add(scores, arm, row["cell"]["seed"], setting(row), shares)
    return scores


def balanced_own(row: Mapping[str, Any], arm: str) -> float:
    """Mean over clients of the mean over their classes of the share that is right."""
    result = row["result"]
    right: dict[str, dict[str, list[bool]]] = {}
    for owner, label, said in zip(result["owners"], result["labels"], result["own"][arm], strict=True):
        if said != "-":
            right.setdefault(owner, {}).setdefault(label, []).append(said == label)
    return float(np.mean([np.mean([np.mean(v) for v in of.values()]) for of in right.values()]))


def balanced_global(row: Mapping[str, Any], arm: str) -> float:
    """Mean over classes of the share that is right, over all clients' models."""
    result = row["result"]
    right: dict[str, list[float]] = {}
    for label, count in zip(result["labels"], result["right"][arm], strict=True):
        right.setdefault(label, []).append(int(count) / row["cell"]["clients"])
    return float(np.mean([np.mean(values) for values in right.values()]))


def accuracies(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Both accuracies on both distributions, arm by arm, and FedBiCross against each arm."""
    parts = []
    for name, scores, measure in (
        ("Own distribution", own_scores(rows), balanced_own),
        ("Global distribution", global_scores(rows), balanced_global),
    ):
        settings = tables.sites_of(scores)
        plain = [[arm, *(tables.mean_at(_of(scores[arm], s), [s]) for s in settings)] for arm in ARMS]
        balanced = [[arm, *(_measured(rows, s, arm, measure) for s in settings)] for arm in ARMS]
        parts += [f"## {name}", "Accuracy.", table(["arm", *settings], plain)]
        parts += ["Balanced accuracy.", table(["arm", *settings], balanced)]
        if differences := tables.differences_table(scores, COMPARISONS, "all images"):
            parts += ["Difference of accuracies.", differences]
    return parts


def _of(by_seed: Mapping[int, Mapping[tuple[str, str], float]], s: str) -> dict[int, Any]:
    """The seeds in which a setting is finished: an empty one is no seed of its."""
    return {seed: found for seed, found in by_seed.items() if any(site == s for site, _ in found)}


def _measured(rows: Sequence[Mapping[str, Any]], s: str, arm: str, measure: Measure) -> str:
    return mean_and_spread([measure(row, arm) for row in rows if setting(row) == s])


def helps(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every arm against training alone, on the client's own distribution, in a word."""
    scores = own_scores(rows)
    settings = tables.sites_of(scores)
    body = []
    for arm, alone in AGAINST_LOCAL:
        found = [tables.difference(scores[arm], scores[alone], [s]) for s in settings]
        body.append([arm, *("–" if f is None else f"{_word(f.low, f.high)} ({f.mean:+.3f})" for f in found)])
    return [
        "## Does it help a client at home?",
        "Accuracy on the client's own distribution, less that of the model it had before anything was "
        "uploaded. *Helps* and *harms* where the interval leaves zero out. Training on its own images after "
        f"the download is part of `{WHOLE}` and `{TUNED}`, not of `{NO_STAGE_3}` and `{FEDAVG}`. "
        f"`{LITERAL}` is FedBiCross by the letter of the paper, at these sizes.",
        table(["arm", *settings], body),
    ]


def _word(low: float, high: float) -> str:
    return "helps" if low > 0 else "harms" if high < 0 else "no difference shown"


def weights(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether w left 1/K."""
    body = []
    for row in rows:
        found = row["result"]["clusters"]
        mixing = _matrix(found)
        count = len(mixing)
        sizes = sorted(
            (list(found["assignment"].values()).count(name) for name in found["mixing"]), reverse=True
        )
        tried = found["silhouettes"]
        body.append(
            [
                setting(row),
                row["cell"]["seed"],
                count,
                "+".join(map(str, sizes)),
                f"{max(tried.values()):.3f}" if tried else "–",
                f"{_moved(mixing):.3f}",
                f"{np.diag(mixing).mean():.3f}",
                f"{1 / count:.3f}",
            ]
        )
    several = [line for line in body if line[2] != 1]
    moved = sum(float(str(line[5])) > MOVED for line in several)
    printed = max(_moved(_matrix(row["result"]["clusters as printed"])) for row in rows)
    header = ["setting", "seed", "K", "sizes", "silhouette", "max abs(w − 1/K)", "own weight", "1/K"]
    return [
        "## Did w leave 1/K?",
        f"In {moved} of {len(several)} federations with several clusters, by more than {MOVED}. "
        f"{len(body) - len(several)} have one cluster, and no w. The silhouette is the best that was found. "
        f"With the paper's literal reading (`{LITERAL}`) w moved by {printed:.1g} at most.",
        table(header, body),
    ]


def _matrix(clusters: Mapping[str, Any]) -> NDArray[np.float64]:
    """w [K, K]: how much each cluster learned from each."""
    return np.array([list(each.values()) for each in clusters["mixing"].values()])


def _moved(mixing: NDArray[np.float64]) -> float:
    """How far the entry that went farthest is from where it began."""
    return float(np.abs(mixing - 1 / len(mixing)).max())


def outside(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Picking a cluster without labels against the best in hindsight, and what needs no picking."""
    several = [row for row in rows if len(row["result"]["outside"]["accuracies"]) > 1]
    parts = [
        "## A client from outside",
        "All of its images, none of which any model was trained on. A cluster is picked from these images "
        "without their labels; labels say afterwards what each choice was worth. "
        f"{len(several)} of {len(rows)} federations have several clusters, so that there is a choice.",
    ]
    if not several:
        return parts
    settings = list(dict.fromkeys(setting(row) for row in several))
    ways = [*several[0]["result"]["outside"]["picked"], "by chance", "best in hindsight", *FOR_ANYBODY]
    body = []
    for way in ways:
        worth = {s: [_worth(row, way) for row in several if setting(row) == s] for s in settings}
        lost = [_worth(row, "best in hindsight") - _worth(row, way) for row in several]
        best = f"{np.mean([loss <= 0 for loss in lost]):.0%}"
        body.append([way, *(mean_and_spread(worth[s]) for s in settings), mean_and_spread(lost), best])
    header = ["choice", *settings, "lost to the best cluster", "as good as it"]
    return [*parts, "Accuracy, mean ± deviation over federations.", table(header, body)]


def _worth(row: Mapping[str, Any], way: str) -> float:
    found = row["result"]["outside"]
    accuracies = found["accuracies"]
    if way == "by chance":
        return float(np.mean(list(accuracies.values())))
    if way == "best in hindsight":
        return float(max(accuracies.values()))
    if way in FOR_ANYBODY:
        return float(found["anybody"]["accuracies"][way])
    return float(accuracies[found["picked"][way]])
