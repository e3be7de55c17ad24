"""Read a job's record, events and files and its artefacts: into the API's view, and into a card.

What is in the JSON columns was written by a worker, perhaps one of another version: what is not there, or is
not what it should be, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import StoreError
from model_store.store import Store
from service.adaptation.card.model import Card, Decision, Picture
from service.adaptation.card.sections import epochs_section, gate_section, graph_section
from service.database import Assignment, Database, Job
from service.database.job_states import ADAPTING, QUANTISING
from service.files import Files
from service.jobs import records
from service.jobs.files import JobFolder
from service.jobs.sections import Section
from service.jobs.views import JobView, fields
from service.kinds import Words, adaptation_of
from service.serving.assignments import assignment

_LINEAGE = ("method", "sites", "rounds", "seed")
# Without the parent nothing is known of its kind.
_UNKNOWN = Words(
    truth="what this job adapted is no longer in the store, so the meaning of its scores is unknown.",
    gate="Look at the pictures too.",
    epochs="Epoch 0 is step 0, before anything was learned.",
    before="The model that it came from first",
    parts={},
)

_OTHERS = replace(_UNKNOWN, truth="no person has looked at what this job made.", before="")


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
    adaptation = None if parent is None else adaptation_of(parent, job.options)
    words = _OTHERS if job.kind not in ADAPTING else _UNKNOWN if adaptation is None else adaptation.words
    candidate = _found(store, job.candidate_name, job.candidate_digest)
    details = {} if candidate is None else candidate.manifest.lineage.details
    result = {**details, **(job.result or {})}
    sections: list[Section] = []
    if job.kind == QUANTISING:
        sections.append(graph_section(job.gate or (gates[-1] if gates else None), job.result or {}))
    if job.kind in ADAPTING:
        sections += [
            gate_section(job, job.gate or (gates[-1] if gates else None), words),
            *epochs_section(epochs, _count(result.get("best_epoch")), words),
            *(() if adaptation is None else adaptation.sections(result, epochs)),
        ]
    return _Read(job, JobView(**found, sections=sections), words, parent, candidate, result)


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


def _pictures(folder: JobFolder) -> tuple[tuple[Picture, ...], ...]:
    """By scan; one of which `before` or `after` has expired in between is left out."""
    found = []
    for scan, pictures in sorted(folder.pictures().items()):
        if "before" in pictures and "after" in pictures:
            shown = ((when, pictures[when]) for when in ("before", "after", "drawn") if when in pictures)
            found.append(tuple(Picture(f"scan {scan}, {when}", content) for when, content in shown))
    return tuple(found)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None
