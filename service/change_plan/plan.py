"""What a change plan allows, whether a version is inside it, and the two signatures of one that is not.

After the three parts of FDA's guidance on predetermined change control plans: what may change, by which
protocol it is tested, and what its impact is. The third is words for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from service.acceptance import decisions
from service.audit import trail
from service.catalog.adapted import adapted_for, job_of
from service.database import Assignment, ChangePlanRow, ChangeSignature, in_turn
from service.identity import keys
from service.serving.demanded import change_plan

_LOCK = "the change plans"
FEDERATION = "federation"
"""The recipe of a version that the federation made, not a job at the hospital."""
# How long a first signature waits for the second.
_DAYS = 14


class ChangePlan(BaseModel):
    """What may be assigned by one person. What is left out is not asked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipes: list[str] = Field(
        min_length=1,
        max_length=32,
        description="Presets of the jobs that may make the version, such as `auto` and `masks`; "
        f"`{FEDERATION}` for a version of the model that no job at the hospital made.",
    )
    checks: list[str] = Field(
        [], max_length=64, description="Checks of the gate that the version must have passed, by name."
    )
    masks: int | None = Field(
        None, ge=1, le=100_000, description="Masks of the hospital that must have judged it, at least."
    )
    at_least: float | None = Field(
        None,
        ge=-1,
        le=1,
        description="Lower bound of the change of Dice on these masks, at least: -0.005 is half a point.",
    )
    acceptance: bool = Field(False, description="Whether the hospital must have accepted the version.")
    every_days: float = Field(
        0, ge=0, le=3650, description="Days between two decisions on the model at the hospital, at least."
    )
    impact: str = Field(
        "", max_length=5000, description="What a change does to patients, and what limits that: for people."
    )


@dataclass(frozen=True)
class Written:
    """A plan, who wrote it, and when."""

    plan: ChangePlan
    actor: str
    reason: str
    at: datetime


@dataclass(frozen=True)
class Signed:
    """What `sign` found: the deviations from the plan, and who signed before; both empty inside the plan."""

    deviations: tuple[str, ...] = ()
    first: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the version may be assigned now."""
        return not self.deviations or self.first is not None


def plan_of(session: Session, hospital: str, model: str) -> Written | None:
    """The plan that is in force; None without one."""
    found = change_plan(session, hospital, model)
    if found is None:
        return None
    return Written(ChangePlan.model_validate(found.plan), found.actor, found.reason, found.at)


def set_plan(
    session: Session, hospital: str, model: str, plan: ChangePlan | None, actor: str, reason: str
) -> None:
    """Write a plan, in force from now on; None: there is none any more."""
    in_turn(session, _LOCK)
    content = None if plan is None else plan.model_dump()
    row = {"hospital": hospital, "model": model, "actor": actor, "reason": reason}
    session.add(ChangePlanRow(**row, plan=content, at=datetime.now(UTC)))
    details: dict[str, Any] = {"model": model, "reason": reason, "plan": content}
    trail.append(session, "plan.written", hospital=hospital, actor=actor, details=details)


def deviations(
    session: Session, hospital: str, model: str, artefact: Artefact, plan: ChangePlan, *, overridden: bool
) -> tuple[str, ...]:
    """In which points assigning a version would be outside the plan, each as a sentence."""
    job = job_of(session, artefact.digest)
    gate: Mapping[str, Any] = {} if job is None or job.gate is None else job.gate
    found = []
    if overridden:
        found.append("its gate is overridden")
    recipe = FEDERATION
    if adapted_for(artefact) is not None:
        recipe = "unknown" if job is None else str(job.options.get("preset", "auto"))
    if recipe not in plan.recipes:
        found.append(f"it was made by '{recipe}', and the plan allows {', '.join(plan.recipes)}")
    passed = {str(each.get("name")) for each in gate.get("checks", ()) if each.get("passed") is True}
    if missing := [name for name in plan.checks if name not in passed]:
        found.append(f"it has not passed {', '.join(missing)}")
    masks, bound = _judged(gate, {} if job is None or job.result is None else job.result)
    if plan.masks is not None and masks < plan.masks:
        found.append(f"{masks} masks judged it, and the plan asks for {plan.masks}")
    if plan.at_least is not None and (bound is None or bound < plan.at_least):
        known = "no bound is known" if bound is None else f"the bound is {100 * bound:+.1f}"
        found.append(f"Dice must change by at least {100 * plan.at_least:+.1f} points, and {known}")
    if plan.acceptance and not decisions.is_accepted(session, hospital, artefact.digest):
        found.append("the hospital has not accepted it")
    last = _last_decision(session, hospital, model)
    if plan.every_days and last is not None and datetime.now(UTC) - last < timedelta(days=plan.every_days):
        found.append(
            f"the last decision was on {last:%Y-%m-%d}, and {plan.every_days:g} days are to be between two"
        )
    return tuple(found)


def _judged(gate: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[int, float | None]:
    """How many masks judged a candidate, and their lower bound: of its check, else of those held out."""
    by_masks = gate.get("masks") or {}
    if by_masks:
        return int(by_masks["masks"]), float(by_masks["at_least"])
    held_out = result.get("held_out") or {}
    if held_out:
        return int(result.get("masks", 0)), float(held_out["at_least"])
    return 0, None


def _last_decision(session: Session, hospital: str, model: str) -> datetime | None:
    query = select(Assignment.at).where(
        Assignment.hospital == hospital, Assignment.model == model, ~Assignment.by_default
    )
    return session.scalar(query.order_by(Assignment.sequence.desc()).limit(1))


def sign(
    session: Session,
    hospital: str,
    model: str,
    artefact: Artefact,
    actor: str,
    reason: str,
    *,
    overridden: bool,
) -> Signed:
    """Sign an assignment. Inside the plan, and without one, this signature is enough.

    Outside, the first signature is stored, and waits 14 days for that of another person.
    """
    written = plan_of(session, hospital, model)
    if written is None:
        return Signed()
    found = deviations(session, hospital, model, artefact, written.plan, overridden=overridden)
    if not found:
        return Signed()
    in_turn(session, _LOCK)
    others = [each for each in waiting(session, hospital, model) if each.version == artefact.digest]
    own = keys.people_behind(session, actor) | {actor}
    for each in others:
        if not own & (keys.people_behind(session, each.actor) | {each.actor}):
            return Signed(found, f"{each.actor}: {each.reason}")
    if not others:
        row = {"hospital": hospital, "model": model, "version": artefact.digest}
        session.add(ChangeSignature(**row, actor=actor, reason=reason, at=datetime.now(UTC)))
        about: dict[str, Any] = {"model": model, "reason": reason, "deviations": list(found)}
        trail.append(
            session, "plan.signed", hospital=hospital, version=artefact.digest, actor=actor, details=about
        )
    return Signed(found)


def waiting(session: Session, hospital: str, model: str) -> Sequence[ChangeSignature]:
    """The first signatures that wait for a second, oldest first: none older than the last decision."""
    since = datetime.now(UTC) - timedelta(days=_DAYS)
    last = _last_decision(session, hospital, model)
    query = select(ChangeSignature).where(
        ChangeSignature.hospital == hospital, ChangeSignature.model == model, ChangeSignature.at > since
    )
    if last is not None:
        query = query.where(ChangeSignature.at > last)
    return session.scalars(query.order_by(ChangeSignature.id)).all()
