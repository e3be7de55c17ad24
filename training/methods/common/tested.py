"""The phase in which sites score the published model, once, on the patients that they kept for testing.

Nothing is chosen by these scores. Beside them are those of the validation patients, by which the model was
chosen, label by label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from model_store.task import Task
from personalization.metrics import dice_by_label, foreground_dice
from training.algorithm import (
    Algorithm,
    ClientResult,
    ClientStep,
    Group,
    Memory,
    Phase,
    Plan,
    Publication,
    RoundResult,
    SiteSize,
    State,
    StepContext,
)
from training.data.examples import Examples
from training.engine.history import TEST
from training.methods.common.local_training import AnySiteData, check_score, predict

_SCORES = "tested"
Split = Literal["test", "val"]
SPLITS: tuple[Split, ...] = get_args(Split)


def scoring_phase(
    task: Task,
    downloads: tuple[Group, ...],
    client_step: ClientStep,
    broadcast: Callable[[Memory, str], Mapping[str, State]],
) -> Phase:
    """The phase. `broadcast` sends the published model as `downloads`; `client_step` gives `score_once`."""
    scores = Group(_SCORES, "statistics", "collect", essential=False, check=_Check(len(task.labels)))
    return Phase(TEST, 1, downloads, (scores,), client_step, keep_scores, broadcast, everyone=True)


class Untested(Algorithm):
    """A method without the phase: for a run with models that are not published, no test patient is scored."""

    def __init__(self, method: Algorithm) -> None:
        self._method = method

    @override
    def plan(self) -> Plan:
        return tuple(step for step in self._method.plan() if step.name != TEST)

    @override
    def initial(self, context: StepContext) -> Memory:
        return self._method.initial(context)

    @override
    def longest_part(self, sites: int) -> str:
        return self._method.longest_part(sites)

    @override
    def publication(self, server: Memory) -> Publication:
        return self._method.publication(server)


def score_once(network: nn.Module, data: AnySiteData, task: Task, batch_size: int) -> ClientResult:
    """A site's part: the scores on its test patients, and on validation patients that are not trained on."""
    labels = _classes_of(task)
    held_out = data.val if data.val is not data.all_train else None
    scores = torch.stack([_scores(network, each, labels, batch_size) for each in (data.test, held_out)])
    return ClientResult({_SCORES: {"scores": scores}}, 1.0, metrics=_metrics(scores, tuple(labels)))


def keep_scores(context: StepContext, server: Memory, result: RoundResult) -> Memory:  # noqa: ARG001
    """The server step: its memory with the scores of the sites that let them out."""
    sent = result.collected.get(_SCORES, {})
    scores = {site: state["scores"].tolist() for site, state in sent.items()}
    return Memory(server.tensors, {**server.facts, _SCORES: scores})


def scored_metrics(facts: Mapping[str, Any], task: Task) -> dict[str, float]:
    """The scores of all sites together, by the names of `_metrics`."""
    tensors = [torch.tensor(scores, dtype=torch.float64) for scores in facts.get(_SCORES, {}).values()]
    if not tensors:
        return {}
    return _metrics(torch.stack(tensors).sum(dim=0), tuple(_classes_of(task)))


def _classes_of(task: Task) -> dict[str, tuple[int, ...]]:
    return {label: task.label_classes(label) for label in task.labels}


@torch.no_grad()
def _scores(
    network: nn.Module,
    examples: Examples | None,
    labels: Mapping[str, tuple[int, ...]],
    batch_size: int,
) -> Tensor:
    """Sum and count [1 + L, 2] float64 of all foreground, or of right images, and of each label.

    A patient counts for a label that is in the mask or in the prediction.
    """
    sums = torch.zeros(1 + len(labels), 2, dtype=torch.float64)
    if examples is None or not len(examples):
        return sums
    predicted = predict(network, examples, batch_size)
    if not examples.has_masks:
        right = predicted == torch.from_numpy(examples.targets)
        sums[0] = torch.tensor([float(right.sum()), len(right)])
        return sums
    truth, patients = torch.from_numpy(examples.targets), examples.patients
    classes = 1 + max(max(members) for members in labels.values())
    whole = foreground_dice(predicted, truth, patients, classes)
    columns: list[Sequence[float]] = [list(whole.values())]
    by_label = torch.stack(list(dice_by_label(predicted, truth, patients, [*labels.values()]).values()))
    columns += by_label.T.tolist()
    for row, values in enumerate(columns):
        defined = [value for value in values if not math.isnan(value)]
        sums[row] = torch.tensor([math.fsum(defined), len(defined)], dtype=torch.float64)
    return sums


def _metrics(scores: Tensor, labels: Sequence[str]) -> dict[str, float]:
    """Name the means [2, 1 + L, 2]: `test_dice`, `test_dice/LABEL`, and `test_n`, `test_n/LABEL`; so `val_`.

    The mean over validation patients of all foreground is known by its own name already.
    """
    what = "dice" if labels else "accuracy"
    found: dict[str, float] = {}
    for split, rows in zip(SPLITS, scores.tolist(), strict=True):
        for name, (total, count) in zip(("", *(f"/{label}" for label in labels)), rows, strict=True):
            if count:
                shown = {f"{split}_{what}{name}": total / count, f"{split}_n{name}": count}
                found |= shown if name or split == "test" else {f"{split}_n": count}
    return found


@dataclass(frozen=True)
class _Check:
    """Raises ValueError for scores that no site of a size can have."""

    labels: int

    def __call__(self, state: State, size: SiteSize) -> None:
        if list(state) != ["scores"]:
            raise ValueError(f"expected the tensor 'scores', found {sorted(state)}")
        scores, shape = state["scores"], (len(SPLITS), 1 + self.labels, 2)
        if scores.shape != shape:
            raise ValueError(f"expected scores of shape {shape}, found {tuple(scores.shape)}")
        for score in scores.flatten(0, 1):
            # Patients are not more than cases; images of a classification may be.
            check_score(score, size.cases if self.labels else None)
