"""The phase in which sites score the models of the run, once, on the patients that they kept for testing.

A site scores the published model that all share, that of its cluster, and its own: as many as the method
makes. Its own model is scored at the site, whether or not it consents to its export; only sums and counts
leave, and each patient's scores stay in the site's memory. Nothing is chosen by these scores. Beside them are
those of the validation patients, by which the model was chosen, label by label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from model_store.task import Task
from personalization.metrics import metrics_of
from personalization.surfaces import surface_distances
from training.algorithm import (
    Algorithm,
    ClientResult,
    Group,
    Memory,
    Phase,
    Plan,
    Publication,
    RoundResult,
    SiteSize,
    State,
    StepContext,
    send_nothing,
)
from training.engine.history import TEST, check_finals
from training.local.data import Answers, Data
from training.local.scores import check_score, predict
from training.local.site import SiteData
from training.paired import PairedSums
from training.parts.part import Added, Part, Slot

Split = Literal["test", "val"]
SPLITS: tuple[Split, ...] = get_args(Split)
# Which model: one that all sites share, that of a site's cluster, or the site's own.
Model = Literal["", "cluster", "personal"]
MODELS: tuple[Model, ...] = get_args(Model)
# (images and their answers) -> the class index of every pixel [N, H, W], or of every image [N], uint8; of
# volumes [X, Y, Z] each
Predict = Callable[[Data], Answers]


# (context, received groups, the site's memory) -> the models that are scored; None where the site has none
Models = Callable[[StepContext, Mapping[str, State], Memory], Mapping[Model, Predict | None]]


@dataclass(frozen=True)
class FinalScores:
    """The scores [2, 1 + L, 2] of each kind of model, by site, of the sites that let them out."""

    scores: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)

    @classmethod
    def of(cls, result: RoundResult) -> FinalScores:
        """What a round says, of which `score_once` made the uploads."""
        found = {
            model: {
                site: state["scores"].tolist()
                for site, state in result.collected.get(_group(model), {}).items()
                if state
            }
            for model in MODELS
        }
        return cls({model: sent for model, sent in found.items() if sent})

    def metrics(
        self, task: Task, model: Model = "", sites: Collection[str] | None = None
    ) -> dict[str, float]:
        """The scores of a model at all sites together, or at some, by the names of `_metrics` without its
        own."""
        tensors = [
            torch.tensor(scores, dtype=torch.float64)
            for site, scores in self.scores.get(model, {}).items()
            if sites is None or site in sites
        ]
        if not tensors:
            return {}
        return _metrics(torch.stack(tensors).sum(dim=0), task)


@dataclass(frozen=True)
class Tested:
    """What a site keeps: by model, each test patient's score, or those of its images; None: undefined."""

    scores: Mapping[str, Mapping[str, tuple[float | None, ...]]] = field(default_factory=dict)


TESTED = Slot("tested", Tested())


class Test(Part):
    """One phase. `send` sends, as `downloads`, what `answers` needs to answer with each of `models`."""

    __test__ = False  # not pytest's

    def __init__(
        self,
        task: Task,
        answers: Models,
        models: tuple[Model, ...] = ("",),
        downloads: tuple[Group, ...] = (),
        send: Callable[[Memory, str], Mapping[str, State]] = send_nothing,
    ) -> None:
        self.task = task
        self.answers = answers
        self.models = models
        self.downloads = downloads
        self.send = send
        self.slot = Slot(TEST, FinalScores())

    @override
    def plan(self) -> Plan:
        check = _Check(len(self.task.labels))
        scores = tuple(
            Group(_group(model), "statistics", "collect", essential=False, check=check)
            for model in self.models
        )
        return (
            Phase(
                TEST,
                1,
                self.downloads,
                scores,
                self.step,
                self.keep,
                self.send,
                everyone=True,
                check=check.figures,
            ),
        )

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Score the models on the test patients."""
        models = self.answers(context, received, memory)
        return score_once(models, data, self.task, memory)

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the scores."""
        return self.slot.write(server, FinalScores.of(result))

    def metrics(self, server: Memory, model: Model, sites: Collection[str] | None = None) -> dict[str, float]:
        """The scores of a model at all sites together, or at some."""
        return self.slot.read(server).metrics(self.task, model, sites)

    @override
    def publish(self, server: Memory) -> Added:
        return Added(self.metrics(server, ""))


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


def predicting(network: nn.Module, batch_size: int) -> Predict:
    """The answers of a network, for `score_once`."""
    return partial(predict, network, batch_size=batch_size)


def score_once(
    models: Mapping[Model, Predict | None], data: SiteData, task: Task, memory: Memory | None = None
) -> ClientResult:
    """A site's part: the scores of each model on its test patients, and on validation patients that are not
    trained on. A model that the site does not have, None, has no scores.

    Each model after the first is also compared with the first one, test patient by test patient. The site's
    `memory` keeps the scores of each test patient.
    """
    labels = _classes_of(task)
    splits: list[Data | None] = [data.test, data.val if data.val is not data.all_train else None]
    uploads: dict[str, State] = {}
    metrics: dict[str, float] = {}
    tested: dict[Model, list[Sequence[float]]] = {}
    kept: dict[str, Mapping[str, tuple[float | None, ...]]] = {}
    for model, answer in models.items():
        uploads[_group(model)] = {}
        if answer is not None:
            answers = [answer(each) if each is not None and len(each) else None for each in splits]
            by_patient = [_by_patient(*pair, labels) for pair in zip(answers, splits, strict=True)]
            columns = [_columns(*each, labels) for each in zip(answers, splits, by_patient, strict=True)]
            kept[model] = {
                patient: tuple(None if math.isnan(score) else score for score in found)
                for patient, found in by_patient[0].items()
            }
            scores = torch.stack([_sums(each, 1 + len(labels)) for each in columns])
            uploads[_group(model)] = {"scores": scores}
            tested[model] = columns[0]
            metrics |= _metrics(scores, task, model)
            metrics |= _surface_metrics(answers[0], data.test, labels, model)
            metrics |= _rates(answers[0], data.test, task, model)
    base, *others = models
    for model in others:
        if base in tested and model in tested:
            metrics |= _paired_metrics(tested[base], tested[model], task, model)
    return ClientResult(uploads, 1.0, TESTED.write(memory or Memory(), Tested(kept)), metrics)


def _group(model: Model) -> str:
    return f"{model}_tested" if model else "tested"


def _classes_of(task: Task) -> dict[str, tuple[int, ...]]:
    return {label: task.label_classes(label) for label in task.labels}


def _by_patient(
    predicted: Answers | None, examples: Data | None, labels: Mapping[str, tuple[int, ...]]
) -> dict[str, list[float]]:
    """The scores of all foreground, or of images, by patient."""
    if examples is None or predicted is None:
        return {}
    classes = 1 + max((max(members) for members in labels.values()), default=0)
    return examples.patient_scores(predicted, classes)


def _columns(
    predicted: Answers | None,
    examples: Data | None,
    by_patient: Mapping[str, Sequence[float]],
    labels: Mapping[str, tuple[int, ...]],
) -> list[Sequence[float]]:
    """The scores of each patient: of all foreground, or 1 of an image that is right, and of each label.

    NaN of a patient of whom neither mask nor prediction has the label. Nothing of no patients.
    """
    if examples is None or predicted is None:
        return []
    by_label = examples.label_scores(predicted, [*labels.values()])
    return [
        [score for found in by_patient.values() for score in found],
        *(torch.stack(by_label).T.tolist() if by_label else ()),
    ]


def _sums(columns: Sequence[Sequence[float]], rows: int) -> Tensor:
    """Sum and count [1 + L, 2] float64 of the columns; a patient counts where it has a score."""
    sums = torch.zeros(rows, 2, dtype=torch.float64)
    for row, values in enumerate(columns):
        defined = [value for value in values if not math.isnan(value)]
        sums[row] = torch.tensor([math.fsum(defined), len(defined)], dtype=torch.float64)
    return sums


def _paired_metrics(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], task: Task, model: Model
) -> dict[str, float]:
    """What `model` changes on the same test patients, of all foreground and of each label.

    `MODEL_test_paired_n` is their number, `…_before` the mean score of the first model, `…_change` the mean
    change, and `…_squares` the mean of its square; `/LABEL` of a label.
    """
    metrics: dict[str, float] = {}
    for name, *columns in zip(_suffixes(task), before, after, strict=False):
        sums = PairedSums.of(*columns)
        if sums.count:
            of = f"{model}_test_paired_"
            metrics[f"{of}n{name}"] = sums.count
            for what in ("before", "change", "squares"):
                metrics[f"{of}{what}{name}"] = getattr(sums, what) / sums.count
    return metrics


def _suffixes(task: Task) -> list[str]:
    """The ends of names: of all labels, and of each."""
    return ["", *(f"/{label}" for label in task.labels)]


def _rates(predicted: Answers | None, examples: Data, task: Task, model: Model) -> dict[str, float]:
    """Shares of the test patients, `test_missed/LABEL`, or of the test images, `test_recall/CLASS` and
    `test_precision/CLASS`; with `_n`, as in `test_missed_n/LABEL`, the number that each is a share of.

    A patient with a label is missed where no voxel of it is found in the right place.
    """
    if predicted is None:
        return {}
    found: dict[str, list[bool]] = {}
    for answer, truth, _ in examples.beside_truth(predicted):
        for label, members in _classes_of(task).items():
            here, there = (torch.isin(each.long(), torch.tensor(members)) for each in (answer, truth))
            if there.any():
                found.setdefault(f"missed//{label}", []).append(not bool((here & there).any()))
        for index, name in enumerate(() if task.labels else task.class_names):
            right = (answer.long() == index) & (truth.long() == index)
            found[f"recall//{name}"] = right[truth.long() == index].tolist()
            found[f"precision//{name}"] = right[answer.long() == index].tolist()
    of = f"{model}_test_" if model else "test_"
    metrics: dict[str, float] = {}
    for name, values in found.items():
        if values:
            metric, _, label = name.partition("//")
            metrics[f"{of}{metric}/{label}"] = sum(values) / len(values)
            metrics[f"{of}{metric}_n/{label}"] = float(len(values))
    return metrics


def _surface_metrics(
    predicted: Answers | None, examples: Data, labels: Mapping[str, tuple[int, ...]], model: Model
) -> dict[str, float]:
    """The means over test patients of `test_hd95/LABEL`, `test_assd/LABEL` and `test_nsd/LABEL`.

    They are in millimetres, or with `_px`, as in `test_hd95_px/LABEL`, in pixels of the network's input where
    spacing is unknown. A patient's value is the mean over its scans. `test_surfaces/LABEL` is the number of
    patients in which answer and truth have the label: the others have no surface to measure.
    """
    if predicted is None or not labels:
        return {}
    by_patient: dict[tuple[str, str], list[Mapping[str, Tensor]]] = {}
    for patient, spacing, found, truth in examples.scans(predicted):
        measured = surface_distances(found, truth, [*labels.values()], spacing)
        by_patient.setdefault((patient, "" if spacing else "_px"), []).append(measured)
    metrics: dict[str, float] = {}
    of = f"{model}_" if model else ""
    for unit in dict.fromkeys(unit for _, unit in by_patient):
        scans = [own for (_, other), own in by_patient.items() if other == unit]
        for name in scans[0][0]:
            values = torch.stack([torch.stack([scan[name] for scan in own]).nanmean(dim=0) for own in scans])
            for label, column in zip(labels, values.T, strict=True):
                defined = column[~column.isnan()]
                if len(defined):
                    metrics[f"{of}test_{name}{unit}/{label}"] = float(defined.mean())
                    metrics[f"{of}test_surfaces{unit}/{label}"] = float(len(defined))
    return metrics


def _metrics(scores: Tensor, task: Task, model: Model = "") -> dict[str, float]:
    """Name the means [2, 1 + L, 2]: `test_dice`, `test_dice/LABEL`, and `test_n`, `test_n/LABEL`; so `val_`.

    Names begin with the model, such as `personal_test_dice`, where that is not the shared one. The mean over
    validation patients of all foreground is known by its own name already.
    """
    of = f"{model}_" if model else ""
    what = metrics_of(task.kind)[0].name
    found: dict[str, float] = {}
    for split, rows in zip(SPLITS, scores.tolist(), strict=True):
        for name, (total, count) in zip(_suffixes(task), rows, strict=True):
            if count:
                shown = {f"{of}{split}_{what}{name}": total / count, f"{of}{split}_n{name}": count}
                found |= shown if name or split == "test" else {f"{of}{split}_n": count}
    return found


@dataclass(frozen=True)
class _Check:
    """Raises ValueError for scores that no site of a size can have."""

    labels: int

    def __call__(self, state: State, size: SiteSize) -> None:
        if not state:
            return  # a site without such a model
        if list(state) != ["scores"]:
            raise ValueError(f"expected the tensor 'scores', found {sorted(state)}")
        scores, shape = state["scores"], (len(SPLITS), 1 + self.labels, 2)
        if scores.shape != shape:
            raise ValueError(f"expected scores of shape {shape}, found {tuple(scores.shape)}")
        for score in scores.flatten(0, 1):
            # Patients are not more than cases; images of a classification may be.
            check_score(score, size.cases if self.labels else None)

    def figures(self, metrics: Mapping[str, float], size: SiteSize) -> None:
        """The same of the metrics beside them."""
        check_finals(metrics, size.cases if self.labels else None)
