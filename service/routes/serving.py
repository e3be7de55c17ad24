"""`/hospitals/{hospital}/serving/{model}`: which version serves a hospital, since when, and who decided."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Response
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy.orm import Session

from model_store.store import Store
from service import assignments
from service.context import InContext
from service.database import Assignment
from service.preconditions import entity_tag, expected_sequence
from service.problems import Problem, problem_responses
from service.routes.models import find_version
from service.routes.parameters import HospitalId, ModelName, Reason, Text
from service.serving import serving

router = APIRouter(tags=["serving"])

IfMatch = Annotated[str | None, Header(description="The ETag of the state that is to be replaced.")]
IfNoneMatch = Annotated[str | None, Header(description="`*`: only if nothing was assigned yet.")]


class Decision(BaseModel):
    """Who decided, and why: kept for good."""

    model_config = ConfigDict(extra="forbid")

    actor: Text
    reason: Reason


class AssignmentBody(Decision):
    """The version that is to serve from now on."""

    version: int | Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")] = Field(
        description="Its number or its digest."
    )


class Entry(BaseModel):
    """One line of the serving log."""

    model_config = ConfigDict(from_attributes=True)

    sequence: int = Field(description="From 1; the entity tag of the state is this number.")
    version: int
    digest: str
    actor: str
    reason: str
    at: datetime = Field(description="In force from this instant (UTC).")
    restores: int | None = Field(description="Set on a rollback: the entry that it put into force again.")


class ServingView(BaseModel):
    """What serves a hospital for a model, or served it at an instant."""

    hospital: str
    model: str
    at: datetime | None = Field(description="The instant that was asked about; null for now.")
    version: int | None
    digest: str | None
    because: Literal["assigned", "newest", "nothing"] = Field(
        description="`newest`: nobody had decided, so the newest version that was not withdrawn served."
    )
    withdrawn: bool = Field(description="Assigned, and withdrawn: scans are refused until one decides anew.")
    assignment: Entry | None


class History(BaseModel):
    """The serving log of a hospital and a model, oldest first."""

    hospital: str
    model: str
    entries: list[Entry]


@router.get("/hospitals/{hospital}/serving/{model}", responses=problem_responses(404, 422))
def get_serving(
    context: InContext,
    hospital: HospitalId,
    model: ModelName,
    response: Response,
    at: Annotated[AwareDatetime | None, Query(description="An instant in the past, with its zone.")] = None,
) -> ServingView:
    """Which version serves now (with the `ETag` that a change must carry), or served at an instant."""
    if at is not None and at > datetime.now(UTC):
        raise Problem(422, "instant-in-the-future", "Not yet known", f"{at.isoformat()} has not come yet.")
    with context.database.read() as session:
        found = serving(context.store, session, hospital, model, at)
    if at is None:
        response.headers["ETag"] = entity_tag(0 if found.assignment is None else found.assignment.sequence)
    return ServingView(
        hospital=hospital,
        model=model,
        at=None if at is None else at.astimezone(UTC),
        version=found.version,
        digest=found.digest,
        because=found.because,
        withdrawn=found.withdrawn,
        assignment=None if found.assignment is None else Entry.model_validate(found.assignment),
    )


@router.put(
    "/hospitals/{hospital}/serving/{model}", responses=problem_responses(400, 404, 409, 410, 412, 422, 428)
)
def put_serving(
    context: InContext,
    hospital: HospitalId,
    model: ModelName,
    body: AssignmentBody,
    response: Response,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Entry:
    """Assign a version: from this instant on it serves the hospital. Requests under way are not disturbed."""
    version, digest = _assignable(context.store, model, body.version)
    with context.database.write() as session:
        current = _sequence(session, hospital, model)
        entry = assignments.assign(
            session,
            hospital,
            model,
            version=version,
            digest=digest,
            expected=expected_sequence(current, if_match, if_none_match),
            actor=body.actor,
            reason=body.reason,
        )
    return _answer(entry, response)


@router.post(
    "/hospitals/{hospital}/serving/{model}/rollback",
    responses=problem_responses(400, 404, 409, 410, 412, 422, 428),
)
def roll_back(
    context: InContext,
    hospital: HospitalId,
    model: ModelName,
    body: Decision,
    response: Response,
    if_match: IfMatch = None,
) -> Entry:
    """Put the previous assignment into force again; called again, the one before it."""
    with context.database.read() as session:
        expected = expected_sequence(_sequence(session, hospital, model), if_match, None)
        target = assignments.before(session, hospital, model)
    if target is not None:
        # Hashing takes its time, so it is done before the write lock is taken; `expected` keeps the two
        # together.
        _assignable(context.store, model, target.digest)
    with context.database.write() as session:
        entry = assignments.roll_back(
            session, hospital, model, expected=expected, actor=body.actor, reason=body.reason
        )
    return _answer(entry, response)


@router.get("/hospitals/{hospital}/serving/{model}/history", responses=problem_responses(404, 422))
def get_history(context: InContext, hospital: HospitalId, model: ModelName) -> History:
    """Every assignment there ever was. Nothing is ever changed or removed."""
    with context.database.read() as session:
        entries = assignments.history(session, hospital, model)
    return History(hospital=hospital, model=model, entries=[Entry.model_validate(entry) for entry in entries])


def _sequence(session: Session, hospital: str, model: str) -> int:
    entry = assignments.assignment(session, hospital, model)
    return 0 if entry is None else entry.sequence


def _answer(entry: Assignment, response: Response) -> Entry:
    response.headers["ETag"] = entity_tag(entry.sequence)
    return Entry.model_validate(entry)


def _assignable(store: Store, model: str, version: int | str) -> tuple[int, str]:
    """Number and digest of a version that may serve: it opens whole, and it is no part of a composite."""
    found = find_version(store, model, version).artefact
    # Opening verifies every byte: a version that would fail at the first scan is refused now instead.
    artefact = store.open(f"{model}@{found.version}")
    part_of = artefact.manifest.part_of
    if part_of is not None:
        raise Problem(
            409,
            "part-of-a-composite",
            "Not offered on its own",
            f"'{artefact}' is a part of '{part_of}': assign a version of '{part_of}' instead.",
        )
    return artefact.version, artefact.digest
