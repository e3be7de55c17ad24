"""Pick a cluster for a hospital by its unlabeled scans, and publish the cluster's model as a candidate.

Its own stage is `comparing`: every cluster's model runs on every image. Nothing is trained: the candidate is
the cluster's unchanged model under this hospital's name. The work takes seconds, so a new attempt starts
over, with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, WEIGHTS, ClustersManifest, ModelManifest
from model_store.store import Store
from model_store.task import Task
from personalization.fedbicross.picking import (
    ObservedCluster,
    cheapest,
    costs,
    observe,
    stability,
)
from personalization.gate import GateVerdict, judge
from personalization.gate.picking import PICKING, Pick
from personalization.networks import build
from personalization.networks.registry import check_origin
from personalization.options.picking import CRITERIA, Criterion, PickingOptions
from personalization.state import from_safetensors
from service.errors import AdaptationRejected
from service.settings import scan_limits
from service.worker.attempt import as_json
from service.worker.candidate import CandidateDraft
from service.worker.cohort_images import CohortImages, load_images, widened
from service.worker.cohort_job import CohortWork
from service.worker.device import device_of
from service.worker.pictures import draw_answers


@dataclass(frozen=True)
class LoadedClusters:
    """The models of an artefact of kind `clusters`, by cluster name, in order."""

    manifest: ClustersManifest
    models: Mapping[str, Artefact[ModelManifest]]
    networks: Mapping[str, nn.Module]

    @property
    def task(self) -> Task:
        """Task of the clusters."""
        return self.manifest.task

    def sites(self, cluster: str) -> list[str]:
        """List the hospitals of a cluster, sorted."""
        return sorted(site for site, found in self.manifest.assignment.items() if found == cluster)


def load_clusters(store: Store, parent: Artefact[ClustersManifest]) -> LoadedClusters:
    """Load the clusters of an artefact.

    Raises:
        StoreError: one of its models is missing, withdrawn, damaged or of another kind.
        StateError: the weights of a model do not fit its network.
    """
    found = parent.manifest.clusters
    # Numeric names sort as numbers: "10" after "9".
    names = sorted(found, key=lambda name: (len(name), name))
    models = {name: store.by_digest(found[name], ModelManifest) for name in names}
    networks = {name: _network(model) for name, model in models.items()}
    return LoadedClusters(parent.manifest, models, networks)


def _network(model: Artefact[ModelManifest]) -> nn.Module:
    check_origin(model.manifest.network.name, model.manifest.network.origin)
    network = build(model.manifest.network.name, **model.manifest.network.arguments)
    network.load_state_dict(from_safetensors(model.read(WEIGHTS)))
    return network.eval()


METHOD = "fedbicross-picking"
# Draws from fewer patients would repeat the same few.
_FEWEST_PATIENTS = 4


@dataclass(frozen=True)
class Comparison:
    """The `cluster` that was picked, the `costs` of all by every criterion, and their `answers`."""

    cluster: str
    costs: Mapping[Criterion, Mapping[str, float]]
    answers: Mapping[str, ObservedCluster]


@dataclass
class PickingWork(CohortWork[CohortImages, Comparison]):
    """Compare the clusters' models on the cohort, and pick one."""

    def __post_init__(self) -> None:
        """Load the models."""
        self.options = PickingOptions.model_validate(self.attempt.job.options)
        self.loaded = load_clusters(self.store, self.parent.expect(ClustersManifest))
        # All models have those of all training scans.
        self.known = next(model.manifest.statistics for model in self.loaded.models.values())

    @override
    def read(self) -> CohortImages:
        limits = scan_limits(self.attempt.settings)
        return load_images(
            self.files,
            self.loaded.task,
            self.known,
            limits,
            self.attempt.check_cancelled,
            include=self.includes_unlike,
        )

    @override
    def make(self, cohort: CohortImages) -> Comparison:
        """Run every model on every image."""
        attempt, device = self.attempt, device_of(self.attempt.settings)
        answers = {}
        for name, network in self.loaded.networks.items():
            attempt.set_stage("comparing", cluster=name)
            answers[name] = observe(
                network.to(device), cohort.images, self.options.seed, attempt.check_cancelled
            )
        found = {criterion: costs(criterion, answers) for criterion in CRITERIA}
        try:
            chosen = cheapest(found[self.options.criterion])
        except ValueError as error:
            raise AdaptationRejected(f"nothing can be picked: {error}") from error
        return Comparison(chosen, found, answers)

    @override
    def judge(self, cohort: CohortImages, made: Comparison) -> GateVerdict:
        """Repeat the pick on random draws of the patients."""
        self.attempt.set_stage("judging", cluster=made.cluster)
        patients = torch.from_numpy(cohort.patient_of_image)
        draw = torch.Generator().manual_seed(self.options.seed)
        enough = int(patients.max()) + 1 >= _FEWEST_PATIENTS
        stable = stability(self.options.criterion, made.answers, patients, draw) if enough else None
        return judge(
            PICKING,
            Pick(made.cluster, made.costs, stability=stable, source_warnings=cohort.kinds.share_warned),
        )

    @override
    def draw(self, cohort: CohortImages, made: Comparison) -> None:
        """Caption scans with the mean answer of all clusters, and with that of the picked one."""
        mean = torch.stack([own.answers for own in made.answers.values()]).mean(dim=0)
        answers = {"before": mean, "after": made.answers[made.cluster].answers}
        slices = [cohort.scan_of_image == scan for scan in range(len(self.files))]
        told = {when: [each[own].mean(dim=0).numpy() for own in slices] for when, each in answers.items()}
        draw_answers(self.attempt, self.files, self.loaded.task, told)

    @override
    def result(self, cohort: CohortImages, made: Comparison) -> dict[str, Any]:
        result: dict[str, Any] = as_json(
            {
                "options": self.options.model_dump(),
                "scans": len(self.files),
                "images": len(cohort.images),
                "cluster": made.cluster,
                "sites": {name: self.loaded.sites(name) for name in self.loaded.models},
                "costs": {
                    criterion: {name: round(cost, 6) for name, cost in each.items()}
                    for criterion, each in made.costs.items()
                },
            }
        )
        return result

    @override
    def draft(self, cohort: CohortImages, made: Comparison, result: dict[str, Any]) -> CandidateDraft:
        model = self.loaded.models[made.cluster]
        return CandidateDraft(
            parent=self.parent,
            model=model.manifest,
            method=METHOD,
            files={WEIGHTS: model.read(WEIGHTS), GRAPH: model.read(GRAPH)},
            epochs=0,
            seed=self.options.seed,
            details=result,
            statistics=widened(self.known, cohort.statistics),
        )
