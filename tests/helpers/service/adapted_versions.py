"""A store with versions adapted from routing spaces, and the jobs that made them; small and by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec, RoutingSpaceManifest
from model_store.store import Store
from model_store.task import Task
from service.catalog.adapted import adapted_name
from service.database import Database, Job
from tests.helpers.model_store.graphs import graph_of
from tests.helpers.service.queued import queued

TASK = Task(name="organ", labels={"organ": (1,)}, size=(32, 32))
NETWORK = NetworkSpec(name="unet", arguments={"width": 2})
SITES = ("CS", "DU")
# Each site's own model is better than the global one there.
GAINS = {
    f"{site}.{metric}": dice
    for site in SITES
    for metric, dice in (("val_dice", 0.8), ("val_dice_global", 0.75))
}
PASSED = {"passed": True, "checks": [{"name": "agreement", "passed": True}]}
REFUSED = {
    "passed": False,
    "checks": [
        {"name": "agreement", "value": 0.9, "limit": 0.6, "passed": True, "meaning": "as the parent"},
        {"name": "fragments", "value": 7.5, "limit": 3.0, "passed": False, "meaning": "pieces per scan"},
    ],
}


class Catalogue(NamedTuple):
    """Where versions are published, and assigned to hospitals."""

    store: Store
    database: Database


def publish_model(store: Store, name: str, seed: int = 0, **fields: Any) -> Artefact:
    lineage = Lineage(method="iop-fl", run="r", sites=SITES, rounds=1, seed=seed)
    manifest = ModelManifest(**{"name": name, "task": TASK, "network": NETWORK, "lineage": lineage, **fields})
    return store.publish(manifest, {WEIGHTS: f"w{seed}{name}".encode(), GRAPH: graph_of(f"g{seed}{name}")})


def publish_space(
    store: Store, seed: int, name: str = "brain", metrics: dict[str, float] | None = None
) -> Artefact:
    whole = publish_model(store, f"{name}.global", seed, part_of=name)
    inside = {
        site: publish_model(store, f"{name}.{site}", seed, part_of=name, role="inside", site=site).digest
        for site in SITES
    }
    manifest = RoutingSpaceManifest(
        name=name,
        task=TASK,
        lineage=Lineage(method="iop-fl", run="r", sites=SITES, rounds=1, seed=seed),
        global_model=whole.digest,
        inside=inside,
        metrics=GAINS if metrics is None else metrics,
    )
    return store.publish(manifest, {})


def publish_adapted(store: Store, space: Artefact, hospital: str, seed: int = 0) -> Artefact:
    lineage = Lineage(
        method="iop-fl-routing", run=f"{seed:032x}", sites=SITES, rounds=3, seed=seed, parents=(space.digest,)
    )
    name = adapted_name(space.name, hospital)
    return publish_model(store, name, seed, hospital=hospital, role="hospital", lineage=lineage)


def finished_job(
    session: Session, settings: Any, candidate: Artefact, gate: dict[str, Any] | None = None, **fields: Any
) -> Job:
    """The record of the job that made an adapted version."""
    manifest = candidate.manifest
    assert isinstance(manifest, ModelManifest)
    job = queued(
        session,
        settings,
        kind="adaptation",
        hospital=manifest.hospital,
        model=candidate.name.split(".at-")[0],
        parent=manifest.lineage.parents[0],
        cohort=None,
        options={"preset": "paper", "epochs": 3},
    )
    now = datetime.now(UTC)
    made = {
        "state": "succeeded",
        "attempt": 1,
        "gate": gate,
        "candidate_name": candidate.name,
        "candidate_version": candidate.version,
        "candidate_digest": candidate.digest,
        "result": {"scans": 4, "images": 40, "best_epoch": 2},
        "started_at": now - timedelta(seconds=90),
        "finished_at": now,
    }
    for name, value in {**made, **fields}.items():
        setattr(job, name, value)
    session.flush()
    return job
