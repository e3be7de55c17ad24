"""`/hospitals`: register and list hospitals."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import IntegrityError

from service.audit import trail
from service.database import Database, Hospital
from service.database.hospitals import require_hospital, require_visible, visible_hospitals
from service.http.audit import AuditedRoute
from service.http.dependencies import AsAdmin, AsReader
from service.http.parameters import HospitalId, Text
from service.http.problems import problem_responses

router = APIRouter(tags=["hospitals"], route_class=AuditedRoute)


class HospitalBody(BaseModel):
    """A hospital's name and, for a member of the federation, its site."""

    model_config = ConfigDict(extra="forbid")

    name: Text = Field(description="A name for people; programs use the id in the path.")
    site: Text | None = Field(None, description="The site of a member hospital in the federation.")


class HospitalView(BaseModel):
    """A registered hospital, as stored. A record may predate the present rules for names."""

    name: str
    site: str | None
    id: str
    created_at: datetime
    updated_at: datetime


class HospitalList(BaseModel):
    """All visible hospitals, by id."""

    hospitals: list[HospitalView]


@router.get("/hospitals", responses=problem_responses(422))
def list_hospitals(context: AsReader) -> HospitalList:
    """List every registered hospital."""
    with context.database.read() as session:
        return HospitalList(hospitals=[_view(row) for row in visible_hospitals(session)])


@router.get("/hospitals/{hospital}", responses=problem_responses(404, 422))
def get_hospital(context: AsReader, hospital: HospitalId) -> HospitalView:
    """Return one hospital."""
    with context.database.read() as session:
        return _view(require_hospital(session, hospital))


@router.put(
    "/hospitals/{hospital}",
    responses={201: {"model": HospitalView, "description": "Registered"}, **problem_responses(408, 413, 422)},
)
def put_hospital(
    context: AsAdmin, hospital: HospitalId, body: HospitalBody, response: Response
) -> HospitalView:
    """Register a hospital, or change its name or site."""
    try:
        row, created = _put(context.database, hospital, body)
    except IntegrityError:
        # Another request was the first to register it, so that now there is a row to change.
        row, created = _put(context.database, hospital, body)
    response.status_code = 201 if created else 200
    return _view(row)


def _put(database: Database, hospital: str, body: HospitalBody) -> tuple[Hospital, bool]:
    now = datetime.now(UTC)
    with database.write() as session:
        require_visible(session, hospital)
        row = session.get(Hospital, hospital)
        if row is not None:
            changes = {"site": [row.site, body.site]} if row.site != body.site else {}
            row.name, row.site, row.updated_at = body.name, body.site, now
            session.flush()
            trail.append(session, "hospital.changed", hospital=hospital, details=changes)
            return row, False
        row = Hospital(id=hospital, name=body.name, site=body.site, created_at=now, updated_at=now)
        session.add(row)
        session.flush()
        trail.append(session, "hospital.registered", hospital=hospital, details={"site": [None, row.site]})
        return row, True


def _view(row: Hospital) -> HospitalView:
    return HospitalView(
        id=row.id, name=row.name, site=row.site, created_at=row.created_at, updated_at=row.updated_at
    )
