"""A hundred things go wrong. Is every accepted job over in the end, with a reason, and published once?

    python -m benchmarks.faults.experiment --rows docs/results/faults.jsonl

A service of an API with its Redis and two workers gets one adaptation after the other. Chance, from a seed,
draws what goes wrong next and at which instant of a job's life; what has died is started again, as whatever
manages processes would. A fault counts as recovered from once the service is ready and every job that was
running is over, or runs in a process that lives. In the end all jobs must be over, and all invariants hold.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.faults.campaign import Campaign
from benchmarks.faults.invariants import violations
from benchmarks.faults.kinds import INSTANTS, KINDS
from benchmarks.faults.service import NeverHappened, Service
from benchmarks.faults.space import publish_space
from benchmarks.faults.workers import by_command, forked
from benchmarks.harness.cells import STATE_DIR, Cell, Rows, run
from benchmarks.harness.tables import table, write_page
from model_store.store import Store

# One more than there are workers, so that one waits.
JOBS_AT_ONCE = 3
QUOTA_BYTES = 400_000


def compute(cell: Cell, work: Path) -> dict[str, Any]:
    """A batch of faults against a service of its own."""
    store, state = work / f"store-{os.getpid()}", work / f"state-{os.getpid()}"
    publish_space(Store(store))
    start = by_command if cell["workers"] == "by command" else forked
    with Service(store, state, start=start, cohort_quota_bytes=QUOTA_BYTES) as service:
        campaign = Campaign(service, Random(f"{cell['seed']} {cell['batch']}"), cell["jobs"])
        broken = []
        try:
            for _ in range(cell["faults"]):
                campaign.strike()
            campaign.finish()
        except NeverHappened as error:
            broken.append(f"unbounded: {error}")
        broken += violations(service)
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


def sections(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The page: what was done, how long it was felt, what was violated."""
    results = [row["result"] for row in rows]
    faults = [fault for result in results for fault in result["faults"]]
    jobs: Counter[str] = Counter()
    for result in results:
        jobs.update(result["jobs"])
    attempts = [n for result in results for n in result["attempts"]]
    seconds = [s for result in results for s in result["seconds_to_end"]]
    broken = [violation for result in results for violation in result["violations"]]
    said = [f"- {violation}" for violation in broken] or ["None."]
    return [
        f"{len(faults)} faults in {len(rows)} batches, each against a service of its own: an API with its "
        "Redis, two workers, a lease of 2 s, messages sent again after 1 s. In batches `forked`, workers "
        "have torch imported when they start, so that the times are Locum's; in batches `by command`, they "
        "are started as a person starts them, and the times hold the imports.",
        f"## Violated invariants: {len(broken)}",
        "\n".join(said),
        "Checked after each batch: every accepted job is there and over, with a reason and its lease given "
        "up; its states follow each other as they may, its claims are numbered 1, 2, 3, ... and no epoch is "
        "told of twice; at most one version is of one job, and exactly one where it succeeded; every version "
        "opens with all its digests, nothing is left in staging; the interrupted came to the same weights as "
        "the undisturbed; every scan that was answered 201 is on the disk; the database passes its integrity "
        "check; no request was answered 500; no process is left whose parent is gone.",
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
        f"for up to {JOBS_AT_ONCE - 1} others.",
        "## At which instant",
        table(
            ["stage of the job aimed at", "faults"],
            [[stage, sum(fault["stage"] == stage for fault in faults)] for stage in (*INSTANTS, "none")],
        ),
    ]


def _recovery(rows: Sequence[dict[str, Any]]) -> str:
    body = []
    for workers in sorted({row["cell"]["workers"] for row in rows}, reverse=True):
        faults = [f for row in rows if row["cell"]["workers"] == workers for f in row["result"]["faults"]]
        for kind in [*KINDS, None]:
            chosen = [fault for fault in faults if kind in (None, fault["kind"])]
            seconds = [f["recovered_s"] for f in chosen if f["recovered_s"] is not None]
            if seconds:
                figures = [f"{value:.1f}" for value in np.quantile(seconds, (0.5, 0.9, 1.0))]
                body.append([kind or "all", workers, len(chosen), *figures, len(chosen) - len(seconds)])
    return table(["fault", "workers", "count", "median", "90 %", "largest", "never"], body)


def cells(faults: int, batch: int, seed: int) -> list[Cell]:
    """Batches of so many; the last of them has workers that are started by their command."""
    count = -(-faults // batch)
    return [
        {
            "batch": number,
            "faults": batch,
            "jobs": JOBS_AT_ONCE,
            "seed": seed,
            "workers": "by command" if number == count - 1 else "forked",
        }
        for number in range(count)
    ]


def main(
    rows: Annotated[Path, typer.Option(help="Where finished batches are kept, and the page.")],
    faults: Annotated[int, typer.Option(help="How many, at least.")] = 120,
    batch: Annotated[int, typer.Option(help="Faults per row.")] = 12,
    seed: Annotated[int, typer.Option(help="What goes wrong, and when.")] = 0,
    state_dir: Annotated[Path, typer.Option(help="For the services' stores and states.")] = STATE_DIR,
) -> None:
    """Do what has no row yet, then write the page."""
    kept = Rows(rows)
    wanted = cells(faults, batch, seed)

    def page() -> None:
        found = [row for row in kept.read() if row["cell"] in wanted]
        command = f"python -m benchmarks.faults.experiment --rows {rows}"
        write_page(rows.with_suffix(".md"), "Faults", command, rows, sections(found))

    run("faults", wanted, kept, compute, state_dir, after_each=page)
    page()


if __name__ == "__main__":
    typer.run(main)
