"""A routing space `bright` and what was adapted from it: networks that mark what is brighter than so."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from model_store.artefact import Artefact
from model_store.manifest import Lineage, ModelManifest, NetworkSpec, RoutingSpaceManifest
from model_store.store import Store
from service.context import ServiceContext
from service.jobs import records
from service.jobs.records import Asked
from tests.helpers.service.queued import queued

GLOBAL, SITE, FIRST, SECOND = 100, 60, 120, 140
NETWORK = NetworkSpec(name="threshold", arguments={})
LINEAGE = Lineage(method="by-hand", run="test", sites=("aster",), rounds=0, seed=0)
PASSED: dict[str, Any] = {"passed": True, "checks": [{"name": "agreement", "value": 0.9, "passed": True}]}
REFUSED: dict[str, Any] = {
    "passed": False,
    "checks": [
        {
            "name": "fragments",
            "value": 7.5,
            "limit": 2.0,
            "bound": "at most",
            "passed": False,
            "meaning": "pieces",
        },
        {
            "name": "agreement",
            "value": 0.9,
            "limit": 0.5,
            "bound": "at least",
            "passed": True,
            "meaning": "as the parent",
        },
    ],
}
COEFFICIENTS = {
    "layers": ["encoder1", "head"],
    "models": ["aster", "global"],
    "values": [[0.75, 0.25], [0.5, 0.5]],
}


def publish_space(root: Path, publish: Callable[..., Artefact]) -> Artefact:
    """`bright@1`: global at 100, site aster at 60."""
    whole = publish(root, "bright.global", GLOBAL, part_of="bright", network=NETWORK)
    inside = publish(
        root, "bright.aster", SITE, part_of="bright", role="inside", site="aster", network=NETWORK
    )
    manifest = whole.manifest
    assert isinstance(manifest, ModelManifest)
    space = RoutingSpaceManifest(
        name="bright",
        task=manifest.task,
        lineage=LINEAGE,
        global_model=whole.digest,
        inside={"aster": inside.digest},
    )
    return Store(root).publish(space, {})


def publish_adapted(
    root: Path, publish: Callable[..., Artefact], space: Artefact, hospital: str, at: int
) -> Artefact:
    """`bright.at-<hospital>`, the next version."""
    lineage = LINEAGE.model_copy(
        update={
            "parents": (space.digest,),
            "method": "iop-fl-routing",
            "details": {"coefficients": COEFFICIENTS},
        }
    )
    return publish(
        root, f"{space.name}.at-{hospital}", at, hospital=hospital, role="hospital", lineage=lineage
    )


def record_job(context: ServiceContext, candidate: Artefact, gate: dict[str, Any] | None) -> str:
    """As a worker would have left it: the job that made this version. Returns its id."""
    manifest = candidate.manifest
    assert isinstance(manifest, ModelManifest)
    now = datetime.now(UTC)
    with context.database.write() as session:
        job = queued(
            session,
            context.settings,
            Asked(str(uuid.uuid4())),
            kind="adaptation",
            hospital=manifest.hospital,
            model="bright",
            parent=manifest.lineage.parents[0],
            cohort=None,
            options={"preset": "paper"},
        )
        for epoch, loss in enumerate((0.4, 0.3)):
            record = {
                "epoch": epoch,
                "loss": loss,
                "entropy": loss,
                "safe": True,
                "coefficients": COEFFICIENTS,
            }
            records.append_event(session, job, "epoch", record)
        job.state, job.attempt, job.gate = "succeeded", 1, gate
        job.started_at, job.finished_at = now - timedelta(seconds=5), now
        job.result = {"scans": 3, "images": 30, "best_epoch": 1}
        job.candidate_name, job.candidate_version = candidate.name, candidate.version
        job.candidate_digest = candidate.digest
        return job.id
