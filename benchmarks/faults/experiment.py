"""What is left of the jobs when a hundred things go wrong? Each must end with a reason and publish once.

A service of an API with its Redis and two workers gets one adaptation after the other. A seeded draw decides
what goes wrong next and at which instant of a job's life. Dead processes are started again, as a process
manager would. Every request has an API key, and those that matter leave a row in the audit trail. The
service has recovered from a fault once it is ready and every job that was running is over or runs in a live
process. In the end all jobs must be over, and all invariants must hold.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import ServiceCampaign
from benchmarks.faults.invariants import violations
from benchmarks.faults.report import sections
from benchmarks.faults.service import Service
from benchmarks.faults.space import publish_space
from benchmarks.faults.workers import by_command, forked
from benchmarks.harness.campaign import batches
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from benchmarks.harness.nodes import nodes
from model_store.store import Store

QUOTA_BYTES = 400_000


@dataclass(frozen=True)
class Profile:
    """At least how many faults, faults per row, the seed of the draws, and jobs at once."""

    faults: int = 120
    batch: int = 12
    seed: int = 0
    # One more than there are workers, so that one waits.
    jobs: int = 3
    # `nodes`: two APIs; PostgreSQL; artefacts, scans and jobs' files on an S3 server.
    layout: str = "machine"


PROFILES = {
    "smoke": Profile(3, 3, 1, 1),
    "cpu": Profile(),
    "nodes": Profile(faults=60, seed=1, layout="nodes"),
}


class Faults(Experiment[Profile]):
    """Random faults against a running service."""

    name = "faults"
    title = "Faults"
    question = "What is left of the jobs when everything is killed?"
    profiles = PROFILES
    tables = (Table("faults"), Table("faults.nodes", "nodes"))

    def cells(self) -> list[Cell]:
        """Batches of faults; the workers of the last batch are started by their command."""
        settings = self.profile
        common = {"jobs": settings.jobs, "auth": "keys"}
        common |= {} if settings.layout == "machine" else {"layout": settings.layout}
        *first, last = batches(settings.faults, settings.batch, settings.seed)
        workers = [*((cell, "forked") for cell in first), (last, "by command")]
        return [{**cell, **common, "workers": started} for cell, started in workers]

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """One batch of faults."""
        return compute(cell, work)

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """Violated invariants, recovery, jobs, instants."""
        return sections(rows, self.profile.jobs)


def compute(cell: Cell, work: Path) -> dict[str, Any]:
    """A batch of faults against a service of its own."""
    store, state = work / f"store-{os.getpid()}", work / f"state-{os.getpid()}"
    start = by_command if cell["workers"] == "by command" else forked
    with ExitStack() as stack:
        more: dict[str, Any] = {}
        place: Path | str = store
        if cell.get("layout") == "nodes":
            root = stack.enter_context(nodes())
            place = f"{root.bucket}/store"
            more = {
                "database_url": root.database,
                "files": f"{root.bucket}/files",
                "cache": work / f"cache-{os.getpid()}",
                "other_apis": 1,
            }
        publish_space(Store(place, *([more["cache"]] if more else [])))
        service = stack.enter_context(
            Service(place, state, start=start, cohort_quota_bytes=QUOTA_BYTES, auth=cell["auth"], **more)
        )
        campaign = ServiceCampaign(cell, service)
        campaign.run()
        broken = [*campaign.broken, *violations(service)]
        jobs = [service.job(job) for job in service.accepted]
        return {
            "faults": [
                {"kind": s.kind, "stage": s.stage, "recovered_s": s.recovered_s and round(s.recovered_s, 2)}
                for s in campaign.strikes
            ],
            "jobs": dict(Counter(job.state for job in jobs)),
            "attempts": [job.attempt for job in jobs],
            "seconds_to_end": [
                round((job.finished_at - job.created_at).total_seconds(), 1)
                for job in jobs
                if job.finished_at is not None
            ],
            "violations": broken,
        }
