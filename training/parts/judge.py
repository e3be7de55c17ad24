"""The comparison of a version with the one that it started from, on the members' validation patients.

Both are scored at the sites, patient by patient; the sums of a site leave it. Nothing is chosen by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from scipy.special import stdtrit

from model_store.task import Task
from personalization.metrics import metrics_of
from training.algorithm import (
    ClientResult,
    ClientStep,
    Group,
    Memory,
    Phase,
    RoundResult,
    SiteSize,
    State,
    StepContext,
)
from training.local.data import Data
from training.local.scores import AnySiteData
from training.parts.test import Predict

JUDGE = "judge"
PARENT = Group("parent", "weights")
_CERTAINTY = 0.95
# An upload: number, sums of the parent's and the version's scores, of their difference and its square.
_ROWS = 5


def check_judged(state: State, size: SiteSize) -> None:
    """Raise ValueError for sums that scores in 0..1 of so many patients or images cannot have."""
    sums = state["sums"]
    if sums.shape != (_ROWS,) or sums.dtype != torch.float64:
        raise ValueError(
            f"expected sums of shape [{_ROWS}] and float64, found {list(sums.shape)} {sums.dtype}"
        )
    count, before, after, change, squares = sums.tolist()
    most = size.scored
    fits = all(map(math.isfinite, sums.tolist())) and count == int(count) and 0 <= before <= count
    fits = fits and 0 <= after <= count and abs(change - (after - before)) <= 1e-6 * max(count, 1)
    if not fits or not 0 <= squares <= count or (most is not None and count > most):
        raise ValueError(f"expected sums of scores in 0..1, of {most} at most, found {sums.tolist()}")


JUDGED = Group("judged", "statistics", "collect", essential=False, check=check_judged)


def judging_phase(
    downloads: tuple[Group, ...],
    client_step: ClientStep,
    broadcast: Callable[[Memory, str], Mapping[str, State]],
) -> Phase:
    """The phase. `broadcast` sends, as `downloads`, the parent and what `client_step` compares with it."""
    return Phase(JUDGE, 1, downloads, (JUDGED,), client_step, keep_judged, broadcast, everyone=True)


def judge_once(parent: Predict, version: Predict | None, data: AnySiteData, classes: int) -> ClientResult:
    """A site's part: nothing where it has no version, or no patients that are not trained on."""
    if version is None or data.val is data.all_train or not len(data.val):
        return ClientResult({JUDGED.name: {}}, 1.0)
    before, after = (_scores(answer, data.val, classes) for answer in (parent, version))
    # A patient without a target counts 1 where one finds none and the other does.
    pairs = [
        tuple(1.0 if math.isnan(score) else score for score in pair)
        for pair in zip(before, after, strict=True)
        if not all(map(math.isnan, pair))
    ]
    found = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    change = found[:, 1] - found[:, 0]
    sums = [torch.tensor(float(len(pairs))), *found.sum(dim=0), change.sum(), (change**2).sum()]
    return ClientResult({JUDGED.name: {"sums": torch.stack([each.double() for each in sums])}}, 1.0)


def keep_judged(context: StepContext, server: Memory, result: RoundResult) -> Memory:  # noqa: ARG001
    """The server step: its memory with the sums of the sites that let them out."""
    found = {
        site: state["sums"].tolist() for site, state in result.collected.get(JUDGED.name, {}).items() if state
    }
    return Memory(server.tensors, {**server.facts, JUDGED.name: found})


def judgement(facts: Mapping[str, Any], task: Task, parent: str | None) -> dict[str, Any]:
    """For a publication's details: the change against the parent at each site and of all patients together.

    `low` and `high` bound the mean change with 95 % certainty (Student's t over patients, or over images of
    a classification); None for fewer than two. Empty where nothing was judged.
    """
    sums = facts.get(JUDGED.name)
    if not sums:
        return {}
    total = torch.tensor(list(sums.values()), dtype=torch.float64).sum(dim=0).tolist()
    return {
        JUDGED.name: {
            "parent": parent,
            "metric": metrics_of(task.kind)[0].name,
            "sites": {site: _change(found) for site, found in sums.items()},
            "all": _change(total),
        }
    }


def _change(sums: list[float]) -> dict[str, Any]:
    count, before, after, change, squares = sums
    if not count:
        return {"count": 0, "parent": None, "version": None, "change": None, "low": None, "high": None}
    mean = change / count
    low = high = None
    if count >= 2:
        variance = max(squares - count * mean**2, 0.0) / (count - 1)
        margin = float(stdtrit(count - 1, (1 + _CERTAINTY) / 2)) * math.sqrt(variance / count)
        low, high = mean - margin, mean + margin
    return {
        "count": int(count),
        "parent": before / count,
        "version": after / count,
        "change": mean,
        "low": low,
        "high": high,
    }


@torch.no_grad()
def _scores(answer: Predict, data: Data, classes: int) -> list[float]:
    """Dice of every patient, NaN without target and prediction; of images with classes, 1 where right."""
    return list(data.scores(answer(data), classes).values())
