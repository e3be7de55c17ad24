"""Read a job's record, events and files and its artefacts into a card.

What is in the JSON columns was written by a worker, perhaps one of another version: what is not there, or is
not what it should be, is left out of the card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import StoreError
from model_store.store import Store
from service.adaptation.card.model import (
    Card,
    CheckRow,
    Decision,
    Epoch,
    Gate,
    Picture,
)
from service.database import Assignment, Database, Job
from service.database.job_states import ON_PACS
from service.files import Files
from service.jobs import records
from service.jobs.files import JobFolder
from service.kinds import Words, kind_of
from service.kinds.card import number
from service.serving.assignments import assignment

_BOUNDS = {"at least": "≥", "above": ">", "at most": "≤"}
_LINEAGE = ("method", "sites", "rounds", "seed")
# Without the parent nothing is known of its kind.
_UNKNOWN = Words(
    truth="what this job adapted is no longer in the store, so the meaning of its scores is unknown.",
    gate="Look at the pictures too.",
    epochs="Epoch 0 is step 0, before anything was learned.",
    before="The model that it came from first",
    parts={},
)

_PACS = replace(_UNKNOWN, truth="no person has looked at what this job made.", before="")


def read_card(store: Store, database: Database, files: Files, job_id: str) -> Card:
    """Everything that is known of a job by now. Reads database, store and disk: call it in a thread.

    Raises:
        JobUnknown: there is no such job.
    """
    with database.read() as session:
        job = records.get(session, job_id)
        epochs = [event.data for event in records.events_of_type(session, job_id, "epoch")]
        gates = [event.data for event in records.events_of_type(session, job_id, "gate")]
        warnings = records.warnings_of(session, job_id)
        decisions = _decisions(session, job)
    candidate, parent = _candidate(store, job), _parent(store, job)
    adaptation = None if parent is None else kind_of(parent).adaptation
    words = _PACS if job.kind in ON_PACS else _UNKNOWN if adaptation is None else adaptation.words
    lineage = None if candidate is None else candidate.manifest.lineage
    details: Mapping[str, Any] = {} if lineage is None else lineage.details
    result = {**details, **(job.result or {})}
    best = result.get("best_epoch")
    return Card(
        job=job.id,
        kind=job.kind,
        state=job.state,
        model=(job.model or "–") if parent is None else str(parent),
        hospital=job.hospital,
        reason=job.reason,
        stage=_stage(job.progress),
        attempt=job.attempt,
        created=job.created_at,
        started=job.started_at,
        finished=job.finished_at,
        candidate=f"{job.candidate_name}@{job.candidate_version}" if job.candidate_name else None,
        candidate_digest=job.candidate_digest,
        candidate_withdrawn=_withdrawn(store, job),
        parent_digest=job.parent,
        scans=_count(result.get("scans")),
        images=_count(result.get("images")),
        best_epoch=best if isinstance(best, int) else None,
        epochs=_epochs(epochs, tuple(words.parts)),
        sections=() if adaptation is None else adaptation.sections(result, epochs),
        gate=_gate(job.gate or (gates[-1] if gates else None)),
        pictures=_pictures(JobFolder(files, job.id)),
        warnings=tuple(warnings),
        decisions=decisions,
        options=job.options,
        lineage={} if lineage is None else {name: getattr(lineage, name) for name in _LINEAGE},
        words=words,
    )


def _candidate(store: Store, job: Job) -> Artefact | None:
    """The version that the job made, withdrawn or not; None where it cannot be read."""
    return _version(store, job.candidate_name, job.candidate_digest) if job.candidate_name else None


def _version(store: Store, name: str, digest: str | None) -> Artefact | None:
    try:
        versions = store.versions(name)
    except StoreError:
        return None
    return next((v.artefact for v in versions if v.artefact.digest == digest), None)


def _withdrawn(store: Store, job: Job) -> str | None:
    if job.candidate_name is None or job.candidate_version is None:
        return None
    tombstone = store.tombstone(job.candidate_name, job.candidate_version)
    return None if tombstone is None else f"{tombstone.reason} ({tombstone.actor})"


def _parent(store: Store, job: Job) -> Artefact | None:
    """What the job began with, withdrawn or not; None where it cannot be read."""
    return _version(store, job.model, job.parent)


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


def _stage(progress: Mapping[str, Any]) -> str | None:
    stage, epoch, epochs = (progress.get(name) for name in ("stage", "epoch", "epochs"))
    if not stage:
        return None
    said = f"{stage}, epoch {epoch} of {epochs}" if epoch is not None and epochs is not None else str(stage)
    left = progress.get("seconds_left")
    return said if not isinstance(left, int) else f"{said}, about {left} s left"


def _epochs(found: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> tuple[Epoch, ...]:
    # An attempt that goes on from a checkpoint may say an epoch again: the last word counts.
    by_epoch = {data["epoch"]: data for data in found if isinstance(data.get("epoch"), int)}
    return tuple(
        Epoch(
            epoch=epoch,
            loss=number(data.get("loss")),
            parts={name: number(data[name]) for name in parts if name in data},
            foreground=number(data.get("foreground")),
            agreement=number(data.get("agreement")),
            safe=data.get("safe") is not False,
            reason=data.get("reason") or None,
        )
        for epoch, data in sorted(by_epoch.items())
    )


def _gate(found: Mapping[str, Any] | None) -> Gate | None:
    if not found or not isinstance(found.get("passed"), bool):
        return None
    checks = [check for check in found.get("checks", ()) if isinstance(check, dict)]
    summary = found.get("summary")
    said = tuple(map(str, summary)) if isinstance(summary, list) else ()
    return Gate(found["passed"], tuple(_check(check) for check in checks), said)


def _check(found: Mapping[str, Any]) -> CheckRow:
    value, limit, passed = number(found.get("value")), number(found.get("limit")), found.get("passed")
    bound = _BOUNDS.get(str(found.get("bound")), "")
    # What was not measured counts for nothing; but a value that is no number has failed, and stays failed.
    unmeasured = value is None and passed is not False
    name, meaning = str(found.get("name", "")).replace("_", " "), str(found.get("meaning", ""))
    # A verdict of an older worker has no such sentence.
    failure = str(found.get("failure") or f"Not passed: {name} ({meaning}).")
    return CheckRow(
        name=name,
        meaning=meaning,
        value=value,
        limit="–" if limit is None else f"{bound} {limit:.4g}".strip(),
        passed=None if unmeasured or not isinstance(passed, bool) else passed,
        failure=failure if passed is False else None,
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
