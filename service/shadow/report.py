"""How a shadow's answers compare with those that were served, and whether its rule promotes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from statistics import mean, stdev

from pydantic import BaseModel, ConfigDict, Field
from scipy.special import stdtrit
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Shadow, ShadowAnswer, ShadowLabel
from service.shadow.rows import Rule, labels_of

# The newest answers that are compared.
_MOST = 5000
_FEWEST, _ERROR = 10, 0.05


class ComparedLabel(BaseModel):
    """One label by both versions, over the scans of the shadow."""

    answers: int
    agreement: float | None = Field(description="Mean Dice of the two; null where neither ever found it.")
    bias_ml: float | None = Field(description="Mean of the shadow's volume less the served one.")
    limits_ml: tuple[float, float] | None = Field(
        description="Between these are 95 % of the differences (Bland and Altman, 1986)."
    )
    served_confidence: float | None
    shadow_confidence: float | None
    served_dice: float | None = Field(description="Mean Dice with corrections; null without any.")
    shadow_dice: float | None


class BothFound(BaseModel):
    """One label of a scan by both versions."""

    model_config = ConfigDict(from_attributes=True)

    agreement: float | None = Field(description="Dice of the two; null where neither found it.")
    served_voxels: int
    shadow_voxels: int
    served_ml: float | None
    shadow_ml: float | None
    served_confidence: float
    shadow_confidence: float
    served_dice: float | None = Field(description="With a person's correction; null without one.")
    shadow_dice: float | None


class ShadowPoint(BaseModel):
    """One scan that both versions answered."""

    request: str
    at: datetime
    agreement: float | None = Field(description="Least Dice of the two, over labels.")
    served_shift: float | None
    shadow_shift: float | None
    gain: float | None = Field(
        description="Dice of the shadow's answer with a person's correction, less that of the served one: "
        "the mean over labels. Null of an answer that was not corrected."
    )
    labels: dict[str, BothFound]


class ShadowReport(BaseModel):
    """A version that answers unseen, and how it compares with the one that serves."""

    hospital: str
    model: str
    artefact: str = Field(description="`name@version` that answers unseen.")
    version: str
    every: int = Field(description="One scan in so many.")
    rule: Rule | None
    actor: str
    reason: str
    began: datetime
    ended: datetime | None
    ended_by: str | None
    answers: int
    exact: int = Field(
        description="Answers of which the served mask was made again to the voxel; others are compared with "
        "what this machine makes of it."
    )
    labels: dict[str, ComparedLabel]
    corrected: int = Field(description="Answers that a person corrected or accepted.")
    gain: float | None = Field(description="Mean gain of Dice on these; see `points`.")
    at_least: float | None = Field(
        description="One-sided 95 % lower bound of the mean gain (Student's t); null of fewer than 10."
    )
    points: list[ShadowPoint] = Field(description="The newest answers, newest first.")


def report(session: Session, shadow: Shadow, points: int = 200) -> ShadowReport:
    """Compare what both versions found, on the newest 5,000 scans."""
    query = select(ShadowAnswer).where(ShadowAnswer.shadow == shadow.id)
    answers = list(session.scalars(query.order_by(ShadowAnswer.id.desc()).limit(_MOST)))
    labels = labels_of(session, [each.id for each in answers])
    by_name: dict[str, list[ShadowLabel]] = {}
    for each in (row for own in labels.values() for row in own):
        by_name.setdefault(each.label, []).append(each)
    seen = [_point(each, labels[each.id]) for each in answers]
    gains = [each.gain for each in seen if each.gain is not None]
    return ShadowReport(
        **{
            name: getattr(shadow, name)
            for name in ("hospital", "model", "artefact", "version", "every", "actor", "reason", "began")
        },
        rule=None if shadow.rule is None else Rule.model_validate(shadow.rule),
        ended=shadow.ended,
        ended_by=shadow.ended_by,
        answers=len(answers),
        exact=sum(each.exact for each in answers),
        labels={name: _compared(own) for name, own in sorted(by_name.items())},
        corrected=len(gains),
        gain=mean(gains) if gains else None,
        at_least=lower_bound(gains),
        points=seen[:points],
    )


def lower_bound(values: Sequence[float], error: float = _ERROR) -> float | None:
    """One-sided lower bound of a mean by Student's t, wrong in `error` of cases; None of fewer than 10."""
    n = len(values)
    if n < _FEWEST:
        return None
    return mean(values) - float(stdtrit(n - 1, 1 - error)) * stdev(values) / math.sqrt(n)


def look(session: Session, shadow: Shadow) -> tuple[int, float] | None:
    """By how many corrected answers, and which bound of the gain, a shadow's rule promotes it; None if not.

    It looks at the rule's number of corrected answers, and again at each doubling, and halves the error at
    each look: all looks together are wrong in 5 % of cases. A look is noted, in the caller's transaction.
    """
    if shadow.rule is None or shadow.ended is not None:
        return None
    rule = Rule.model_validate(shadow.rule)
    gains = [each.gain for each in report(session, shadow, _MOST).points if each.gain is not None]
    if len(gains) < rule.corrections * 2**shadow.looks:
        return None
    shadow.looks += 1
    bound = lower_bound(gains, _ERROR / 2**shadow.looks)
    return None if bound is None or bound <= rule.gain else (len(gains), bound)


def _point(answer: ShadowAnswer, labels: Sequence[ShadowLabel]) -> ShadowPoint:
    agreements = [each.agreement for each in labels if each.agreement is not None]
    gains = [
        each.shadow_dice - each.served_dice
        for each in labels
        if each.shadow_dice is not None and each.served_dice is not None
    ]
    return ShadowPoint(
        request=answer.request,
        at=answer.at,
        agreement=min(agreements, default=None),
        served_shift=answer.served_shift,
        shadow_shift=answer.shadow_shift,
        gain=mean(gains) if gains else None,
        labels={each.label: BothFound.model_validate(each) for each in labels},
    )


def _compared(rows: Sequence[ShadowLabel]) -> ComparedLabel:
    changes = [
        row.shadow_ml - row.served_ml
        for row in rows
        if row.shadow_ml is not None and row.served_ml is not None
    ]
    spread = 1.96 * stdev(changes) if len(changes) > 1 else None
    bias = mean(changes) if changes else None
    return ComparedLabel(
        answers=len(rows),
        agreement=_mean([row.agreement for row in rows]),
        bias_ml=bias,
        limits_ml=None if bias is None or spread is None else (bias - spread, bias + spread),
        served_confidence=_mean([row.served_confidence for row in rows]),
        shadow_confidence=_mean([row.shadow_confidence for row in rows]),
        served_dice=_mean([row.served_dice for row in rows]),
        shadow_dice=_mean([row.shadow_dice for row in rows]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return mean(there) if there else None
