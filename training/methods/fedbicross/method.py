"""FedBiCross: Xia et al., FedBiCross: personalized one-shot federation for medical images, 2026.

Every hospital i uploads its model f_i once. The server puts models that answer noise alike into clusters
(Stage 1), dreams up images that each cluster's models know, and distils a model G_k per cluster from all
clusters' knowledge, how much of each being learned (Stage 2, bi-level, Alg. 1). Every hospital makes its own
model from G_k, f_i and its private data (Stage 3):

    f <- argmin CE(f, y) + 0.5 KL(G_k || f) + 0.3 KL(f_i || f)

The paper's algorithm prints Stage 3 inside the server's routine; it needs private data, so it runs at the
hospital. Classification only: the synthesis starts from a class.

By default all f_i begin alike: weights that begin apart have no average to start G_k from, and
their outputs for noise differ by seed rather than by hospital. The sites are sent a seed for it, 8 bytes.

Shared:  f_i with its batch-norm statistics, once; the number of training images; summary statistics of the
         training scans; right answers by class on validation images; once, accuracy of the cluster's and the
         personal model on test and validation images.
Stays:   images, labels, and the personal model, unless the hospital agrees to its export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from model_store.task import Task
from personalization.fedbicross.personal import personal_loss
from training.algorithm import (
    ClientResult,
    Group,
    Memory,
    ModelDraft,
    Phase,
    Plan,
    Publication,
    RoundResult,
    State,
    StepContext,
)
from training.errors import ConfigurationError, SiteFailed
from training.local.classifier import ClassCounts, logits_of, train_classifier
from training.local.images import Images
from training.local.networks import network_of, shapes_of, state_of
from training.local.site import SiteData
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.fedbicross.server import SYNTHESIS, CrossDistil
from training.methods.fedbicross.timing import time_steps
from training.methods.one_shot import COUNTS, Counted, OneShot
from training.methods.registry import Panel, register
from training.parts.export import Export
from training.parts.part import Part, Slot
from training.parts.test import Model, Predict, Test, predicting

CLUSTER = Group("cluster", "weights", "collect")


@dataclass(frozen=True)
class Personal:
    """A site's own model f, with its right answers by class, and the G_k that it was made from."""

    cluster: State = field(default_factory=dict)
    model: State = field(default_factory=dict)
    counts: State = field(default_factory=dict)


class Personalise(Part):
    """Stage 3, at every site."""

    def __init__(self, method: FedBiCross) -> None:
        self.method = method
        self.own = Slot("personal", Personal())
        self.counted = Slot("counts", Counted())

    @override
    def plan(self) -> Plan:
        return (
            Phase(
                "personalise",
                1,
                (CLUSTER,),
                (COUNTS,),
                self.step,
                self.keep,
                self.send,
                self.method.expect_counts,
                everyone=True,
            ),
        )

    def send(self, server: Memory, site: str) -> Mapping[str, State]:
        """G_k of the site's cluster. A site without one is sent the first."""
        clusters = self.method.distil.slot.read(server)
        return {CLUSTER.name: clusters.models[clusters.assignment.get(site, "1")]}

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData[Images]
    ) -> ClientResult:
        """Make f from G_k. The teachers' answers to images that stay as they are, are asked for once.

        Raises SiteFailed at a site that did not upload.
        """
        cluster, own = received[CLUSTER.name], self.method.upload.uploaded(memory)
        config, spec, classes = self.method.config, self.method.network, self.method.classes
        teacher = network_of(spec, cluster, context.device)
        counts = ClassCounts.of(teacher, data.val, classes)
        images = torch.from_numpy(data.train.images)
        from_cluster = logits_of(teacher, images)
        from_own = logits_of(network_of(spec, own, context.device), images)

        def loss(logits: Tensor, _: Tensor, labels: Tensor, indices: Tensor) -> Tensor:
            return personal_loss(
                logits,
                labels,
                from_cluster[indices],
                from_own[indices],
                cluster_weight=config.cluster_weight,
                own_weight=config.own_weight,
                temperature=config.personal_temperature,
            )

        network = network_of(spec, cluster, context.device)
        metrics = {}
        if config.personal_epochs:
            metrics["loss"] = train_classifier(
                network, data.train, config.personal(), context.generator("train"), loss
            )
        personal = ClassCounts.of(network, data.val, classes)
        return ClientResult(
            {COUNTS.name: counts.state()},
            float(len(data.train)),
            self.own.write(memory, Personal(cluster, state_of(network), personal.state())),
            {**metrics, **counts.metrics("cluster_val_"), **personal.metrics("personal_val_")},
        )

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the right answers of the cluster models."""
        return self.counted.write(server, Counted.of(result))

    def exported(self, memory: Memory) -> tuple[State, ClassCounts]:
        """The personal model and its right answers. Raises SiteFailed at a site that has none."""
        self.method.upload.uploaded(memory)
        if not self.own.holds(memory):
            raise SiteFailed("it has no personal model: it dropped out of the phase 'personalise'")
        own = self.own.read(memory)
        return own.model, ClassCounts(**own.counts)


class ExportCounted(Export):
    """The export, in which the score is the right answers by class."""

    score = replace(COUNTS, name="personal_counts")

    def __init__(self, method: FedBiCross) -> None:
        own, test = method.personalise.exported, method.test
        super().__init__(own, method.whole, test, watched="personal_val_", published="val_")
        self.method = method

    @override
    def expect(self, server: Memory) -> Mapping[str, State]:
        """An exported model is a network of the task, with counts of its classes."""
        counts = self.method.expect_counts(server)[COUNTS.name]
        return {**super().expect(server), self.score.name: counts}

    @override
    def received(self, state: State) -> ClassCounts:
        return ClassCounts(**state)


@register("fedbicross", FedBiCrossConfig, kinds=("classification",), panels=(Panel("clusters"),))
class FedBiCross(OneShot):
    """One upload per hospital, clusters and their models on the server, one personal model back.

    Raises ConfigurationError for a `synthesis_batch` in which not every class of the task has an image.
    """

    keeps = True

    def __init__(self, config: FedBiCrossConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: FedBiCrossConfig = config
        if config.synthesis_batch < self.classes:
            raise ConfigurationError(
                f"method fedbicross does not fit the task '{task.name}'",
                [
                    f"synthesis_batch: expected at least {self.classes}, one image for each class, found "
                    f"{config.synthesis_batch}: of some classes none would be dreamt up; raise it"
                ],
            )
        self.distil = CrossDistil(self, config)
        self.personalise = Personalise(self)
        self.test = Test(task, self.answers, ("cluster", "personal"))
        self.export = ExportCounted(self)
        self.parts = (self.upload, self.distil, self.personalise, self.test, self.export)

    def whole(self, server: Memory) -> State:
        """An exported model is a whole network."""
        return shapes_of(self.network)

    def answers(
        self, context: StepContext, received: Mapping[str, State], memory: Memory
    ) -> Mapping[Model, Predict | None]:
        """The models that a site tests: G_k and its own; neither travels again."""
        own = self.personalise.own.read(memory)

        def answer(state: State) -> Predict | None:
            network = network_of(self.network, state, context.device) if state else None
            return predicting(network, self.config.batch_size) if network else None

        return {"cluster": answer(own.cluster), "personal": answer(own.model)}

    def forecast(self, images: int, sites: int, threads: int) -> Mapping[str, float]:
        """Seconds of one round of every phase on this machine: `training.progress.forecast`.

        Batches of local training and steps of the synthesis are counted, and one of each is timed. Two
        clusters are assumed. Clustering, test and export count as nothing: they take seconds.
        """
        config = self.config
        count = min(config.clusters or (2 if sites > 2 else 1), sites)
        image, step = time_steps(self, config, sites, count, threads)
        return {
            "local": config.local_epochs * images * image,
            "cluster": 0.0,
            SYNTHESIS: config.steps / self.distil.chunks * step,
            "personalise": config.personal_epochs * images * image,
            "test": 0.0,
            "export": 0.0,
        }

    @override
    def longest_part(self, sites: int) -> str:
        """The last cluster's: there are at most as many as sites."""
        return f"cluster-{sites}"

    @override
    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:
        """The cluster models, who belongs to which, what each was distilled from; personal models."""
        clusters, counted = self.distil.slot.read(server), self.personalise.counted.read(server)
        names, drafts = list(clusters.models), []
        for name, model in clusters.models.items():
            sites = clusters.members(name)
            scores = counted.metrics(sites) | self.test.metrics(server, "cluster", sites)
            drafts.append(ModelDraft("cluster", self.network, model, metrics=scores, cluster=name))
        rows = zip(names, clusters.mixing, strict=True)
        return Publication(
            "clusters",
            (*drafts, *self.export.drafts(server, self.network)),
            composite={
                "assignment": clusters.assignment,
                "mixing": {name: dict(zip(names, row, strict=True)) for name, row in rows},
                "silhouettes": clusters.silhouettes,
            },
            exhibits=Memory(clusters.exhibits, {"log": clusters.log}),
        )
