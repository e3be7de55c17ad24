"""Pick a cluster for a hospital by its unlabeled scans, and publish the cluster's model as a candidate.

Stages:
    preparing   read and check scans and models
    comparing   run every cluster's model on every image
    judging     repeat the pick on random draws of the patients, for the gate
    drawing     show the mean answer of all clusters and the answer of the picked one, for review
    publishing  once, by the worker that holds the lease

Nothing is trained: the candidate is the cluster's unchanged model under this hospital's name. The work takes
seconds, so a new attempt starts over, with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, WEIGHTS, ClustersManifest, ModelManifest
from model_store.store import Store
from model_store.task import Task
from personalization.fedbicross.picking import (
    Observed,
    cheapest,
    costs,
    observe,
    stability,
)
from personalization.gate import GateVerdict, judge
from personalization.gate.picking import PICKING, Pick
from personalization.networks import build
from personalization.options.picking import CRITERIA, Criterion, PickingOptions
from personalization.state import from_safetensors
from service.cohorts.files import ScanFile
from service.errors import AdaptationRejected
from service.settings import scan_limits
from service.worker.attempt import Attempt, PublishedCandidate, as_json
from service.worker.candidate import CandidateDraft, publish
from service.worker.cohort_images import CohortImages, cohort_files, load_images
from service.worker.device import device_of
from service.worker.pictures import draw_answers


@dataclass(frozen=True)
class LoadedClusters:
    """`offered` is the artefact of kind `clusters`, with its models by cluster name, in order."""

    offered: Artefact[ClustersManifest]
    manifest: ClustersManifest
    models: Mapping[str, Artefact[ModelManifest]]
    networks: Mapping[str, nn.Module]

    @property
    def task(self) -> Task:
        """Task of the clusters."""
        return self.manifest.task

    def model_manifest(self, cluster: str) -> ModelManifest:
        """Return the manifest of a cluster's model."""
        return self.models[cluster].manifest

    def sites(self, cluster: str) -> list[str]:
        """List the hospitals of a cluster, sorted."""
        return sorted(site for site, found in self.manifest.assignment.items() if found == cluster)


def load_clusters(store: Store, digest: str) -> LoadedClusters:
    """Load the clusters with this digest.

    Raises:
        StoreError: the artefact or one of its models is missing, withdrawn, damaged or of another kind.
        StateError: the weights of a model do not fit its network.
    """
    offered = store.by_digest(digest, ClustersManifest)
    found = offered.manifest.clusters
    # Numeric names sort as numbers: "10" after "9".
    names = sorted(found, key=lambda name: (len(name), name))
    models = {name: store.by_digest(found[name], ModelManifest) for name in names}
    return LoadedClusters(
        offered, offered.manifest, models, {name: _network(model) for name, model in models.items()}
    )


def _network(model: Artefact[ModelManifest]) -> nn.Module:
    network = build(model.manifest.network.name, **model.manifest.network.arguments)
    network.load_state_dict(from_safetensors(model.read(WEIGHTS)))
    return network.eval()


METHOD = "fedbicross-picking"
# Draws from fewer patients would repeat the same few.
_FEWEST_PATIENTS = 4


def run_picking(attempt: Attempt) -> PublishedCandidate:
    """Compare, judge and publish. Raises what its parts raise; the runner reports it as the job's reason."""
    store, job = attempt.settings.open_store(), attempt.job
    loaded = load_clusters(store, job.parent)
    options = PickingOptions.model_validate(job.options)
    files = cohort_files(attempt)
    known = next(loaded.model_manifest(name).statistics for name in loaded.models)
    cohort = load_images(files, loaded.task, known, scan_limits(attempt.settings), attempt.check_cancelled)
    if cohort.left_out:
        attempt.warn(
            f"the cohort has {cohort.left_out} slices more than are looked at: {len(cohort.images)}, evenly "
            "spaced, are"
        )
    observed = _observe(attempt, loaded, cohort, options.seed)
    found = {criterion: costs(criterion, observed) for criterion in CRITERIA}
    try:
        chosen = cheapest(found[options.criterion])
    except ValueError as error:
        raise AdaptationRejected(f"nothing can be picked: {error}") from error
    attempt.set_stage("judging", cluster=chosen)
    gate = as_json(_verdict(observed, chosen, found, cohort, options).to_json())
    attempt.emit("gate", gate)
    attempt.set_stage("drawing")
    _draw(attempt, loaded, files, observed, chosen, cohort.scan_of_image)
    attempt.set_stage("publishing")
    result = _result(loaded, options, chosen, found, cohort, files)
    model = loaded.models[chosen]
    draft = CandidateDraft(
        parent=loaded.offered,
        model=loaded.model_manifest(chosen),
        method=METHOD,
        files={WEIGHTS: model.read(WEIGHTS), GRAPH: model.read(GRAPH)},
        epochs=0,
        seed=options.seed,
        details=result,
        statistics=None if known is None else known.merge(cohort.statistics),
    )
    return publish(attempt, store, draft, gate=gate, result=result)


def _observe(
    attempt: Attempt, loaded: LoadedClusters, cohort: CohortImages, seed: int
) -> dict[str, Observed]:
    device = device_of(attempt.settings)
    observed = {}
    for name, network in loaded.networks.items():
        attempt.set_stage("comparing", cluster=name)
        observed[name] = observe(network.to(device), cohort.images, seed, attempt.check_cancelled)
    return observed


def _verdict(
    observed: Mapping[str, Observed],
    chosen: str,
    found: Mapping[Criterion, Mapping[str, float]],
    cohort: CohortImages,
    options: PickingOptions,
) -> GateVerdict:
    patients = torch.from_numpy(cohort.patient_of_image)
    draw = torch.Generator().manual_seed(options.seed)
    criterion: Criterion = options.criterion
    enough = int(patients.max()) + 1 >= _FEWEST_PATIENTS
    stable = stability(criterion, observed, patients, draw) if enough else None
    return judge(PICKING, Pick(chosen, found, stability=stable, source_warnings=cohort.warned))


def _draw(
    attempt: Attempt,
    loaded: LoadedClusters,
    files: Sequence[ScanFile],
    observed: Mapping[str, Observed],
    chosen: str,
    scan_of_image: NDArray[np.int64],
) -> None:
    mean = torch.stack([own.answers for own in observed.values()]).mean(dim=0)
    scans = range(len(files))
    told = {
        "before": [mean[scan_of_image == scan].mean(dim=0).numpy() for scan in scans],
        "after": [observed[chosen].answers[scan_of_image == scan].mean(dim=0).numpy() for scan in scans],
    }
    draw_answers(attempt, files, loaded.task, told)


def _result(
    loaded: LoadedClusters,
    options: PickingOptions,
    chosen: str,
    found: Mapping[Criterion, Mapping[str, float]],
    cohort: CohortImages,
    files: Sequence[ScanFile],
) -> dict[str, Any]:
    result: dict[str, Any] = as_json(
        {
            "options": options.model_dump(),
            "scans": len(files),
            "images": len(cohort.images),
            "cluster": chosen,
            "sites": {name: loaded.sites(name) for name in loaded.models},
            "costs": {
                criterion: {name: round(cost, 6) for name, cost in each.items()}
                for criterion, each in found.items()
            },
        }
    )
    return result
