"""A cell of `one_shot`: every arm from the same uploads, and its answers to the test images.

A cell's result has strings of one character per test image, in the order of the .npz:

    labels   the class
    owners   the client that the test image belongs to: 1..N, or 0 for the client from outside
    own      per arm, the class that the owner's model answers ("-" for the outside client's images)
    right    per arm, how many of the N clients' models are right about it

It also has the number of training images of each class at every client (`clients`), the results of Stages 1
and 2, and the results of the client from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.cells import Cell
from benchmarks.harness.federate import federate, in_memory
from model_store.task import Task
from personalization.fedbicross.picking import cheapest, costs, observe, stability
from personalization.options.picking import CRITERIA
from personalization.state import State, StreamingMean
from training.algorithm import ClientResult, Memory, ModelDraft, Phase, Publication, ServerStage, StepContext
from training.data.classification import ImageSet, LabelledData, Partition, load_npz
from training.data.splits import all_for_testing
from training.engine.client import RunEnvironment
from training.methods.common.classifier_training import logits_of, train_classifier
from training.methods.common.data_statistics import describe
from training.methods.common.local_training import network_of, state_of
from training.methods.common.one_shot import MODEL, OneShot
from training.methods.common.state_tree import join, part
from training.methods.fedbicross.config import LITERAL_READING, FedBiCrossConfig
from training.methods.fedbicross.method import FedBiCross
from training.tasks import template

LOCAL, LONGER = "local-only", "local-only, trained on"
FEDAVG, TUNED = "FedAvg-1", "FedAvg-1 + fine-tuning"
ENSEMBLE, DISTILLED = "output ensemble", "one global ensemble, distilled"
NO_CLUSTERS, NO_BILEVEL, NO_STAGE_3 = "without clustering", "without bi-level", "without stage 3"
WHOLE, LITERAL, LITERAL_NO_3 = "FedBiCross", "as printed", "as printed, without stage 3"
ARMS = (
    *(LOCAL, LONGER, FEDAVG, TUNED, ENSEMBLE, DISTILLED),
    *(NO_CLUSTERS, NO_BILEVEL, NO_STAGE_3, WHOLE, LITERAL, LITERAL_NO_3),
)
# What a client from outside can use without picking a cluster.
FOR_ANYBODY = (FEDAVG, ENSEMBLE, DISTILLED)
# Site -> logits [N, K] of all test images.
Answers = dict[str, Tensor]


class Uploads(FedBiCross):
    """FedBiCross's first phase only: every hospital trains and uploads once."""

    def plan(self) -> tuple[Phase | ServerStage, ...]:
        """Train and upload."""
        return super().plan()[:1]

    def publication(self, server: Memory) -> Publication:
        """The uploads, by site."""
        sites = server.facts["sites"]
        drafts = (ModelDraft("local", self.network, part(server.tensors, f"model/{s}"), s) for s in sites)
        return Publication("uploads", tuple(drafts))


class GivenUploads(OneShot):
    """A method of one upload from given uploads, so that arms differ only in what they make of them."""

    def __init__(self, config: Any, task: Task, uploads: Mapping[str, State]) -> None:
        super().__init__(config, task)
        self._uploads = uploads

    def train_once(self, context: StepContext, seed: Tensor, data: LabelledData) -> ClientResult:  # noqa: ARG002
        """Return the given upload instead of training."""
        assert context.site is not None
        own, weight = self._uploads[context.site], float(len(data.train))
        return ClientResult(
            {MODEL.name: own, **describe(data, weight).uploads}, weight, Memory(join({"own": own}))
        )


class FromUploads(GivenUploads, FedBiCross):
    """FedBiCross from given uploads."""


def compute(folder: Path, device: str, cell: Cell, work: Path) -> dict[str, Any]:
    """The result of a cell."""
    task, name = template(cell["set"]), cell["set"]
    partition = Partition(cell["clients"] + 1, cell["alpha"], cell["seed"])
    *inside, outside = load_npz(folder / f"{name}.npz", task, partition).sites
    data = {site.name: LabelledData.load(site, task) for site in inside}
    study = Study(cell, task, data, device, work)
    tests = Examined.of([*(own.test for own in data.values()), LabelledData.load(outside, task).test])
    strange = LabelledData.load(all_for_testing(outside), task).test
    return {
        "clients": {site: per_class(torch.from_numpy(own.train.labels), task) for site, own in data.items()},
        "labels": digits(tests.labels),
        "owners": digits(tests.owners),
        **strings(study.answers(tests.images), tests.labels, tests.owners),
        "clusters": clusters_of(study.whole),
        "clusters as printed": clusters_of(study.literal),
        "synthesis": study.ends_of_trajectories(),
        "outside": study.outside(torch.from_numpy(strange.images), torch.from_numpy(strange.labels)),
    }


@dataclass(frozen=True)
class Examined:
    """All test images [N, C, H, W] in the order of the .npz, labels [N], and owners [N]: 1..K, 0 outside."""

    images: Tensor
    labels: Tensor
    owners: Tensor

    @classmethod
    def of(cls, parts: Sequence[ImageSet]) -> Examined:
        """Combine the parts of all clients; the last one is the client from outside."""
        cases = [case for part in parts for case in part.cases]
        order = sorted(range(len(cases)), key=cases.__getitem__)
        numbers = [*range(1, len(parts)), 0]
        owners = [number for number, part in zip(numbers, parts, strict=True) for _ in part.cases]
        return cls(
            torch.from_numpy(np.concatenate([part.images for part in parts]))[order],
            torch.from_numpy(np.concatenate([part.labels for part in parts]))[order],
            torch.tensor(owners)[order],
        )


class Study:
    """All models of a cell, trained on construction or read from an earlier process's checkpoints."""

    def __init__(
        self, cell: Cell, task: Task, data: Mapping[str, LabelledData], device: str, work: Path
    ) -> None:
        self.data = data
        self._cell, self._task, self._work = cell, task, work
        self._around = RunEnvironment(cell["seed"], device)
        self._device = torch.device(device)
        self.config = FedBiCrossConfig(**cell["method"])
        self._network = FedBiCross(self.config, task).network
        uploads = self._run(Uploads(self.config, task), "uploads")
        self.uploads = {draft.site: dict(draft.weights) for draft in uploads.models if draft.site}
        self.whole = self._from_uploads("whole")
        if len(set(self.whole.composite["assignment"].values())) == 1:
            # With one cluster there is nothing to leave out: these runs would be identical.
            self.unclustered = self.flat = self.whole
        else:
            self.unclustered = self._from_uploads("unclustered", clusters=1)
            self.flat = self._from_uploads("flat", bilevel=False)
        self.literal = self._from_uploads("literal", **LITERAL_READING)
        self.average = averaged(self.uploads, {site: len(own.train) for site, own in data.items()})
        self.tuned = {site: self._train_on(site, self.average) for site in data}
        self.longer = {site: self._train_on(site, self.uploads[site]) for site in data}

    def _run(self, algorithm: FedBiCross, name: str) -> Publication:
        identity = {"cell": dict(self._cell), "run": name, "method": algorithm.config.model_dump(mode="json")}
        outcome = federate(algorithm, in_memory(self.data), self._around, self._work / name, identity)
        return algorithm.publication(outcome.server)

    def _from_uploads(self, name: str, **changes: Any) -> Publication:
        config = self.config.model_copy(update=changes)
        return self._run(FromUploads(config, self._task, self.uploads), name)

    def _train_on(self, site: str, start: State) -> State:
        """A model trained further like in Stage 3, as long and with the same draws, by cross-entropy only."""
        network = network_of(self._network, start, self._device)
        draw = self._around.context("tune", 0, 1, site).generator("train")
        if self.config.personal_epochs:
            train_classifier(network, self.data[site].train, self.config.personal(), draw)
        return state_of(network)

    def _logits(self, state: Mapping[str, Tensor], images: Tensor) -> Tensor:
        return logits_of(network_of(self._network, state, self._device), images).cpu()

    def answers(self, images: Tensor) -> dict[str, Answers]:
        """Per arm and client, logits of some images."""

        def of(models: Mapping[str, State]) -> Answers:
            return {site: self._logits(models[site], images) for site in self.data}

        def of_clusters(publication: Publication) -> Answers:
            groups = cluster_models(publication)
            by_group = {name: self._logits(state, images) for name, state in groups.items()}
            return {site: by_group[publication.composite["assignment"][site]] for site in self.data}

        anybody = self._for_anybody(images)
        alike = {arm: dict.fromkeys(self.data, logits) for arm, logits in anybody.items()}
        return {
            LOCAL: of(self.uploads),
            LONGER: of(self.longer),
            FEDAVG: alike[FEDAVG],
            TUNED: of(self.tuned),
            ENSEMBLE: alike[ENSEMBLE],
            DISTILLED: alike[DISTILLED],
            NO_CLUSTERS: of(personal_models(self.unclustered)),
            NO_BILEVEL: of(personal_models(self.flat)),
            NO_STAGE_3: of_clusters(self.whole),
            WHOLE: of(personal_models(self.whole)),
            LITERAL: of(personal_models(self.literal)),
            LITERAL_NO_3: of_clusters(self.literal),
        }

    def _for_anybody(self, images: Tensor) -> Answers:
        """Logits of some images, per arm with one answer for every client, the one from outside included."""
        together = torch.stack([self._logits(state, images) for state in self.uploads.values()])
        return {
            FEDAVG: self._logits(self.average, images),
            ENSEMBLE: together.mean(dim=0),
            DISTILLED: self._logits(cluster_models(self.unclustered)["1"], images),
        }

    def ends_of_trajectories(self) -> list[dict[str, Any]]:
        """The last steps of every trajectory: means of the losses, and w."""
        log = self.whole.exhibits.facts["log"]
        return [entry for entry in log if entry["step"] % self.config.steps == 0]

    def outside(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """Every cluster's cost by each criterion, without labels, and its accuracy, with labels."""
        observed = {
            name: observe(network_of(self._network, state, self._device), images)
            for name, state in cluster_models(self.whole).items()
        }
        found = {criterion: costs(criterion, observed) for criterion in CRITERIA}
        anybody = self._for_anybody(images)
        measures = {"accuracies": accuracy, "balanced": balanced_accuracy}
        one_by_one = torch.arange(len(images))
        draw = torch.Generator().manual_seed(0)
        return {
            "images": per_class(labels, self._task),
            **{
                what: {name: measure(own.answers, labels) for name, own in observed.items()}
                for what, measure in measures.items()
            },
            "costs": {c: {name: round(v, 6) for name, v in each.items()} for c, each in found.items()},
            "picked": {criterion: cheapest(each) for criterion, each in found.items()},
            "stability": stability(CRITERIA[0], observed, one_by_one, draw),
            "anybody": {
                what: {arm: measure(logits, labels) for arm, logits in anybody.items()}
                for what, measure in measures.items()
            },
        }


def averaged(models: Mapping[str, State], images: Mapping[str, int]) -> State:
    """One round of FedAvg: w <- sum_k (n_k / n) w_k, including batch norm's running statistics."""
    mean = StreamingMean()
    for site, state in models.items():
        mean.add(state, float(images[site]), f"site {site}")
    return mean.result()


def cluster_models(publication: Publication) -> dict[str, State]:
    """G_k by the cluster's name."""
    return {draft.cluster: dict(draft.weights) for draft in publication.models if draft.cluster is not None}


def clusters_of(publication: Publication) -> dict[str, Any]:
    """The assignment to clusters, the silhouettes of the tried numbers of clusters, and the learned w."""
    return {name: publication.composite[name] for name in ("assignment", "silhouettes", "mixing")}


def personal_models(publication: Publication) -> dict[str, State]:
    """Stage 3's models by site."""
    return {draft.site: dict(draft.weights) for draft in publication.models if draft.site is not None}


def accuracy(answers_NK: Tensor, labels_N: Tensor) -> float:
    """The share of right answers."""
    return round(float((answers_NK.argmax(dim=1) == labels_N).double().mean()), 6)


def balanced_accuracy(answers_NK: Tensor, labels_N: Tensor) -> float:
    """Mean over the present classes of the share of right answers."""
    right_N = (answers_NK.argmax(dim=1) == labels_N).double()
    shares = [float(right_N[labels_N == label].mean()) for label in set(labels_N.tolist())]
    return round(sum(shares) / len(shares), 6)


def per_class(labels: Tensor, task: Task) -> list[int]:
    """The number of images of every class, zeros included."""
    return torch.bincount(labels, minlength=len(task.classes)).tolist()


def strings(answers: Mapping[str, Answers], labels: Tensor, owners: Tensor) -> dict[str, dict[str, str]]:
    """`own` and `right` of the answers; clients are numbered from 1 in their order in the answers."""
    own, right = {}, {}
    for arm, by_site in answers.items():
        classes = torch.stack([logits.argmax(dim=1) for logits in by_site.values()])
        theirs = classes.gather(0, (owners - 1).clamp(min=0)[None])[0]
        own[arm] = "".join(
            str(c) if owner else "-" for c, owner in zip(theirs.tolist(), owners.tolist(), strict=True)
        )
        right[arm] = digits((classes == labels).sum(dim=0))
    return {"own": own, "right": right}


def digits(values: Tensor) -> str:
    """A string with one digit per value. Raises ValueError for a value above 9."""
    if len(values) and int(values.max()) > 9:
        raise ValueError(f"expected one digit each, found {int(values.max())}: at most 9 clients, 10 classes")
    return "".join(map(str, values.tolist()))
