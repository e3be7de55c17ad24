"""`/hospitals`: register and list hospitals."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from service.audit import trail
from service.database import Database, Hospital, caller_of
from service.database.hospitals import require_hospital, require_visible, visible_hospitals
from service.errors import GrantRefused, RequestInvalid
from service.http.audit import Audited, AuditedRoute
from service.http.conditions import entity_tag, expected_sequence
from service.http.dependencies import AsAdmin, AsReader, actor_of
from service.http.parameters import MOST_LISTED, HospitalId, Limit, Page, Reason, Text
from service.http.problems import problem_responses
from service.validation import HOSPITAL_ID

router = APIRouter(tags=["hospitals"], route_class=AuditedRoute)


class HospitalBody(BaseModel):
    """A hospital's name and, for a member of the federation, its site."""

    model_config = ConfigDict(extra="forbid")

    name: Text = Field(description="A name for people; programs use the id in the path.")
    site: Text | None = Field(None, description="The site of a member hospital in the federation.")
    shares_model: bool | None = Field(
        None,
        description="Whether the site's own model answers callers of other hospitals, who name the site. "
        "Left out: as it was, and false at first.",
    )
    reason: Reason | None = Field(
        None, description="Why the site of a registered hospital changes. Required then, as is If-Match."
    )
    actor: Text | None = Field(
        None,
        description="Who changes it, where the service authenticates no caller (LOCUM_AUTH=none); as in an "
        "assignment.",
    )


class HospitalView(BaseModel):
    """A registered hospital, as stored. A record may predate the present rules for names."""

    name: str
    site: str | None
    shares_model: bool = Field(
        description="Whether the site's own model answers callers of other hospitals, who name the site."
    )
    id: str
    created_at: datetime
    updated_at: datetime


class HospitalList(Page):
    """The visible hospitals, by id."""

    hospitals: list[HospitalView]


@router.get("/hospitals", responses=problem_responses(422))
def list_hospitals(
    context: AsReader,
    after: Annotated[str | None, Query(pattern=HOSPITAL_ID, description="List the ids after this.")] = None,
    limit: Limit = MOST_LISTED,
) -> HospitalList:
    """List the registered hospitals."""
    with context.database.read() as session:
        found = visible_hospitals(session, limit + 1, after)
        page = found[:limit]
        more = len(found) > limit
        return HospitalList(hospitals=[_view(row) for row in page], next=page[-1].id if more else None)


@router.get("/hospitals/{hospital}", responses=problem_responses(404, 422))
def get_hospital(context: AsReader, hospital: HospitalId, response: Response) -> HospitalView:
    """Return one hospital, with the ETag that a change of its site needs."""
    with context.database.read() as session:
        row = require_hospital(session, hospital)
    response.headers["ETag"] = _tag(row)
    return _view(row)


@router.put(
    "/hospitals/{hospital}",
    responses={
        201: {"model": HospitalView, "description": "Registered"},
        **problem_responses(400, 403, 408, 412, 413, 422, 428),
    },
)
def put_hospital(
    context: Annotated[AsAdmin, Audited("hospital.changed", refused_only=True)],
    hospital: HospitalId,
    body: HospitalBody,
    response: Response,
    if_match: Annotated[
        str | None, Header(description="The ETag of the hospital; required to change `site`.")
    ] = None,
) -> HospitalView:
    """Register a hospital, or change its name or site.

    Another site is another model for the hospital's patients: a decision of an admin of all hospitals, which
    the audit trail keeps with its reason. Whether the site's own model answers others, the hospital's own
    admin decides.
    """
    try:
        row, created = _put(context.database, hospital, body, if_match)
    except IntegrityError:
        # Another request was the first to register it, so that now there is a row to change.
        row, created = _put(context.database, hospital, body, if_match)
    response.status_code = 201 if created else 200
    response.headers["ETag"] = _tag(row)
    return _view(row)


def _put(
    database: Database, hospital: str, body: HospitalBody, if_match: str | None
) -> tuple[Hospital, bool]:
    now = datetime.now(UTC)
    with database.write() as session:
        require_visible(session, hospital)
        # Locked, so that no other change comes between the comparison with If-Match and the commit.
        row = session.get(Hospital, hospital, with_for_update=True)
        moved = row is not None and row.site != body.site
        if (moved or (row is None and body.site is not None)) and caller_of(session).hospitals is not None:
            raise GrantRefused(
                "`site` says which member's own model answers: expected an admin of all hospitals to set it, "
                "found one of this hospital; leave it as it is"
            )
        if moved or if_match is not None:
            expected_sequence(0 if row is None else _sequence(row), if_match)
        if row is not None:
            details = _decision(session, row, body) if moved else {}
            if body.shares_model not in (None, row.shares_model):
                details["shares_model"] = [row.shares_model, body.shares_model]
                row.shares_model = bool(body.shares_model)
            row.name, row.site, row.updated_at = body.name, body.site, now
            session.flush()
            trail.append(session, "hospital.changed", hospital=hospital, details=details)
            return row, False
        row = Hospital(
            id=hospital,
            name=body.name,
            site=body.site,
            shares_model=bool(body.shares_model),
            created_at=now,
            updated_at=now,
        )
        session.add(row)
        session.flush()
        registered: dict[str, Any] = {"site": [None, row.site]}
        if row.shares_model:
            registered["shares_model"] = [False, True]
        trail.append(session, "hospital.registered", hospital=hospital, details=registered)
        return row, True


def _decision(session: Session, row: Hospital, body: HospitalBody) -> dict[str, Any]:
    """What the audit trail keeps of a change of the site. Raises RequestInvalid without a reason."""
    if body.reason is None:
        raise RequestInvalid([{"field": "body.reason", "reason": "required where the site changes"}])
    return {
        "site": [row.site, body.site],
        "actor": actor_of(caller_of(session), body.actor),
        "reason": body.reason,
    }


def _sequence(row: Hospital) -> int:
    """Microseconds of the last change, which no two changes share."""
    return int(row.updated_at.timestamp() * 1_000_000)


def _tag(row: Hospital) -> str:
    return entity_tag(_sequence(row))


def _view(row: Hospital) -> HospitalView:
    return HospitalView(
        id=row.id,
        name=row.name,
        site=row.site,
        shares_model=row.shares_model,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
