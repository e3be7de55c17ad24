"""`/hospitals/{hospital}/serving/{model}`: assign versions, roll back, and read the serving log."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Response
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StrictBool, StringConstraints
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.manifest import Precision
from service import change_plan
from service.acceptance.decisions import require_accepted
from service.catalog.adapted import adapted_for, require_gate, require_second_person
from service.catalog.assignable import resolve_assignable
from service.catalog.network import select_network
from service.catalog.precision import newest_reduced
from service.catalog.served import ServedVersion, serving
from service.catalog.version import ResolvedVersion, require_name
from service.change_plan import Signed
from service.context import ServiceContext
from service.database import Assignment
from service.database.hospitals import site_of_hospital
from service.errors import RequestInvalid, SecondSignatureNeeded
from service.http.audit import Audited, AuditedRoute
from service.http.conditions import entity_tag, expected_sequence
from service.http.dependencies import AsApprover, AsReader, actor_of
from service.http.parameters import HospitalId, ModelName, Reason, Text
from service.http.problems import Problem, problem_responses
from service.inference.sessions import probe_provider
from service.quantisation.precision import check_provider
from service.serving import assignments
from service.validation import VERSION

router = APIRouter(tags=["serving"], route_class=AuditedRoute)

IfMatch = Annotated[str | None, Header(description="The ETag of the state to replace.")]
IfNoneMatch = Annotated[str | None, Header(description="`*`: only if nothing was assigned yet.")]


class Decision(BaseModel):
    """Actor and reason of a decision; the log keeps both."""

    model_config = ConfigDict(extra="forbid")

    actor: Text | None = Field(
        None,
        description="Who decides. Required where the service authenticates no caller (LOCUM_AUTH=none); "
        "elsewhere the log has the caller, and a request that names another actor is rejected.",
    )
    reason: Reason


class AssignmentBody(Decision):
    """The version to serve from now on."""

    version: int | Annotated[str, StringConstraints(pattern=VERSION)] = Field(
        description="Number or digest of the version, or `name@number` of a version adapted to this hospital."
    )
    precision: Precision = Field(
        "float32",
        description="The precision of the graph that answers: `float32`, or `int8` (`float16` on a GPU), of "
        "which the newest graph that passed its gate is taken (`POST /hospitals/{hospital}/quantisations`).",
    )
    override: StrictBool = Field(
        False, description="Assign an adapted version that did not pass its gate. The log records it."
    )


class Entry(BaseModel):
    """One line of the serving log."""

    sequence: int = Field(
        description="Number of the entry, from 1; also the entity tag of the state that a decision made."
    )
    artefact: str = Field(
        description="`name@version` of the model, or of the version adapted to the hospital."
    )
    version: int
    digest: str
    actor: str
    reason: str
    at: datetime = Field(description="In force from this instant (UTC).")
    restores: int | None = Field(description="The entry that a rollback returned to; null otherwise.")
    override: bool = Field(
        description="Whether the assignment overrode the gate's rejection, or a missing verdict."
    )
    precision: Precision = Field(description="The precision of the graph that answers.")
    reduced: str | None = Field(
        description="Digest of the version with the graph in that precision; null for float32."
    )
    by_default: bool = Field(
        description="Whether no person decided: the service recorded what the hospital was first served."
    )

    @classmethod
    def of(cls, row: Assignment) -> Entry:
        """The row as it is shown."""
        return cls(
            sequence=row.sequence,
            artefact=_reference(row),
            version=row.version,
            digest=row.digest,
            actor=row.actor,
            reason=row.reason,
            at=row.at,
            restores=row.restores,
            override=row.override,
            precision=row.precision,
            reduced=row.reduced,
            by_default=row.by_default,
        )


class ServingView(BaseModel):
    """The version that serves a hospital for a model, now or at an instant."""

    hospital: str
    model: str
    at: datetime | None = Field(description="The requested instant; null for now.")
    artefact: str | None = Field(description="`name@version` of the version that serves; null if none does.")
    version: int | None
    digest: str | None
    because: Literal["assigned", "kept", "newest", "nothing"] = Field(
        description="`assigned`: by a decision; `kept`: no decision was made, so the version serves that was "
        "the newest when the hospital was first served; `newest`: the hospital was not served yet, so its "
        "next scan is answered by the newest version that is not withdrawn; `nothing`: none can, or the "
        "hospital demands acceptances, or has a change plan of the model, and no version was assigned."
    )
    withdrawn: bool = Field(
        description="Whether the version was withdrawn: scans are rejected until another version is assigned."
    )
    newer: str | None = Field(
        description="`name@version` of the model's newest version, if it was published after the one that "
        "serves, or none does: it serves only once it is assigned (`LOCUM_NEW_VERSIONS`)."
    )
    returns_to: str | None = Field(
        None, description="`name@version` that a rollback would return to now; null if nothing served before."
    )
    flagged: list[str] = Field(description="Withdrawn ancestors of the version; it answers with a warning.")
    assignment: Entry | None


class History(BaseModel):
    """The serving log of a hospital and a model, oldest first."""

    hospital: str
    model: str
    entries: list[Entry]


@router.get("/hospitals/{hospital}/serving/{model}", responses=problem_responses(404, 422))
def get_serving(
    context: AsReader,
    hospital: HospitalId,
    model: ModelName,
    response: Response,
    at: Annotated[
        AwareDatetime | None, Query(description="An instant in the past, with its time zone.")
    ] = None,
) -> ServingView:
    """Return the version that serves now (with the `ETag` that a change must carry), or that served at an
    instant.
    """
    at = None if at is None else _in_utc(at)
    if at is not None and at > datetime.now(UTC):
        raise Problem(422, "instant-in-the-future", "Not yet known", f"{at.isoformat()} has not come yet.")
    with context.database.read() as session:
        found = serving(context.store, session, hospital, model, at, context.settings.new_versions)
        before = assignments.before(session, hospital, model) if at is None else None
    if at is None:
        response.headers["ETag"] = entity_tag(assignments.decided(found.assignment))
    return ServingView(
        hospital=hospital,
        model=model,
        at=at,
        artefact=None if found.version is None else f"{found.artefact}@{found.version}",
        version=found.version,
        digest=found.digest,
        because=found.because,
        withdrawn=found.withdrawn,
        newer=None if found.newer is None else f"{model}@{found.newer}",
        returns_to=None if before is None else _reference(before),
        flagged=list(found.flagged),
        assignment=None if found.assignment is None else Entry.of(found.assignment),
    )


@router.put(
    "/hospitals/{hospital}/serving/{model}",
    responses=problem_responses(400, 404, 408, 409, 410, 412, 413, 422, 428),
)
def put_serving(
    context: Annotated[AsApprover, Audited("version.assigned", refused_only=True)],
    hospital: HospitalId,
    model: ModelName,
    body: AssignmentBody,
    response: Response,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Entry:
    """Assign a version: from this instant on it serves the hospital. Running requests are not affected.

    The log keeps what served before, by a decision or not, so that a rollback returns to it. A version that
    was adapted to the hospital must have passed its gate, unless the request overrides the gate. A hospital
    that demands acceptances is assigned what was accepted there. Outside the model's change plan the first
    request is a signature (409), and that of another approver assigns the version.
    """
    artefact = resolve_assignable(context.store, hospital, model, body.version)
    adapted = adapted_for(artefact) is not None
    reduced = _reduced(context, hospital, artefact, body.precision)
    with context.database.read() as session:
        served = serving(context.store, session, hospital, model, None, context.settings.new_versions)
    with context.database.write() as session:
        expected = expected_sequence(_sequence(session, hospital, model), if_match, if_none_match)
        if adapted and context.settings.two_person_rule:
            require_second_person(session, artefact)
        overridden = adapted and require_gate(session, artefact, body.override)
        require_accepted(session, hospital, str(artefact), artefact.digest, body.precision)
        actor = actor_of(context.database.caller, body.actor)
        signed = change_plan.sign(
            session, hospital, model, artefact, actor, body.reason, overridden=overridden
        )
        if signed.complete:
            _keep_served(session, hospital, model, served)
            entry = assignments.assign(
                session,
                hospital,
                model,
                version=artefact.version,
                digest=artefact.digest,
                expected=expected,
                actor=actor,
                reason=_reason(body.reason, signed),
                artefact=artefact.name if adapted else None,
                override=overridden,
                precision=body.precision,
                reduced=reduced,
            )
    if not signed.complete:
        # The first signature is committed by now.
        raise SecondSignatureNeeded(
            f"'{artefact}' is outside the change plan of '{model}' at {hospital}: "
            f"{'; '.join(signed.deviations)}. {actor} has signed: another approver must assign it within 14 "
            "days, too, with a reason"
        )
    return _answer(entry, response)


@router.post(
    "/hospitals/{hospital}/serving/{model}/rollback",
    responses=problem_responses(400, 404, 408, 409, 410, 412, 413, 422, 428),
)
def roll_back(
    context: Annotated[AsApprover, Audited("version.rolled-back", refused_only=True)],
    hospital: HospitalId,
    model: ModelName,
    body: Decision,
    response: Response,
    if_match: IfMatch = None,
) -> Entry:
    """Return to what served before, by a decision or not; called again, to what served before that.

    A version that served once may serve again, whether its gate was overridden or not.
    """
    with context.database.read() as session:
        expected = expected_sequence(_sequence(session, hospital, model), if_match, None)
        target = assignments.before(session, hospital, model)
    if target is not None:
        # Hashing takes its time, so it is done before the write lock is taken; `expected` and `to` keep the
        # two together.
        resolve_assignable(context.store, hospital, model, f"{target.artefact or model}@{target.digest}")
        if target.reduced is not None:
            context.store.by_digest(target.reduced)
    with context.database.write() as session:
        entry = assignments.roll_back(
            session,
            hospital,
            model,
            expected=expected,
            actor=actor_of(context.database.caller, body.actor),
            reason=body.reason,
            to=0 if target is None else target.sequence,
        )
    return _answer(entry, response)


@router.get("/hospitals/{hospital}/serving/{model}/history", responses=problem_responses(404, 422))
def get_history(context: AsReader, hospital: HospitalId, model: ModelName) -> History:
    """List every assignment, and what was served by default. The log is append-only."""
    with context.database.read() as session:
        entries = assignments.history(session, hospital, model)
    if not entries:
        require_name(context.store, model)
    return History(hospital=hospital, model=model, entries=[Entry.of(entry) for entry in entries])


def _reduced(context: ServiceContext, hospital: str, artefact: Artefact, precision: Precision) -> str | None:
    """The digest of the version with the graph that is to answer the hospital's scans; None for float32.

    Raises:
        PrecisionUnavailable: there is none of the network that answers, or the device does not take it.
        SelectionError, StoreError: no network of the version answers this hospital.
    """
    if precision == "float32":
        return None
    check_provider(precision, probe_provider(context.settings.device))
    with context.database.read() as session:
        home = site_of_hospital(session, hospital)
    found = ResolvedVersion(artefact, "assigned", home, hospital, None)
    return newest_reduced(context.store, select_network(context.store, found).model, precision).digest


def _reason(own: str, signed: Signed) -> str:
    """The reason of the log: outside the plan also why, and the first signature."""
    if signed.first is None:
        return own
    return f"{own}; outside the change plan ({'; '.join(signed.deviations)}); first signed by {signed.first}"


def _reference(row: Assignment) -> str:
    return f"{row.artefact or row.model}@{row.version}"


def _in_utc(at: datetime) -> datetime:
    try:
        return at.astimezone(UTC)
    except OverflowError:
        reason = f"expected an instant of the years 1 to 9999 in UTC, found {at.isoformat()}"
        raise RequestInvalid([{"field": "query.at", "reason": reason}]) from None


def _sequence(session: Session, hospital: str, model: str) -> int:
    return assignments.decided(assignments.assignment(session, hospital, model))


def _keep_served(session: Session, hospital: str, model: str, served: ServedVersion) -> None:
    """Record what served without a decision, so that the first assignment can be taken back.

    It was looked up before the write lock was taken. What another request recorded since then stays.
    """
    if served.because == "newest" and served.version is not None and served.digest is not None:
        seen = 0 if served.assignment is None else served.assignment.sequence
        assignments.keep(
            session, hospital, model, version=served.version, digest=served.digest, replaces=seen
        )


def _answer(entry: Assignment, response: Response) -> Entry:
    response.headers["ETag"] = entity_tag(assignments.decided(entry))
    return Entry.of(entry)
