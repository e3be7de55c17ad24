"""The invariants of a service once every job is over, after any faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from sqlalchemy import select, text

from benchmarks.faults.service import HOSPITAL, Service
from benchmarks.faults.space import NAME
from benchmarks.harness.campaign import NeverHappened
from model_store.digest import sha256
from model_store.errors import LocumStoreError
from model_store.manifest import WEIGHTS
from service.audit import trail
from service.catalog.adapted import adapted_name
from service.cohorts import cohorts
from service.database import CohortScan, Job, JobEvent
from service.database.job_states import TERMINAL
from service.errors import AuditBroken, CohortDeleted
from service.expiry import expire
from service.jobs.files import JobFolder

WITH_CANDIDATE = frozenset({"succeeded", "fell_back"})
_ORPHAN_S = 30.0
# The allowed state changes. A worker that takes over a job from a lost worker finds it running.
_FOLLOWS = {
    "queued": {"running", "cancelled", "failed"},
    "running": {"queued", "running", "cancelling", *TERMINAL},
    "cancelling": set(TERMINAL),
}


def violations(service: Service) -> list[str]:
    """The invariants that are violated, in words."""
    # The service does this once a minute.
    expire(service.database, service.settings)
    return [
        *service.unexpected,
        *_database(service),
        *_jobs(service),
        *_versions(service),
        *_files(service),
        *_processes(service),
    ]


def _database(service: Service) -> Iterator[str]:
    if service.database.is_sqlite:
        with service.database.read() as session:
            said = session.scalar(text("PRAGMA integrity_check"))
            if said != "ok":
                yield f"the database is damaged: {said}"
            if session.execute(text("PRAGMA foreign_key_check")).first() is not None:
                yield "a row of the database refers to one that is not there"
    with service.database.snapshot() as session:
        try:
            trail.verify(session)
        except AuditBroken as error:
            yield f"the audit trail is broken: {error}"


def _jobs(service: Service) -> Iterator[str]:
    with service.database.read() as session:
        jobs = {job.id: job for job in session.scalars(select(Job))}
        events: dict[str, list[JobEvent]] = {job: [] for job in jobs}
        for event in session.scalars(select(JobEvent).order_by(JobEvent.id)):
            events[event.job].append(event)
    for lost in set(service.accepted) - jobs.keys():
        yield f"job {lost} was accepted and is not there"
    for job in jobs.values():
        if job.state not in TERMINAL:
            yield f"job {job.id} is {job.state} after attempt {job.attempt} ({job.progress})"
            continue
        if job.state != "succeeded" and not job.reason:
            yield f"job {job.id} {job.state} without a reason"
        if job.finished_at is None or job.owner is not None or job.lease_until is not None:
            yield f"job {job.id} is {job.state}, and its lease is not given up"
        yield from _history(job, events[job.id])


def _history(job: Job, events: list[JobEvent]) -> Iterator[str]:
    states = [event.data["state"] for event in events if event.type == "state"]
    for before, after in pairwise(states):
        if after not in _FOLLOWS.get(before, set()):
            yield f"job {job.id} went from {before} to {after}: {states}"
    if states[-1:] != [job.state] or events[-1].type != "state":
        yield f"job {job.id} is {job.state}, and the last of its events is another: {states}"
    claims = [e.data["attempt"] for e in events if e.type == "state" and e.data["state"] == "running"]
    if claims != list(range(1, job.attempt + 1)) or job.token != job.attempt:
        yield f"job {job.id} was claimed as {claims}, and is at attempt {job.attempt}, token {job.token}"
    epochs = [event.data["epoch"] for event in events if event.type == "epoch"]
    if epochs != sorted(set(epochs)):
        yield f"job {job.id} reported an epoch twice: {epochs}"


def _versions(service: Service) -> Iterator[str]:
    store, name = service.settings.open_store(), adapted_name(NAME, HOSPITAL)
    for known in store.versions.names():
        for number in store.versions.numbers(known):
            try:
                store.open(f"{known}@{number}")
            except LocumStoreError as error:
                yield f"a version does not open: {error}"
    left = [] if isinstance(store.root, str) else [path.name for path in (store.root / ".staging").iterdir()]
    if left:
        yield f"{len(left)} half versions lie in the store's staging"
    versions = [v.artefact for v in store.versions.of(name)] if store.versions.numbers(name) else []
    runs = Counter(artefact.manifest.lineage.run for artefact in versions)
    for run, count in runs.items():
        if count > 1:
            yield f"job {run} published {count} versions"
    digests = {artefact.digest for artefact in versions}
    weights: dict[str, set[str]] = {}
    with service.database.read() as session:
        jobs = list(session.scalars(select(Job).where(Job.kind == "adaptation")))
    for unknown in runs.keys() - {job.id for job in jobs}:
        yield f"a version is of job {unknown}, which does not exist"
    for job in jobs:
        if job.state not in WITH_CANDIDATE:
            continue
        if runs[job.id] != 1 or job.candidate_digest not in digests or job.gate is None:
            yield f"job {job.id} {job.state}, and its candidate or verdict is missing"
            continue
        # The same cohort and options: an interrupted job must give the same weights as an undisturbed one.
        found = sha256(store.open(f"{name}@{job.candidate_version}").read(WEIGHTS))
        weights.setdefault(f"{job.cohort} {job.options}", set()).add(found)
    for asked, different in weights.items():
        if len(different) > 1:
            yield f"{len(different)} different models came of one adaptation: {asked}"


def _files(service: Service) -> Iterator[str]:
    settings = service.settings
    with service.database.read() as session:
        rows = list(session.scalars(select(CohortScan)))
        over = list(session.scalars(select(Job.id).where(Job.state.in_(TERMINAL))))
    for row in rows:
        try:
            cohorts.file_of(settings, row, row.name).read()
        except CohortDeleted:
            yield f"scan {row.name!r} of cohort {row.cohort} is not stored as it was uploaded"
    for job in over:
        folder = JobFolder(settings.open_files(), job)
        yield from (
            f"{name} of job {job}, which is over, is still there"
            for name in folder.names
            if name in (folder.CHECKPOINT, folder.INPUT)
        )
    if any(settings.spool.iterdir()):
        yield "an upload is left in the spool"


def _processes(service: Service) -> Iterator[str]:
    try:
        # A task process that outlived its worker may finish its job, and must then end.
        service.until(lambda: not service.orphans(), patience_s=_ORPHAN_S)
    except NeverHappened:
        yield f"processes of dead workers are left: {service.orphans()}"
