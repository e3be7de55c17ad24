"""What a hospital demands before a version serves it: an acceptance, or a decision inside a change plan."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database.models import AcceptanceRule, ChangePlanRow


def acceptance_rule(session: Session, hospital: str, at: datetime | None = None) -> AcceptanceRule | None:
    """The rule of a hospital that demands an acceptance, now or at an instant; None for one that does not."""
    query = select(AcceptanceRule).where(AcceptanceRule.hospital == hospital)
    if at is not None:
        query = query.where(AcceptanceRule.at <= at)
    found = session.scalars(query.order_by(AcceptanceRule.id.desc()).limit(1)).first()
    return found if found is not None and found.demanded else None


def change_plan(
    session: Session, hospital: str, model: str, at: datetime | None = None
) -> ChangePlanRow | None:
    """The row of the change plan that is in force, now or at an instant; None without one."""
    query = select(ChangePlanRow).where(ChangePlanRow.hospital == hospital, ChangePlanRow.model == model)
    if at is not None:
        query = query.where(ChangePlanRow.at <= at)
    found = session.scalars(query.order_by(ChangePlanRow.id.desc()).limit(1)).first()
    return None if found is None or found.plan is None else found


def needs_decision(session: Session, hospital: str, model: str, at: datetime | None = None) -> str | None:
    """Why no version begins to serve the hospital without an assignment, in words; None where one may."""
    if (rule := acceptance_rule(session, hospital, at)) is not None:
        return f"the hospital demands an acceptance first (by {rule.actor}, {rule.at:%Y-%m-%d})"
    if (plan := change_plan(session, hospital, model, at)) is not None:
        return f"the model has a change plan there (by {plan.actor}, {plan.at:%Y-%m-%d})"
    return None
