"""What an approver set for the watch of a hospital's model, before anything happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database import Watch, WatchRule

Stop = Literal["warn", "global", "hold"]
"""What happens at `investigate`: answers warn, the global model answers, or none is given."""

MONTHS = 12.0
"""Months between false alarms, where nothing was set."""


@dataclass(frozen=True)
class Rule:
    """The setting of a hospital and model."""

    months: float = MONTHS
    stop: Stop = "warn"


def rule_of(session: Session, hospital: str, model: str) -> Rule:
    """The newest setting; the default where there is none."""
    query = select(WatchRule).where(WatchRule.hospital == hospital, WatchRule.model == model)
    found = session.scalars(query.order_by(WatchRule.id.desc()).limit(1)).first()
    return Rule() if found is None else Rule(found.months, found.stop)  # type: ignore[arg-type]


def rules_of(session: Session, **named: str) -> dict[tuple[str, str], Rule]:
    """The newest settings of all hospitals and models, or of those that are named."""
    newest = select(func.max(WatchRule.id)).filter_by(**named).group_by(WatchRule.hospital, WatchRule.model)
    found = session.scalars(select(WatchRule).where(WatchRule.id.in_(newest)))
    return {(each.hospital, each.model): Rule(each.months, each.stop) for each in found}  # type: ignore[arg-type]


def stop_of(session: Session, hospital: str, model: str) -> Stop | None:
    """What is to happen to answers now; None where no alarm waits for a person."""
    query = select(Watch.state).where(
        Watch.hospital == hospital, Watch.model == model, Watch.state == "investigate"
    )
    return rule_of(session, hospital, model).stop if session.scalar(query.limit(1)) else None
