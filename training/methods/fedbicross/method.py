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
from dataclasses import replace

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
    ServerStage,
    State,
    StepContext,
)
from training.errors import ConfigurationError, SiteFailed
from training.local.classifier import ClassCounts, counts_from, logits_of, train_classifier
from training.local.images import Images
from training.local.networks import network_of, state_of
from training.local.site import SiteData
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.fedbicross.server import chunks, cluster_models, synthesise
from training.methods.fedbicross.timing import time_steps
from training.methods.one_shot import COUNTS, MODEL, OneShot
from training.methods.registry import Panel, register
from training.parts.describe import described
from training.parts.test import (
    Model,
    Predict,
    predicting,
    score_once,
    scored_metrics,
    scoring_phase,
)
from training.state_tree import join, part

CLUSTER = Group("cluster", "weights", "collect")
PERSONAL = Group("personal", "weights", "collect")
PERSONAL_COUNTS = replace(COUNTS, name="personal_counts")
SYNTHESIS = "synthesise+bilevel"


@register("fedbicross", FedBiCrossConfig, kinds=("classification",), panels=(Panel("clusters"),))
class FedBiCross(OneShot):
    """One upload per hospital, clusters and their models on the server, one personal model back.

    Raises ConfigurationError for a `synthesis_batch` in which not every class of the task has an image.
    """

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

    @override
    def plan(self) -> Plan:
        """Train and upload; cluster; synthesise and distil; personalise; test; export what hospitals agree
        to."""
        steps = self.config.epochs * chunks(self.config)
        return (
            self.local_phase(),
            ServerStage("cluster", 1, self.cluster),
            ServerStage(SYNTHESIS, steps, self.synthesise),
            Phase(
                "personalise",
                1,
                (CLUSTER,),
                (COUNTS,),
                self.personalise,
                self.keep_counts,
                self.send_cluster,
                self.expect_counts,
                everyone=True,
            ),
            scoring_phase(self.task, (), self.score_step, models=("cluster", "personal")),
            Phase(
                "export",
                1,
                (),
                (PERSONAL, PERSONAL_COUNTS),
                self.export,
                self.keep_exported,
                expected=self.expect_personal,
                consent=True,
                everyone=True,
            ),
        )

    def expect_personal(self, server: Memory) -> Mapping[str, State]:
        """An exported model is a network of the task, with counts of its classes."""
        model, counts = self.expect_model(server)[MODEL.name], self.expect_counts(server)[COUNTS.name]
        return {PERSONAL.name: model, PERSONAL_COUNTS.name: counts}

    def send_cluster(self, server: Memory, site: str) -> Mapping[str, State]:
        """G_k of the site's cluster. A site without one is sent the first."""
        return {CLUSTER.name: part(server.tensors, f"cluster/{server.facts['assignment'].get(site, '1')}")}

    # ------------------------------------------------------------------ at a site

    def personalise(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData[Images]
    ) -> ClientResult:
        """Stage 3, from G_k. The teachers' answers to images that stay as they are, are asked for once.

        Raises SiteFailed at a site that did not upload.
        """
        cluster, own = received[CLUSTER.name], _own(memory)
        config = self.config
        teacher = network_of(self.network, cluster, context.device)
        counts = ClassCounts.of(teacher, data.val, self.classes)
        images = torch.from_numpy(data.train.images)
        from_cluster = logits_of(teacher, images)
        from_own = logits_of(network_of(self.network, own, context.device), images)

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

        network = network_of(self.network, cluster, context.device)
        metrics = {}
        if config.personal_epochs:
            metrics["loss"] = train_classifier(
                network, data.train, config.personal(), context.generator("train"), loss
            )
        personal = ClassCounts.of(network, data.val, self.classes)
        facts = {"counts": [personal.right.tolist(), personal.images.tolist()]}
        return ClientResult(
            {COUNTS.name: counts.state()},
            float(len(data.train)),
            Memory(join({"own": own, "cluster": cluster, "personal": state_of(network)}), facts),
            {**metrics, **counts.metrics("cluster_val_"), **personal.metrics("personal_val_")},
        )

    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData[Images]
    ) -> ClientResult:
        """Score G_k and the personal model on the test images; neither travels again."""
        models: tuple[Model, ...] = ("cluster", "personal")
        states = {model: part(memory.tensors, model) for model in models}
        answers: dict[Model, Predict | None] = {
            model: predicting(network_of(self.network, state, context.device), self.config.batch_size)
            if state
            else None
            for model, state in states.items()
        }
        return score_once(answers, data, self.task)

    def export(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData[Images]
    ) -> ClientResult:
        """Send the personal model. Raises SiteFailed at a site that has none."""
        _own(memory)
        personal = part(memory.tensors, "personal")
        if not personal:
            raise SiteFailed("it has no personal model: it dropped out of the phase 'personalise'")
        counts = counts_from(memory.facts["counts"])
        return ClientResult(
            {PERSONAL.name: personal, PERSONAL_COUNTS.name: counts.state()},
            weight=1.0,
            metrics=counts.metrics("personal_val_"),
        )

    # ------------------------------------------------------------------ at the server

    def keep_counts(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the right answers of the cluster models, by site."""
        counts = _as_facts(result.collected.get(COUNTS.name, {}))
        return Memory(server.tensors, {**server.facts, "counts": counts})

    def keep_exported(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the personal models, by site."""
        personal = {
            f"personal/{site}": dict(state) for site, state in result.collected[PERSONAL.name].items()
        }
        counts = _as_facts(result.collected.get(PERSONAL_COUNTS.name, {}))
        facts = {**server.facts, "exported": list(result.weights), "personal_counts": counts}
        return Memory({**server.tensors, **join(personal)}, facts)

    def cluster(self, context: StepContext, server: Memory) -> Memory:
        """Stage 1."""
        return cluster_models(self.config, self.network, self.shape, context, server)

    def synthesise(self, context: StepContext, server: Memory) -> Memory:
        """Stage 2, a few steps at a time."""
        return synthesise(self.config, self.network, self.shape, self.classes, context, server)

    def forecast(self, images: int, sites: int, threads: int) -> Mapping[str, float]:
        """Seconds of one round of every phase on this machine: `training.progress.forecast`.

        Batches of local training and steps of the synthesis are counted, and one of each is timed. Two
        clusters are assumed. Clustering, test and export count as nothing: they take seconds.
        """
        config = self.config
        count = min(config.clusters or (2 if sites > 2 else 1), sites)
        image, step = time_steps(config, self.network, self.shape, self.classes, sites, count, threads)
        return {
            "local": config.local_epochs * images * image,
            "cluster": 0.0,
            SYNTHESIS: config.steps / chunks(config) * step,
            "personalise": config.personal_epochs * images * image,
            "test": 0.0,
            "export": 0.0,
        }

    @override
    def longest_part(self, sites: int) -> str:
        """The last cluster's: there are at most as many as sites."""
        return f"cluster-{sites}"

    @override
    def publication(self, server: Memory) -> Publication:
        """The cluster models, who belongs to which, what each was distilled from; personal models."""
        facts = server.facts
        names = sorted(set(facts["assignment"].values()), key=int)
        counts = {site: counts_from(found) for site, found in facts.get("counts", {}).items()}
        drafts = []
        for name in names:
            members = [
                counts[site] for site, k in facts["assignment"].items() if k == name and site in counts
            ]
            total = sum(members[1:], members[0]).metrics("val_") if members else {}
            own = [site for site, k in facts["assignment"].items() if k == name]
            total |= scored_metrics(facts, self.task, "cluster", own)
            weights = part(server.tensors, f"cluster/{name}")
            drafts.append(ModelDraft("cluster", self.network, weights, metrics=total, cluster=name))
        personal = {site: counts_from(c) for site, c in facts.get("personal_counts", {}).items()}
        for site in facts.get("exported", ()):
            metrics = personal[site].metrics("val_") if site in personal else {}
            metrics |= scored_metrics(facts, self.task, "personal", (site,))
            weights = part(server.tensors, f"personal/{site}")
            drafts.append(ModelDraft("inside", self.network, weights, site, metrics))
        rows = server.tensors["mixing"].tolist()
        mixing = {name: dict(zip(names, row, strict=True)) for name, row in zip(names, rows, strict=True)}
        exhibits = {name: server.tensors[f"exhibit/{name}"] for name in names}
        return Publication(
            "clusters",
            tuple(drafts),
            statistics=described(facts),
            composite={
                "assignment": facts["assignment"],
                "mixing": mixing,
                "silhouettes": facts["silhouettes"],
            },
            exhibits=Memory(exhibits, {"log": facts["log"]}),
        )


def _own(memory: Memory) -> State:
    """The model that a site uploaded. Raises SiteFailed without one."""
    own = part(memory.tensors, "own")
    if not own:
        raise SiteFailed("it has no model of its own: it dropped out of the phase 'local'")
    return own


def _as_facts(counts: Mapping[str, State]) -> dict[str, list[list[float]]]:
    return {site: [state["right"].tolist(), state["images"].tolist()] for site, state in counts.items()}
