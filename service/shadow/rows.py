"""The rows of shadows: which version answers unseen, and what both versions found in each scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from service.audit import trail
from service.database import Shadow, ShadowAnswer, ShadowLabel, in_turn
from service.errors import ShadowRuns

_LOCK = "the shadows"
# Rows that one transaction deletes.
_AT_ONCE = 5000


class Rule(BaseModel):
    """When the second version is assigned without a person: written by an approver beforehand."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    corrections: int = Field(ge=10, le=10_000, description="After so many corrected or accepted answers.")
    gain: float = Field(
        0.0,
        ge=-1,
        le=1,
        description="The lower bound of the gain of Dice, as the mean over labels on these answers, must be "
        "above this. It is looked at then and at each doubling; together these are wrong in 5 % of cases.",
    )


@dataclass(frozen=True)
class Both:
    """One label of a scan by both versions. `agreement` is their Dice, None where neither found it."""

    agreement: float | None
    served_voxels: int
    shadow_voxels: int
    served_ml: float | None
    shadow_ml: float | None
    served_confidence: float
    shadow_confidence: float


def begin(
    session: Session,
    hospital: str,
    model: str,
    *,
    version: str,
    artefact: str,
    every: int,
    rule: Rule | None,
    actor: str,
    reason: str,
) -> Shadow:
    """Let a version answer one scan in `every` unseen. Raises ShadowRuns while another one does."""
    in_turn(session, _LOCK)
    found = active(session, hospital, model)
    if found is not None:
        raise ShadowRuns(
            f"'{found.artefact}' is the shadow of '{model}' at {hospital} since {found.began:%Y-%m-%d}: end "
            f"it first (`locum shadow end {hospital} {model}`, POST /hospitals/{hospital}/serving/{model}/"
            "shadow/end)"
        )
    made = Shadow(
        hospital=hospital,
        model=model,
        version=version,
        artefact=artefact,
        every=every,
        rule=None if rule is None else rule.model_dump(),
        actor=actor,
        reason=reason,
        began=datetime.now(UTC),
    )
    session.add(made)
    session.flush()
    _record(session, made, "shadow.began", actor, {"every": str(every), "reason": reason})
    return made


def end(session: Session, shadow: Shadow, actor: str, reason: str) -> None:
    """End a shadow; what it found stays."""
    shadow.ended, shadow.ended_by = datetime.now(UTC), actor
    _record(session, shadow, "shadow.ended", actor, {"reason": reason})


def _record(session: Session, shadow: Shadow, action: str, actor: str, details: Mapping[str, str]) -> None:
    about = {"model": shadow.model, "artefact": shadow.artefact, **details}
    trail.append(
        session, action, hospital=shadow.hospital, version=shadow.version, actor=actor, details=about
    )


def active(session: Session, hospital: str, model: str) -> Shadow | None:
    """The shadow of a hospital's model that answers now; None without one."""
    query = select(Shadow).where(Shadow.hospital == hospital, Shadow.model == model, Shadow.ended.is_(None))
    return session.scalars(query).first()


def listed(session: Session, hospital: str, model: str, limit: int = 20) -> list[Shadow]:
    """The newest shadows of a hospital's model, newest first."""
    query = select(Shadow).where(Shadow.hospital == hospital, Shadow.model == model)
    return list(session.scalars(query.order_by(Shadow.id.desc()).limit(limit)))


def note(
    session: Session,
    shadow: int,
    request: str,
    *,
    served: str,
    choice: Mapping[str, Any],
    shifts: tuple[float | None, float | None],
    exact: bool,
    labels: Mapping[str, Both],
) -> None:
    """Store what both found in the scan of a request, once."""
    in_turn(session, _LOCK)
    if of_request(session, shadow, request) is not None:
        return
    row = ShadowAnswer(
        shadow=shadow,
        request=request,
        at=datetime.now(UTC),
        served=served,
        choice=dict(choice),
        served_shift=shifts[0],
        shadow_shift=shifts[1],
        exact=exact,
    )
    session.add(row)
    session.flush()
    for label, both in labels.items():
        session.add(ShadowLabel(answer=row.id, label=label[:200], **vars(both)))


def of_request(session: Session, shadow: int | None, request: str) -> ShadowAnswer | None:
    """The second answer to the scan of a request, by one shadow or the newest; None without one."""
    query = select(ShadowAnswer).where(ShadowAnswer.request == request)
    if shadow is not None:
        query = query.where(ShadowAnswer.shadow == shadow)
    return session.scalars(query.order_by(ShadowAnswer.id.desc()).limit(1)).first()


def corrected(session: Session, answer: int, dice: Mapping[str, tuple[float | None, float | None]]) -> None:
    """Note the Dice of both answers with what a person made of the served one: (served, shadow) by label."""
    for row in session.scalars(select(ShadowLabel).where(ShadowLabel.answer == answer)):
        if row.label in dice:
            row.served_dice, row.shadow_dice = dice[row.label]


def accepted(session: Session, answer: int) -> None:
    """Note that a person found the served answer right: the Dice of the other is their agreement."""
    for row in session.scalars(select(ShadowLabel).where(ShadowLabel.answer == answer)):
        row.served_dice, row.shadow_dice = (None if row.agreement is None else 1.0), row.agreement


def delete_before(session: Session, instant: datetime) -> int:
    """Delete the oldest second answers from before an instant, some at once. Returns how many went."""
    query = select(ShadowAnswer.id).where(ShadowAnswer.at < instant).order_by(ShadowAnswer.id)
    numbers = list(session.scalars(query.limit(_AT_ONCE)))
    if numbers:
        session.execute(delete(ShadowLabel).where(ShadowLabel.answer.in_(numbers)))
        session.execute(delete(ShadowAnswer).where(ShadowAnswer.id.in_(numbers)))
    return len(numbers)


def labels_of(session: Session, answers: Sequence[int]) -> dict[int, list[ShadowLabel]]:
    """The labels of second answers, by the number of the answer."""
    found: dict[int, list[ShadowLabel]] = {number: [] for number in answers}
    for start in range(0, len(answers), 1000):
        some = answers[start : start + 1000]
        for row in session.scalars(select(ShadowLabel).where(ShadowLabel.answer.in_(some))):
            found[row.answer].append(row)
    return found
