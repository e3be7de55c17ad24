"""Who accepted which version at a hospital, and whether the hospital demands that before an assignment.

Two persons are behind an acceptance: who measured, and who decided on the report. The newest decision on a
version in a precision counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.acceptance.report import WORDS, is_whole
from service.audit import trail
from service.database import Acceptance, AcceptanceRule, Job, caller_of
from service.database.job_states import TERMINAL
from service.errors import (
    AcceptanceMissing,
    AcceptanceNotMet,
    AcceptanceSuperseded,
    JobStillRunning,
    NoAcceptance,
    SecondPersonNeeded,
)
from service.identity import keys
from service.job_kinds import KINDS, names_where
from service.jobs import records
from service.serving.demanded import acceptance_rule

# Acceptances that were measured after one, among which one of the same scans is looked for.
_LATER = 50


@dataclass(frozen=True)
class Decision:
    """What a person says of a report: whether it is accepted, why, and whether against the verdict."""

    accepted: bool
    reason: str
    actor: str
    override: bool = False


def document_of(session: Session, job_id: str) -> tuple[Job, Mapping[str, Any]]:
    """The job, and its report with digest and signature.

    Raises JobUnknown, JobStillRunning, NoAcceptance.
    """
    job = records.get(session, job_id)
    if not KINDS[job.kind].accepts:
        raise NoAcceptance(
            f"job {job_id} is of kind '{job.kind}': expected an acceptance, which POST "
            "/hospitals/HOSPITAL/acceptances starts"
        )
    if job.state not in TERMINAL:
        raise JobStillRunning(f"job {job_id} is {job.state}: its report is made at its end")
    document = job.result
    if job.state != "succeeded" or not document:
        raise NoAcceptance(f"job {job_id} is {job.state} and made no report: {job.reason}")
    if not is_whole(document):
        raise NoAcceptance(
            f"the report of job {job_id} is not the one that was digested ({document['digest']}): it was "
            "changed in the database, so measure again"
        )
    return job, document


def superseded_by(session: Session, job: Job, report: Mapping[str, Any]) -> str | None:
    """The newest job that measured the version in this precision on the same scans after this one."""
    query = select(Job).where(
        Job.hospital == job.hospital,
        Job.kind.in_(names_where(lambda kind: kind.accepts)),
        Job.parent == job.parent,
        Job.state == "succeeded",
        Job.created_at > job.created_at,
    )

    def measured(of: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
        return of["precision"], frozenset(each["scan"] for each in of["scans"])

    for later in session.scalars(query.order_by(Job.created_at.desc()).limit(_LATER)):
        if later.result and measured(later.result["report"]) == measured(report):
            return later.id
    return None


def decide(session: Session, job_id: str, decision: Decision) -> Acceptance:
    """Accept or reject the version by a report, for its hospital.

    Raises:
        JobUnknown, JobStillRunning, NoAcceptance, AcceptanceSuperseded.
        SecondPersonNeeded: the person that measured decides, too.
        AcceptanceNotMet: accepted against the verdict, and `override` is false.
    """
    job, document = document_of(session, job_id)
    report = document["report"]
    assert job.hospital is not None
    if (later := superseded_by(session, job, report)) is not None:
        raise AcceptanceSuperseded(
            f"the report of job {job_id} is superseded: job {later} measured '{report['version']}' on the "
            "same scans after it, so decide on that one"
        )
    _require_second_person(session, job, report["measured_by"], decision.actor)
    met = report["verdict"] == "met"
    if decision.accepted and not met and not decision.override:
        raise AcceptanceNotMet(
            f"{WORDS[report['verdict']]} by the report of job {job_id}. To accept '{report['version']}' at "
            f"'{job.hospital}' all the same, say override=true: it is recorded with actor and reason."
        )
    made = Acceptance(
        job=job_id,
        hospital=job.hospital,
        model=report["model"],
        version=report["version_digest"],
        precision=report["precision"],
        verdict=report["verdict"],
        digest=document["digest"],
        accepted=decision.accepted,
        override=decision.accepted and not met,
        measured_by=report["measured_by"],
        actor=decision.actor,
        reason=decision.reason,
        at=datetime.now(UTC),
    )
    session.add(made)
    session.flush()
    details = {
        name: getattr(made, name)
        for name in ("job", "model", "precision", "verdict", "digest", "accepted", "override", "measured_by")
    }
    trail.append(
        session,
        "acceptance.decided",
        hospital=job.hospital,
        version=made.version,
        actor=decision.actor,
        details={**details, "reason": decision.reason},
    )
    return made


def decision_on(session: Session, job_id: str) -> Acceptance | None:
    """The newest decision on the report of a job."""
    query = select(Acceptance).where(Acceptance.job == job_id)
    return session.scalars(query.order_by(Acceptance.id.desc()).limit(1)).first()


def listed(session: Session, hospital: str, limit: int) -> list[Acceptance]:
    """The newest decisions of a hospital, newest first; the route checks the caller's right to see it."""
    query = select(Acceptance).where(Acceptance.hospital == hospital)
    return list(session.scalars(query.order_by(Acceptance.id.desc()).limit(limit)))


def demand(session: Session, hospital: str, demanded: bool, actor: str, reason: str) -> None:
    """Demand an acceptance before every assignment from now on, or no longer."""
    row = AcceptanceRule(
        hospital=hospital, demanded=demanded, actor=actor, reason=reason, at=datetime.now(UTC)
    )
    session.add(row)
    details = {"demanded": demanded, "reason": reason}
    trail.append(session, "acceptance.demanded", hospital=hospital, actor=actor, details=details)


def is_accepted(session: Session, hospital: str, version: str) -> bool:
    """Whether the newest decision of a hospital on a version, by its digest, accepts it."""
    own = (Acceptance.hospital == hospital, Acceptance.version == version)
    newest = session.scalars(select(Acceptance).where(*own).order_by(Acceptance.id.desc()).limit(1)).first()
    return newest is not None and newest.accepted


def require_accepted(session: Session, hospital: str, name: str, version: str, precision: str) -> None:
    """Reject a version, by its name and digest, that the hospital has to accept first.

    Raises AcceptanceMissing.
    """
    rule = acceptance_rule(session, hospital)
    if rule is None:
        return
    own = (Acceptance.hospital == hospital, Acceptance.version == version, Acceptance.precision == precision)
    newest = session.scalars(select(Acceptance).where(*own).order_by(Acceptance.id.desc()).limit(1)).first()
    if newest is not None and newest.accepted:
        return
    found = "none was approved"
    if newest is not None:
        found = f"{newest.actor} rejected it on {newest.at:%Y-%m-%d}: {newest.reason}"
    waiting = [] if newest is not None else _undecided(session, hospital, version)
    to_do = (
        f"locum approve {waiting[0]} --reason WHY decides on the report that is there"
        if waiting
        else f"locum accept {name} --hospital {hospital} --scans DIR --masks DIR measures it, and another "
        "person approves the report"
    )
    raise AcceptanceMissing(
        f"hospital '{hospital}' demands an acceptance before a version serves it (by {rule.actor}, "
        f"{rule.at:%Y-%m-%d}): expected one of '{name}' in {precision}, {found}. {to_do}.",
        acceptances=waiting,
    )


def _undecided(session: Session, hospital: str, version: str) -> list[str]:
    query = select(Job.id).where(
        Job.hospital == hospital,
        Job.kind.in_(names_where(lambda kind: kind.accepts)),
        Job.parent == version,
        Job.state == "succeeded",
    )
    return list(session.scalars(query.order_by(Job.created_at.desc()).limit(10)))


def _require_second_person(session: Session, job: Job, measured_by: str, actor: str) -> None:
    caller = caller_of(session)
    same = measured_by == actor
    if caller.authenticated:
        same = bool(keys.people_behind(session, measured_by) & keys.people_behind(session, actor))
    if same:
        raise SecondPersonNeeded(
            f"{measured_by} measured this acceptance, and {actor} can be the same person: two persons stand "
            "behind an acceptance, so let another approver decide",
            job=job.id,
        )
