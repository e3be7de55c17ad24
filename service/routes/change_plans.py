"""`…/serving/{model}/plan`: the change plan of a hospital's model."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from service import change_plan
from service.catalog.version import require_name
from service.change_plan import ChangePlan
from service.database.hospitals import require_hospital
from service.http.audit import Audited, AuditedRoute
from service.http.dependencies import AsApprover, AsReader, actor_of
from service.http.parameters import HospitalId, ModelName
from service.http.problems import problem_responses
from service.routes.serving import Decision

router = APIRouter(tags=["serving"], route_class=AuditedRoute)


class PlanBody(Decision):
    """A change plan, and why."""

    plan: ChangePlan | None = Field(description="Null: the model has no plan from now on.")


class FirstSignature(BaseModel):
    """A change outside the plan that one person has signed."""

    version: str = Field(description="Digest.")
    actor: str
    reason: str
    at: datetime


class PlanView(BaseModel):
    """The change plan that is in force, and what waits for a second signature."""

    hospital: str
    model: str
    plan: ChangePlan | None = Field(description="Null: an assignment needs one approver and no plan.")
    actor: str | None = Field(description="Who wrote it.")
    reason: str | None
    since: datetime | None
    waiting: list[FirstSignature]


@router.get("/hospitals/{hospital}/serving/{model}/plan", responses=problem_responses(404, 422))
def get_plan(context: AsReader, hospital: HospitalId, model: ModelName) -> PlanView:
    """Return the change plan, and the changes outside it that wait for a second signature."""
    with context.database.read() as session:
        require_hospital(session, hospital)
        written = change_plan.plan_of(session, hospital, model)
        signatures = [
            FirstSignature(version=each.version, actor=each.actor, reason=each.reason, at=each.at)
            for each in change_plan.waiting(session, hospital, model)
        ]
    if written is None:
        require_name(context.store, model)
    return PlanView(
        hospital=hospital,
        model=model,
        plan=None if written is None else written.plan,
        actor=None if written is None else written.actor,
        reason=None if written is None else written.reason,
        since=None if written is None else written.at,
        waiting=signatures,
    )


@router.put(
    "/hospitals/{hospital}/serving/{model}/plan", responses=problem_responses(400, 404, 408, 413, 422)
)
def put_plan(
    context: Annotated[AsApprover, Audited("plan.written", refused_only=True)],
    hospital: HospitalId,
    model: ModelName,
    body: PlanBody,
) -> PlanView:
    """Write the change plan: what one approver may assign. Outside it two must sign, each with a reason.

    A rollback is always allowed.
    """
    require_name(context.store, model)
    with context.database.write() as session:
        require_hospital(session, hospital)
        actor = actor_of(context.database.caller, body.actor)
        change_plan.set_plan(session, hospital, model, body.plan, actor, body.reason)
    return get_plan(context, hospital, model)
