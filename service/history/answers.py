"""Which version answered for a scan or a series, by which decision, and on what evidence."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from model_store.errors import StoreError
from model_store.store import Store
from service import corrections
from service.catalog.adapted import job_of
from service.corrections import CorrectionView
from service.database import Acceptance, Assignment, Job, LookedAt, Observation, ObservedLabel
from service.database.hospitals import require_hospital
from service.errors import CorrectionUnknown
from service.jobs.status import passed
from service.observation.rows import keyed_with

MOST_ANSWERS = 100


@dataclass(frozen=True)
class Sought:
    """Answers to a series (its UID), to a scan (`sha256:…` of the bytes as they were sent), or of a request.

    `day`: only those of a day in UTC.
    """

    series: str | None = None
    scan: str | None = None
    request: str | None = None
    day: date | None = None


class DecisionView(BaseModel):
    """An entry of the serving log."""

    model_config = ConfigDict(from_attributes=True)

    model: str
    sequence: int
    artefact: str = Field(description="`name@version`.")
    digest: str
    at: datetime
    actor: str
    reason: str
    override: bool = Field(description="Whether the gate's rejection, or a missing verdict, was overridden.")
    by_default: bool = Field(description="Whether no person decided: what the hospital was first served.")
    restores: int | None = Field(description="The entry that a rollback returned to.")
    precision: str

    @classmethod
    def of(cls, row: Assignment) -> DecisionView:
        """The row as it is shown."""
        names = set(cls.model_fields) - {"artefact"}
        artefact = f"{row.artefact or row.model}@{row.version}"
        return cls(artefact=artefact, **{name: getattr(row, name) for name in names})


class JobFacts(BaseModel):
    """The job that made a version or a verdict."""

    id: str
    kind: str
    state: str
    actor: str | None
    model: str | None
    candidate: str | None = Field(description="`name@version` that it published.")
    passed: bool | None = Field(description="The gate's verdict; null without one.")
    gate: dict[str, Any] | None
    created_at: datetime
    finished_at: datetime | None
    reason: str | None

    @classmethod
    def of(cls, job: Job) -> JobFacts:
        """The facts of a row."""
        named = None if job.candidate_name is None else f"{job.candidate_name}@{job.candidate_version}"
        return cls(
            id=job.id,
            kind=job.kind,
            state=job.state,
            actor=job.actor,
            model=job.model or None,
            candidate=named,
            passed=passed(job),
            gate=job.gate,
            created_at=job.created_at,
            finished_at=job.finished_at,
            reason=job.reason,
        )


class AcceptanceFacts(BaseModel):
    """What a person decided on the report of an acceptance."""

    model_config = ConfigDict(from_attributes=True)

    job: str
    model: str
    version: str
    artefact: str | None
    verdict: str
    digest: str = Field(description="That of its report.")
    accepted: bool
    override: bool = Field(description="Accepted against the verdict.")
    measured_by: str
    actor: str
    reason: str
    at: datetime

    @classmethod
    def of(cls, row: Acceptance, store: Store) -> AcceptanceFacts:
        """The row as it is shown."""
        names = set(cls.model_fields) - {"artefact"}
        return cls(artefact=reference(store, row.version), **{name: getattr(row, name) for name in names})


class LabelFacts(BaseModel):
    """One label of an answer."""

    confidence: float
    volume_ml: float | None
    parts: int | None


class AnswerAccount(BaseModel):
    """One answer: what made it, who decided that it may, and what people made of it."""

    request: str
    at: datetime
    way: str = Field(description="How it left: `http`, `viewer`, `pacs` or `job`.")
    actor: str
    model: str = Field(description="The model that hospitals are assigned versions of.")
    artefact: str | None = Field(description="`name@version`; null where the store no longer has it.")
    version: str = Field(description="Digest of the version that answered.")
    network: str | None = Field(description="Digest of the network in it; null where that is not known.")
    personalization: str | None = Field(description="The choice within the version, as `hospital`.")
    graph: str = Field(description="Digest of the graph that computed it.")
    precision: str
    provider: str
    locum: str = Field(description="Version of the software.")
    usual: bool = Field(description="Whether the request left it to the service which network answers.")
    decision: DecisionView | None = Field(description="The entry of the serving log in force then.")
    decided: bool = Field(
        description="Whether that entry's version answered; false where a request named another, or an alarm "
        "put the global model in its place."
    )
    withdrawn: str | None = Field(description="When, by whom and why the version was withdrawn since.")
    made_by: JobFacts | None = Field(
        description="The job that made the version, with its gate; null of one that was published otherwise."
    )
    acceptances: list[AcceptanceFacts] = Field(
        description="Those of the version at this hospital, newest first."
    )
    scanner: str | None
    shift: float | None
    shift_at: str | None
    warnings: list[str]
    unlike: int
    labels: dict[str, LabelFacts]
    looked_at: datetime | None
    looked_by: str | None
    correction: CorrectionView | None


def answers(session: Session, store: Store, hospital: str, sought: Sought) -> list[AnswerAccount]:
    """The newest answers that are sought, at most 100, newest first.

    Series and scans are known by keyed digests alone. Raises HospitalUnknown.
    """
    require_hospital(session, hospital)
    keyed = keyed_with(session)
    query = select(Observation).where(Observation.hospital == hospital)
    if sought.series is not None:
        query = query.where(Observation.series == keyed(sought.series))
    if sought.scan is not None:
        query = query.where(Observation.scan == keyed(sought.scan))
    if sought.request is not None:
        query = query.where(Observation.request == sought.request)
    if sought.day is not None:
        begin, end = bounds(sought.day, sought.day)
        query = query.where(Observation.at >= begin, Observation.at < end)
    rows = session.scalars(query.order_by(Observation.id.desc()).limit(MOST_ANSWERS)).all()
    return [_account(session, store, hospital, row) for row in rows]


def bounds(first: date, last: date) -> tuple[datetime, datetime]:
    """The instants at which the first day begins and the last ends, in UTC."""
    return (
        datetime.combine(first, time(), UTC),
        datetime.combine(last, time(), UTC) + timedelta(days=1),
    )


def reference(store: Store, digest: str) -> str | None:
    """`name@version` of a digest; None where the store does not have it, or the caller may not see it."""
    with suppress(StoreError):
        record = store.lineage.locate(digest)
        return None if record is None else str(record)
    return None


def _account(session: Session, store: Store, hospital: str, row: Observation) -> AnswerAccount:
    entry = _in_force(session, hospital, row)
    job, looked = job_of(session, row.version), session.get(LookedAt, row.id)
    choice = row.choice or {}
    same = ("request", "at", "way", "actor", "model", "version", "graph", "precision", "provider", "locum")
    more = ("usual", "scanner", "shift", "shift_at", "warnings", "unlike")
    return AnswerAccount(
        **{name: getattr(row, name) for name in (*same, *more)},
        artefact=reference(store, row.version),
        network=choice.get("model"),
        personalization=choice.get("personalization"),
        decision=None if entry is None else DecisionView.of(entry),
        decided=entry is not None and entry.digest == row.version,
        withdrawn=_withdrawn(store, row.version),
        made_by=None if job is None else JobFacts.of(job),
        acceptances=_acceptances(session, store, hospital, row.version),
        labels=_labels(session, row.id),
        looked_at=None if looked is None else looked.at,
        looked_by=None if looked is None else looked.actor,
        correction=_correction(session, hospital, row),
    )


def _in_force(session: Session, hospital: str, row: Observation) -> Assignment | None:
    query = select(Assignment).where(Assignment.hospital == hospital, Assignment.model == row.model)
    return session.scalars(
        query.where(Assignment.at <= row.at).order_by(Assignment.sequence.desc()).limit(1)
    ).first()


def _withdrawn(store: Store, digest: str) -> str | None:
    with suppress(StoreError):
        record = store.lineage.locate(digest)
        found = None if record is None else store.versions.tombstone(record.name, record.number)
        return None if found is None else f"{found.time:%Y-%m-%d} by {found.actor}: {found.reason}"
    return None


def _acceptances(session: Session, store: Store, hospital: str, version: str) -> list[AcceptanceFacts]:
    query = select(Acceptance).where(Acceptance.hospital == hospital, Acceptance.version == version)
    found = session.scalars(query.order_by(Acceptance.id.desc()).limit(MOST_ANSWERS))
    return [AcceptanceFacts.of(each, store) for each in found]


def _labels(session: Session, number: int) -> dict[str, LabelFacts]:
    query = select(ObservedLabel).where(ObservedLabel.observation == number).order_by(ObservedLabel.label)
    rows: Sequence[ObservedLabel] = session.scalars(query).all()
    return {
        each.label: LabelFacts(confidence=each.confidence, volume_ml=each.volume_ml, parts=each.parts)
        for each in rows
    }


def _correction(session: Session, hospital: str, row: Observation) -> CorrectionView | None:
    try:
        found = corrections.get(session, hospital, row.request)
    except CorrectionUnknown:
        return None
    return found if found.observation == row.id else None
