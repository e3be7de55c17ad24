"""`…/serving/{model}/shadow`: a version that answers unseen, beside the one that serves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field, StringConstraints

from service import shadow
from service.catalog.adapted import adapted_for, require_gate
from service.catalog.assignable import resolve_assignable
from service.catalog.served import serving
from service.database.hospitals import require_hospital
from service.errors import RequestInvalid, ShadowUnknown
from service.http.audit import Audited, AuditedRoute
from service.http.dependencies import AsApprover, AsReader, actor_of
from service.http.parameters import HospitalId, ModelName
from service.http.problems import problem_responses
from service.routes.serving import Decision
from service.shadow import Rule, ShadowReport
from service.validation import VERSION

router = APIRouter(tags=["serving"], route_class=AuditedRoute)


class ShadowBody(Decision):
    """The version that answers unseen."""

    version: int | Annotated[str, StringConstraints(pattern=VERSION)] = Field(
        description="Number or digest of the version, or `name@number` of a version adapted to this hospital."
    )
    every: int = Field(
        10, ge=1, le=10_000, description="It answers one scan in so many, in a worker, after the answer left."
    )
    rule: Rule | None = Field(
        None,
        description="When it is assigned without a person. A version that was adapted to the hospital must "
        "have passed its gate for a rule. Without a rule a person decides.",
    )


class ShadowList(BaseModel):
    """The newest shadows of a hospital's model, newest first."""

    shadows: list[ShadowReport]


@router.put(
    "/hospitals/{hospital}/serving/{model}/shadow",
    status_code=201,
    responses=problem_responses(400, 404, 408, 409, 410, 413, 422),
)
def begin_shadow(
    context: Annotated[AsApprover, Audited("shadow.began", refused_only=True)],
    hospital: HospitalId,
    model: ModelName,
    body: ShadowBody,
    response: Response,
) -> ShadowReport:
    """Let a version answer some scans unseen, beside the one that serves.

    The answers that are served, and when they come, stay as they are. What both versions found is compared,
    and both with later corrections.
    """
    artefact = resolve_assignable(context.store, hospital, model, body.version)
    with context.database.write() as session:
        require_hospital(session, hospital)
        served = serving(context.store, session, hospital, model, None, context.settings.new_versions)
        if served.digest == artefact.digest:
            reason = f"{artefact} serves {hospital} already: name the version that is to answer unseen"
            raise RequestInvalid([{"field": "body.version", "reason": reason}])
        if body.rule is not None and adapted_for(artefact) is not None:
            require_gate(session, artefact, False)
        made = shadow.begin(
            session,
            hospital,
            model,
            version=artefact.digest,
            artefact=str(artefact),
            every=body.every,
            rule=body.rule,
            actor=actor_of(context.database.caller, body.actor),
            reason=body.reason,
        )
        found = shadow.report(session, made)
    context.shadows.forget()
    response.headers["Location"] = f"/hospitals/{hospital}/serving/{model}/shadow"
    return found


@router.get("/hospitals/{hospital}/serving/{model}/shadow", responses=problem_responses(404, 422))
def list_shadows(context: AsReader, hospital: HospitalId, model: ModelName) -> ShadowList:
    """Compare the versions that answered unseen with those that were served."""
    with context.database.read() as session:
        require_hospital(session, hospital)
        found = shadow.listed(session, hospital, model)
        return ShadowList(shadows=[shadow.report(session, each) for each in found])


@router.post(
    "/hospitals/{hospital}/serving/{model}/shadow/end",
    responses=problem_responses(400, 404, 408, 413, 422),
)
def end_shadow(
    context: Annotated[AsApprover, Audited("shadow.ended", refused_only=True)],
    hospital: HospitalId,
    model: ModelName,
    body: Decision,
) -> ShadowReport:
    """End the shadow. What it found stays."""
    with context.database.write() as session:
        require_hospital(session, hospital)
        found = shadow.active(session, hospital, model)
        if found is None:
            raise ShadowUnknown(f"no version is the shadow of '{model}' at {hospital} now")
        shadow.end(session, found, actor_of(context.database.caller, body.actor), body.reason)
        ended = shadow.report(session, found)
    context.shadows.forget()
    return ended
