"""Read a job's record, events and files and its artefacts: into the API's view, and into a card.

What is in the JSON columns was written by a worker, perhaps one of another version: what is not there, or is
not what it should be, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import StoreError
from model_store.store import Store
from service.adaptation.card.model import Card, Decision, Picture
from service.adaptation.card.sections import Evidence, Said
from service.database import Assignment, Database, Job
from service.files import Files
from service.job_kinds import KINDS
from service.jobs import records
from service.jobs.files import JobFolder
from service.jobs.views import JobView, fields
from service.kinds import Words
from service.serving.assignments import assignment

_LINEAGE = ("method", "sites", "rounds", "seed")


@dataclass(frozen=True)
class _Read:
    """What both are made of. `parent` and `candidate` are None where they cannot be read."""

    job: Job
    view: JobView
    words: Words
    parent: Artefact | None
    candidate: Artefact | None
    result: Mapping[str, Any]


def read_view(store: Store, database: Database, job_id: str) -> JobView:
    """The API's view of a job. Reads database and store: call it in a thread.

    Raises:
        JobUnknown: there is no such job.
    """
    return _read(store, database, job_id).view


def read_card(store: Store, database: Database, files: Files, job_id: str) -> Card:
    """Everything that is known of a job by now. Reads database, store and disk: call it in a thread.

    Raises:
        JobUnknown: there is no such job.
    """
    found = _read(store, database, job_id)
    job = found.job
    with database.read() as session:
        decisions = _decisions(session, job)
    lineage = None if found.candidate is None else found.candidate.manifest.lineage
    return Card(
        job=found.view,
        model=(job.model or "–") if found.parent is None else str(found.parent),
        words=found.words,
        candidate_withdrawn=_withdrawn(store, job),
        scans=_count(found.result.get("scans")),
        images=_count(found.result.get("images")),
        # What learns nothing has no epoch to choose.
        best_epoch=_count(found.result.get("best_epoch")) if found.result.get("epochs") != 0 else None,
        pictures=_pictures(JobFolder(files, job.id)),
        decisions=decisions,
        lineage={} if lineage is None else {name: getattr(lineage, name) for name in _LINEAGE},
    )


def _read(store: Store, database: Database, job_id: str) -> _Read:
    with database.read() as session:
        job = records.get(session, job_id)
        epochs = [event.data for event in records.events_of_type(session, job_id, "epoch")]
        gates = [event.data for event in records.events_of_type(session, job_id, "gate")]
        found = fields(session, job, epochs)
    parent = _found(store, job.model, job.parent)
    candidate = _found(store, job.candidate_name, job.candidate_digest)
    details = {} if candidate is None else candidate.manifest.lineage.details
    result = {**details, **(job.result or {})}
    verdict = job.gate or (gates[-1] if gates else None)
    said: Said = resolve_name(KINDS[job.kind].card)(Evidence(job, verdict, epochs, parent, result))
    view = JobView(**found, sections=list(said.sections))
    return _Read(job, view, said.words, parent, candidate, result)


def _found(store: Store, name: str | None, digest: str | None) -> Artefact | None:
    """A version, withdrawn or not. None where the job names none, and where it cannot be read."""
    if not name or not digest:
        return None
    with suppress(StoreError, OSError):
        return store.versions.find(name, digest)
    return None


def _withdrawn(store: Store, job: Job) -> str | None:
    if job.candidate_name is None or job.candidate_version is None:
        return None
    tombstone = store.versions.tombstone(job.candidate_name, job.candidate_version)
    return None if tombstone is None else f"{tombstone.reason} ({tombstone.actor})"


def _decisions(session: Session, job: Job) -> tuple[Decision, ...]:
    if job.hospital is None or job.candidate_digest is None:
        return ()
    current = assignment(session, job.hospital, job.model)
    rows = session.scalars(
        select(Assignment)
        .where(Assignment.hospital == job.hospital, Assignment.digest == job.candidate_digest)
        .order_by(Assignment.sequence)
    )
    return tuple(
        Decision(
            sequence=row.sequence,
            at=row.at,
            actor=row.actor,
            reason=row.reason,
            override=row.override,
            in_force=current is not None and row.id == current.id,
        )
        for row in rows
    )


# In the order in which they are shown.
_CAPTIONS = {"before": "before", "lens": "through the lens", "after": "after", "drawn": "drawn"}


def _pictures(folder: JobFolder) -> tuple[tuple[Picture, ...], ...]:
    """By scan; one of which `before` or `after` has expired in between is left out."""
    found = []
    for scan, pictures in sorted(folder.pictures().items()):
        if "before" in pictures and "after" in pictures:
            shown = ((caption, pictures[when]) for when, caption in _CAPTIONS.items() if when in pictures)
            found.append(tuple(Picture(f"scan {scan}, {caption}", content) for caption, content in shown))
    return tuple(found)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None
