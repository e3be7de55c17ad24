"""Publish the candidate version of a job once, and only from the worker that holds its lease."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from model_store.artefact import Artefact
from model_store.guard import ReferenceStatistics
from model_store.manifest import Lineage, ModelManifest
from model_store.store import Store
from service.catalog.adapted import adapted_name
from service.jobs.leases import fenced
from service.worker.attempt import Attempt, PublishedCandidate

_SOFTWARE = ("locum", "torch", "onnx", "numpy")


@dataclass(frozen=True)
class CandidateDraft:
    """The content of a candidate before publishing.

    `method` derived it from `parent`, a composite artefact, in `epochs` epochs with `seed`. `model` is the
    manifest of the parent's model, with the candidate's task and network. `files` maps names to the bytes of
    weights, graph and other files. `metrics` and `sources` go into the manifest.
    """

    parent: Artefact
    model: ModelManifest
    method: str
    files: Mapping[str, bytes]
    epochs: int
    seed: int
    details: Mapping[str, Any]
    statistics: ReferenceStatistics | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[str, ...] | None = None


def publish(
    attempt: Attempt,
    store: Store,
    draft: CandidateDraft,
    *,
    gate: dict[str, Any],
    result: dict[str, Any],
) -> PublishedCandidate:
    """Publish the draft as the job's candidate version, and store verdict and result in the job's row.

    Raises:
        LeaseLost, JobCancelled: this worker may not publish.
        ArtefactWithdrawn: the parent was withdrawn during the job.
    """
    job = attempt.job
    assert job.hospital is not None
    parent = draft.parent
    name = adapted_name(parent.name, job.hospital)
    manifest = ModelManifest(
        name=name,
        role="hospital",
        hospital=job.hospital,
        task=draft.model.task,
        network=draft.model.network,
        lineage=Lineage(
            method=draft.method,
            run=job.id,
            sites=parent.manifest.lineage.sites,
            rounds=draft.epochs,
            seed=draft.seed,
            parents=(parent.digest,),
            weights=parent.manifest.lineage.weights,
            details=dict(draft.details),
        ),
        metrics=dict(draft.metrics),
        statistics=draft.statistics,
        sources=draft.sources,
        software={"python": platform.python_version(), **{part: version(part) for part in _SOFTWARE}},
    )

    def admit() -> None:
        store.by_digest(parent.digest)
        # The store holds its lock here: no other process can publish under this name after the check.
        earlier = store.versions.made_by(name, job.id)
        if earlier is not None:
            raise _AlreadyPublished(earlier)
        attempt.check_cancelled()
        with fenced(attempt.database, attempt.lease) as (_, row):
            # Stored before the version is visible, for readers after a crash of this worker.
            row.gate, row.result = gate, result

    try:
        artefact = store.publish(manifest, dict(draft.files), admit=admit)
    except _AlreadyPublished as found:
        artefact = found.artefact
    return PublishedCandidate(artefact, result, gate)


class _AlreadyPublished(Exception):
    def __init__(self, artefact: Artefact) -> None:
        super().__init__(str(artefact))
        self.artefact = artefact
