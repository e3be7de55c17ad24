"""A period of a hospital, from rows alone: what served it, what came, what changed, what people decided."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, and_, case, func, or_, select
from sqlalchemy.orm import Session

from model_store.store import Store
from service import corrections, shadow
from service.about import NOTICE, locum_version
from service.corrections import CorrectionFigures
from service.database import (
    Acceptance,
    ApiKey,
    Assignment,
    ChangePlanRow,
    Job,
    LookedAt,
    Observation,
    Shadow,
    WatchEvent,
    WatchRule,
    caller_of,
)
from service.database.hospitals import require_hospital
from service.history.answers import AcceptanceFacts, DecisionView, JobFacts, bounds, reference
from service.shadow import ShadowReport

MOST_ROWS = 1000
"""Rows of one kind: the newest are listed, and how many are left out is said."""
_JUDGING = ("mask-check", "quantisation")


class Served(DecisionView):
    """What served the hospital for a model at the end of the period."""

    passed: bool | None = Field(description="The verdict of the gate on it; null without one.")


class Arrivals(BaseModel):
    """Answers to the scans of one scanner, by one version."""

    model: str
    artefact: str | None
    version: str
    scanner: str | None
    answers: int
    series: int = Field(description="Different DICOM series.")
    scans: int = Field(description="Different scans.")
    first: datetime
    last: datetime
    shift: float | None = Field(description="Mean.")
    unlike: int = Field(description="Answers to scans unlike the training scans.")
    looked_at: int = Field(description="Masks that a person looked at.")


class AlarmFacts(BaseModel):
    """An alarm of the watch, and a person's answer to it."""

    model_config = ConfigDict(from_attributes=True)

    model: str
    scanner: str
    stream: str | None
    since: datetime | None
    at: datetime
    answered_at: datetime | None
    answered_by: str | None
    reason: str | None


class ChangeFacts(BaseModel):
    """A change of the version, of a scanner's software or of Locum, as the watch saw it."""

    model_config = ConfigDict(from_attributes=True)

    kind: str = Field(description="`version`, `software` or `locum`.")
    model: str
    scanner: str
    at: datetime
    details: dict[str, Any]


class SoftwareFacts(BaseModel):
    """A version of Locum that answered."""

    locum: str
    answers: int
    first: datetime
    last: datetime


class RuleFacts(BaseModel):
    """What an approver set for the watch."""

    model_config = ConfigDict(from_attributes=True)

    model: str
    months: float
    stop: str
    actor: str
    reason: str
    at: datetime


class PlanFacts(BaseModel):
    """A change plan of a model that was written, or ended."""

    model_config = ConfigDict(from_attributes=True)

    model: str
    plan: dict[str, Any] | None = Field(description="Null: from then on there is none.")
    actor: str
    reason: str
    at: datetime


class KeyFacts(BaseModel):
    """An API key that was valid in the period, without its secret."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    role: str
    hospital: str | None = Field(description="Null: every hospital.")
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class PeriodReport(BaseModel):
    """A period of a hospital. Lists have the newest 1,000; `left_out` says how many more there are."""

    hospital: str
    name: str
    site: str | None
    first: date
    last: date
    made_at: datetime
    locum: str = Field(description="The version that made the report.")
    inventory: list[Served] = Field(description="What served at the end of the period.")
    arrivals: list[Arrivals]
    alarms: list[AlarmFacts] = Field(description="Raised or answered in the period.")
    decisions: list[DecisionView]
    rules: list[RuleFacts]
    plans: list[PlanFacts] = Field(description="Change plans that were written or ended in the period.")
    jobs: list[JobFacts] = Field(description="Those that ended with a candidate, or a verdict on one.")
    acceptances: list[AcceptanceFacts]
    corrections: list[CorrectionFigures] = Field(
        description="Of answers of the period. Bad masks are corrected more often than good ones: these are "
        "not the figures of all answers."
    )
    shadows: list[ShadowReport] = Field(description="Those that ran in the period, over all their answers.")
    changes: list[ChangeFacts]
    software: list[SoftwareFacts]
    keys: list[KeyFacts] | None = Field(description="For a caller with the role admin; null for others.")
    left_out: dict[str, int]
    notice: str = NOTICE


def report(session: Session, store: Store, hospital: str, first: date, last: date) -> PeriodReport:
    """Read a period from the first day to the last, in UTC. Raises HospitalUnknown."""
    row = require_hospital(session, hospital)
    begin, end = bounds(first, last)
    left_out: dict[str, int] = {}

    def listed(name: str, table: Any, condition: ColumnElement[bool], order: Any) -> list[Any]:
        found = session.scalars(select(table).where(condition).order_by(order.desc()).limit(MOST_ROWS)).all()
        if len(found) == MOST_ROWS:
            count = session.scalar(select(func.count()).select_from(table).where(condition)) or 0
            if count > MOST_ROWS:
                left_out[name] = count - MOST_ROWS
        return list(found)

    def within(column: Any) -> ColumnElement[bool]:
        return and_(column >= begin, column < end)

    alarm = and_(WatchEvent.hospital == hospital, WatchEvent.kind == "alarm")
    change = and_(WatchEvent.hospital == hospital, WatchEvent.kind != "alarm")
    decided = and_(Assignment.hospital == hospital, within(Assignment.at))
    ruled = and_(WatchRule.hospital == hospital, within(WatchRule.at))
    planned = and_(ChangePlanRow.hospital == hospital, within(ChangePlanRow.at))
    ended = and_(Job.hospital == hospital, within(Job.finished_at))
    candidate = and_(ended, or_(Job.candidate_name.is_not(None), Job.kind.in_(_JUDGING)))
    ran = and_(
        Shadow.hospital == hospital, Shadow.began < end, or_(Shadow.ended.is_(None), Shadow.ended >= begin)
    )
    raised = and_(alarm, or_(within(WatchEvent.at), within(WatchEvent.answered_at)))
    events = listed("alarms", WatchEvent, raised, WatchEvent.id)
    jobs = listed("jobs", Job, candidate, Job.finished_at)
    accepted = and_(Acceptance.hospital == hospital, within(Acceptance.at))
    return PeriodReport(
        hospital=hospital,
        name=row.name,
        site=row.site,
        first=first,
        last=last,
        made_at=datetime.now(UTC),
        locum=locum_version(),
        inventory=_inventory(session, hospital, end),
        arrivals=arrivals_of(session, store, and_(Observation.hospital == hospital, within(Observation.at))),
        alarms=[AlarmFacts.model_validate(each) for each in events],
        decisions=[DecisionView.of(each) for each in listed("decisions", Assignment, decided, Assignment.id)],
        rules=[RuleFacts.model_validate(each) for each in listed("rules", WatchRule, ruled, WatchRule.id)],
        plans=[
            PlanFacts.model_validate(each)
            for each in listed("plans", ChangePlanRow, planned, ChangePlanRow.id)
        ],
        jobs=[JobFacts.of(each) for each in jobs],
        acceptances=[
            AcceptanceFacts.of(each, store)
            for each in listed("acceptances", Acceptance, accepted, Acceptance.id)
        ],
        corrections=corrections.summary(session, hospital, between=(begin, end)),
        shadows=[
            shadow.report(session, each, points=0) for each in listed("shadows", Shadow, ran, Shadow.id)
        ],
        changes=[
            ChangeFacts.model_validate(each)
            for each in listed("changes", WatchEvent, and_(change, within(WatchEvent.at)), WatchEvent.id)
        ],
        software=_software(session, and_(Observation.hospital == hospital, within(Observation.at))),
        keys=_keys(session, hospital, begin, end),
        left_out=left_out,
    )


def _inventory(session: Session, hospital: str, end: datetime) -> list[Served]:
    newest: dict[str, Assignment] = {}
    query = select(Assignment).where(Assignment.hospital == hospital, Assignment.at < end)
    for entry in session.scalars(query.order_by(Assignment.sequence)):
        newest[entry.model] = entry
    gates: Mapping[str | None, Any] = {
        job.candidate_digest: (job.gate or {}).get("passed")
        for job in session.scalars(
            select(Job)
            .where(Job.candidate_digest.in_([entry.digest for entry in newest.values()]))
            .order_by(Job.created_at)
        )
    }
    return [
        Served(**DecisionView.of(entry).model_dump(), passed=gates.get(entry.digest))
        for _, entry in sorted(newest.items())
    ]


def arrivals_of(session: Session, store: Store, condition: ColumnElement[bool]) -> list[Arrivals]:
    """The answers that meet a condition, by model, version and scanner."""
    groups = (Observation.model, Observation.version, Observation.scanner)
    query = (
        select(
            *groups,
            func.count(Observation.id),
            func.count(Observation.series.distinct()),
            func.count(Observation.scan.distinct()),
            func.min(Observation.at),
            func.max(Observation.at),
            func.avg(Observation.shift),
            func.sum(case((Observation.unlike > 0, 1), else_=0)),
            func.count(LookedAt.observation),
        )
        .outerjoin(LookedAt, LookedAt.observation == Observation.id)
        .where(condition)
        .group_by(*groups)
        .order_by(*groups)
        .limit(MOST_ROWS)
    )
    names = (
        "model",
        "version",
        "scanner",
        "answers",
        "series",
        "scans",
        "first",
        "last",
        "shift",
        "unlike",
        "looked_at",
    )
    rows = [dict(zip(names, each, strict=True)) for each in session.execute(query)]
    return [Arrivals(artefact=reference(store, each["version"]), **each) for each in rows]


def _software(session: Session, condition: ColumnElement[bool]) -> list[SoftwareFacts]:
    query = (
        select(
            Observation.locum, func.count(Observation.id), func.min(Observation.at), func.max(Observation.at)
        )
        .where(condition)
        .group_by(Observation.locum)
        .order_by(func.min(Observation.at))
    )
    return [
        SoftwareFacts(locum=locum, answers=count, first=begin, last=end)
        for locum, count, begin, end in session.execute(query)
    ]


def _keys(session: Session, hospital: str, begin: datetime, end: datetime) -> list[KeyFacts] | None:
    """The keys that see the hospital, for a caller that may list keys."""
    caller = caller_of(session)
    if not caller.has("admin"):
        return None
    query = select(ApiKey).where(
        ApiKey.created_at < end,
        or_(ApiKey.revoked_at.is_(None), ApiKey.revoked_at >= begin),
        or_(ApiKey.expires_at.is_(None), ApiKey.expires_at >= begin),
    )
    # As `service.identity.keys.listed`: a key of every hospital is seen by callers of every hospital.
    own = ApiKey.hospital == hospital
    query = query.where(own if caller.hospitals is not None else or_(own, ApiKey.hospital.is_(None)))
    found = session.scalars(query.order_by(ApiKey.created_at).limit(MOST_ROWS))
    return [KeyFacts.model_validate(each) for each in found]
