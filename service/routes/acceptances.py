"""`/hospitals/{hospital}/acceptances` and `/jobs/{job}/acceptance`: measure, report, decide, demand."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool
from sqlalchemy.orm import Session
from starlette.responses import HTMLResponse

from service.acceptance import decisions
from service.adaptation.acceptances import AcceptanceBody, AcceptanceRequest
from service.adaptation.card.reading import read_view
from service.database import Acceptance
from service.database.hospitals import require_hospital
from service.http.audit import Audited, AuditedRoute
from service.http.dependencies import AsApprover, AsOperator, AsReader, actor_of
from service.http.origins import self_contained
from service.http.parameters import IDEMPOTENT, HospitalId, IdempotencyKey, JobId, Reason, Text
from service.http.problems import problem_responses
from service.jobs.files import JobFolder
from service.jobs.views import JobView
from service.pacs.configuration import require_storing
from service.serving.demanded import acceptance_rule

router = APIRouter(tags=["acceptance"], route_class=AuditedRoute)


class AcceptanceDecision(BaseModel):
    """What a person decided on a report."""

    job: str = Field(description="The job that measured.")
    model: str
    version: str = Field(description="Digest of the version.")
    precision: str = Field(description="The precision of the graph that was measured.")
    verdict: str
    digest: str = Field(description="Digest of the canonical JSON of the report.")
    accepted: bool
    override: bool = Field(description="Whether it was accepted against the verdict.")
    measured_by: str
    actor: str = Field(description="Who decided; never the one that measured.")
    reason: str
    at: datetime

    @classmethod
    def of(cls, row: Acceptance) -> AcceptanceDecision:
        """The row as it is shown."""
        return cls(**{name: getattr(row, name) for name in cls.model_fields})


class AcceptanceDocument(BaseModel):
    """The report, its digest (SHA-256 of its JSON with sorted keys and without blanks), and the decision."""

    report: dict[str, Any]
    digest: str
    signature: dict[str, str] | None = Field(
        description="Ed25519 over `locum-document/1 acceptance DIGEST`: `key`, `signature` in base64. "
        "Null without LOCUM_SIGNING_KEY."
    )
    decision: AcceptanceDecision | None
    superseded_by: str | None = Field(
        description="The job that measured the same version on the same scans after this one, by which alone "
        "is decided; null of the newest."
    )


class DecisionBody(BaseModel):
    """Whether the version is accepted by a report, and why."""

    model_config = ConfigDict(extra="forbid")

    accepted: StrictBool
    reason: Reason
    actor: Text | None = Field(None, description="As in an assignment.")
    override: StrictBool = Field(
        False, description="Accept although the thresholds are not met, or were not asked. It is recorded."
    )


class DemandBody(BaseModel):
    """Whether an assignment to the hospital needs an acceptance."""

    model_config = ConfigDict(extra="forbid")

    demanded: StrictBool
    reason: Reason
    actor: Text | None = Field(None, description="As in an assignment.")


class Acceptances(BaseModel):
    """Whether the hospital demands acceptances, and its decisions, newest first."""

    hospital: str
    demanded: bool
    demanded_by: str | None = Field(description="Who demands it; null where none is demanded.")
    since: datetime | None
    decisions: list[AcceptanceDecision]


@router.post(
    "/hospitals/{hospital}/acceptances",
    status_code=202,
    responses={202: IDEMPOTENT, **problem_responses(404, 409, 410, 422, 503)},
)
def start_acceptance(
    request: Request,
    context: Annotated[AsOperator, Audited("job.started")],
    hospital: HospitalId,
    body: AcceptanceBody,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Score a version on a hospital's scans with masks, in the background, and report.

    What is scored is what `/segment` answers this hospital. `GET /jobs/{job}/acceptance` has the report,
    `POST` there the decision of another person.
    """
    with context.database.read() as session:
        require_hospital(session, hospital)
    if body.pacs is not None:
        require_storing(context.settings.pacs, body.pacs.name, hospital)
    by = actor_of(context.database.caller, body.actor)
    asked = AcceptanceRequest(context, hospital, body, by, idempotency_key, request.state.request_id)
    job, created = asked.start()
    response.headers["Location"] = f"/jobs/{job}"
    if not created:
        response.headers["Idempotency-Replayed"] = "true"
    return read_view(context.store, context.database, job)


@router.get("/hospitals/{hospital}/acceptances", responses=problem_responses(404, 422))
def list_acceptances(
    context: AsReader, hospital: HospitalId, limit: Annotated[int, Query(ge=1, le=500)] = 100
) -> Acceptances:
    """List what was decided at a hospital, and whether it demands acceptances."""
    with context.database.read() as session:
        return _listed(session, hospital, limit)


@router.put("/hospitals/{hospital}/acceptances", responses=problem_responses(400, 403, 404, 408, 413, 422))
def demand_acceptances(
    context: Annotated[AsApprover, Audited("acceptance.demanded", refused_only=True)],
    hospital: HospitalId,
    body: DemandBody,
) -> Acceptances:
    """Demand an acceptance before every assignment to the hospital, or no longer.

    A rollback returns to what served before, accepted or not. What serves now is not affected, and nothing
    else begins to serve without an assignment.
    """
    with context.database.write() as session:
        require_hospital(session, hospital)
        actor = actor_of(context.database.caller, body.actor)
        decisions.demand(session, hospital, body.demanded, actor, body.reason)
        session.flush()
        return _listed(session, hospital, 100)


@router.get("/jobs/{job}/acceptance", responses=problem_responses(404, 409, 422))
def get_acceptance(context: AsReader, job: JobId) -> AcceptanceDocument:
    """Return the report of an acceptance: figures without a pixel or a name, and what was decided on it."""
    with context.database.read() as session:
        measured, document = decisions.document_of(session, job)
        found = decisions.decision_on(session, job)
        return AcceptanceDocument(
            **document,
            decision=None if found is None else AcceptanceDecision.of(found),
            superseded_by=decisions.superseded_by(session, measured, document["report"]),
        )


@router.get(
    "/jobs/{job}/acceptance/report.html",
    response_class=HTMLResponse,
    responses=problem_responses(404, 409, 422),
)
def get_acceptance_page(context: Annotated[AsOperator, Audited("card.read")], job: JobId) -> HTMLResponse:
    """Return the report as one self-contained HTML page, with pictures of the worst answers until they
    expire.

    The report's JSON is inside, as it was digested.
    """
    # Its templates are imported for the first page.
    from service.acceptance.page import render

    document = get_acceptance(context, job)
    pictures = JobFolder(context.settings.open_files(), job).pictures()
    return self_contained(render(document.model_dump(mode="json"), pictures))


@router.post("/jobs/{job}/acceptance", responses=problem_responses(400, 403, 404, 408, 409, 413, 422))
def decide_acceptance(
    context: Annotated[AsApprover, Audited("acceptance.decided", refused_only=True)],
    job: JobId,
    body: DecisionBody,
) -> AcceptanceDecision:
    """Accept or reject the version at the hospital by the report. The newest decision counts.

    Another person than the one that measured decides.
    """
    with context.database.write() as session:
        decisions.document_of(session, job)
        actor = actor_of(context.database.caller, body.actor)
        said = decisions.Decision(body.accepted, body.reason, actor, body.override)
        return AcceptanceDecision.of(decisions.decide(session, job, said))


def _listed(session: Session, hospital: str, limit: int) -> Acceptances:
    require_hospital(session, hospital)
    rule = acceptance_rule(session, hospital)
    return Acceptances(
        hospital=hospital,
        demanded=rule is not None,
        demanded_by=None if rule is None else rule.actor,
        since=None if rule is None else rule.at,
        decisions=[AcceptanceDecision.of(row) for row in decisions.listed(session, hospital, limit)],
    )
