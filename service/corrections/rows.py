"""The rows of corrections: store one per answer, measure it, list, sum up and delete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from service.database import CorrectedLabel, Correction, in_turn
from service.errors import CorrectionUnknown

State = Literal["waiting", "measured", "failed"]
"""Whether a correction was compared with its answer: a worker does so."""

_LOCK = "the corrections"
# Rows that one transaction deletes, or a summary reads at once.
_AT_ONCE = 5000


class MeasuringOptions(BaseModel):
    """The options of a job that measures: it has none."""


class LabelChange(BaseModel):
    """What a person changed of one label."""

    model_config = ConfigDict(from_attributes=True)

    dice: float | None = Field(description="Of answer and correction; null where neither has voxels.")
    surface_dice: float | None = Field(
        description="Share of both surfaces within 1 mm (of an image: 1 pixel) of the other; 0 where one "
        "mask is empty, null where both are."
    )
    hd95: float | None = Field(
        description="95th percentile of the Hausdorff distance in mm (of an image: pixels); null where a "
        "mask is empty."
    )
    added_voxels: int
    removed_voxels: int
    added_ml: float | None = Field(description="Millilitres that the person added; null of an image.")
    removed_ml: float | None = Field(description="Millilitres that the person took away; null of an image.")

    @classmethod
    def none(cls, voxels: int, *, in_ml: bool) -> LabelChange:
        """That of a label of so many voxels which was right."""
        right, nothing = (1.0, 0.0) if voxels else (None, None), 0.0 if in_ml else None
        return cls(
            dice=right[0],
            surface_dice=right[0],
            hd95=right[1],
            added_voxels=0,
            removed_voxels=0,
            added_ml=nothing,
            removed_ml=nothing,
        )


class CorrectionView(BaseModel):
    """What a person made of one answer."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    observation: int = Field(description="The `id` of the answer's observation.")
    hospital: str
    model: str
    version: str = Field(description="Digest of the version that answered.")
    request: str = Field(description="Id of the answered request.")
    scanner: str | None
    answered_at: datetime
    at: datetime = Field(description="When the correction was received.")
    way: str = Field(description="How it came: `http`, `viewer` or `pacs`.")
    actor: str
    seconds: float | None = Field(description="How long the person worked on it, if the client says so.")
    note: str | None
    accepted: bool = Field(description="Whether the answer was right as it was.")
    mask: str | None = Field(description="sha256 of the mask as it is stored.")
    cohort: str | None = Field(description="The cohort that has the scan and the mask.")
    scan: str | None = Field(description="The scan's name in the cohort.")
    state: State = Field(description="`measured` once it was compared with the answer.")
    reason: str | None = Field(description="Why it could not be compared.")
    exact: bool | None = Field(
        description="Whether the answer that it was compared with has the voxels of the one that was served."
    )
    labels: dict[str, LabelChange] | None = Field(None, description="By label; null until it was measured.")


@dataclass(frozen=True)
class New:
    """A correction as it arrives; see `service.database.Correction`."""

    observation: int
    hospital: str
    model: str
    version: str
    request: str
    scanner: str | None
    answered_at: datetime
    way: str
    actor: str
    accepted: bool
    seconds: float | None
    note: str | None
    mask: str | None
    cohort: str | None
    scan: str | None


def put(session: Session, new: New, labels: Mapping[str, LabelChange] | None) -> tuple[CorrectionView, bool]:
    """Store a correction, in the place of an earlier one of the answer: (what is stored, whether it is new).

    `labels` are the figures where they are known. The same mask again changes nothing. Writers take turns
    from here to the end of their transactions.
    """
    in_turn(session, _LOCK)
    found = session.scalars(select(Correction).where(Correction.observation == new.observation)).first()
    if found is not None and (found.accepted, found.mask) == (new.accepted, new.mask):
        return _views(session, [found])[0], False
    if found is None:
        found = Correction(**asdict(new))
        session.add(found)
    else:
        for name, value in asdict(new).items():
            setattr(found, name, value)
        session.execute(delete(CorrectedLabel).where(CorrectedLabel.correction == found.id))
    found.at, found.state, found.reason, found.exact = datetime.now(UTC), "waiting", None, None
    session.flush()
    if labels is not None:
        _note(session, found, labels, exact=True)
    return _views(session, [found])[0], True


def waiting(session: Session, hospital: str, model: str) -> CorrectionView | None:
    """The oldest correction of a model that was not measured yet."""
    query = select(Correction).where(Correction.state == "waiting", Correction.hospital == hospital)
    found = session.scalars(query.where(Correction.model == model).order_by(Correction.at).limit(1)).first()
    return None if found is None else _views(session, [found])[0]


def measured(
    session: Session,
    of: CorrectionView,
    labels: Mapping[str, LabelChange] | None,
    reason: str | None,
    exact: bool | None,
) -> None:
    """Note the figures of a correction, or why there are none, unless another mask came meanwhile."""
    in_turn(session, _LOCK)
    found = session.get(Correction, of.id)
    if found is None or (found.mask, found.state) != (of.mask, "waiting"):
        return
    if labels is None:
        found.state, found.reason = "failed", reason
    else:
        _note(session, found, labels, exact=exact)


def _note(session: Session, row: Correction, labels: Mapping[str, LabelChange], exact: bool | None) -> None:
    row.state, row.exact = "measured", exact
    for label, change in labels.items():
        session.add(CorrectedLabel(correction=row.id, label=label[:200], **change.model_dump()))
    session.flush()


def page(
    session: Session,
    hospital: str,
    model: str | None = None,
    *,
    before: int | None = None,
    between: tuple[datetime, datetime] | None = None,
    limit: int = 100,
) -> list[CorrectionView]:
    """The corrections of a hospital, newest first. The right to see the hospital is the route's to check.

    `between`: of answers from the first instant on, and before the second.
    """
    query = select(Correction).where(Correction.hospital == hospital)
    if model is not None:
        query = query.where(Correction.model == model)
    if before is not None:
        query = query.where(Correction.id < before)
    if between is not None:
        query = query.where(Correction.answered_at >= between[0], Correction.answered_at < between[1])
    return _views(session, list(session.scalars(query.order_by(Correction.id.desc()).limit(limit))))


def get(session: Session, hospital: str, request: str) -> CorrectionView:
    """The newest correction of a request's answer. Raises CorrectionUnknown."""
    return _views(session, [_of_request(session, hospital, request)])[0]


def find(session: Session, hospital: str, request: str) -> CorrectionView | None:
    """The newest correction of a request's answer; None without one."""
    try:
        return get(session, hospital, request)
    except CorrectionUnknown:
        return None


def remove(session: Session, hospital: str, request: str) -> CorrectionView:
    """Delete a correction; its scan and mask stay in their cohort. Raises CorrectionUnknown."""
    found = _of_request(session, hospital, request)
    view = _views(session, [found])[0]
    _delete(session, [found.id])
    return view


def _of_request(session: Session, hospital: str, request: str) -> Correction:
    query = select(Correction).where(Correction.hospital == hospital, Correction.request == request)
    found = session.scalars(query.order_by(Correction.id.desc()).limit(1)).first()
    if found is None:
        raise CorrectionUnknown(
            f"{hospital} has no correction of request '{request}': GET /hospitals/{hospital}/corrections "
            "lists those that there are"
        )
    return found


class LabelFigures(BaseModel):
    """The corrections of one label, accepted answers among them."""

    median_dice: float | None
    median_surface_dice: float | None
    added_ml: float | None = Field(description="Mean over the answers.")
    removed_ml: float | None


class CorrectionFigures(BaseModel):
    """Corrections of the answers of one version, from one scanner, in one month."""

    model: str
    version: str
    scanner: str | None
    month: str = Field(description="When they were answered, such as `2026-11`, in UTC.")
    corrected: int
    accepted: int
    waiting: int = Field(description="Corrections that are not measured yet, or cannot be.")
    median_seconds: float | None
    labels: dict[str, LabelFigures]


def summary(
    session: Session,
    hospital: str,
    model: str | None = None,
    between: tuple[datetime, datetime] | None = None,
) -> list[CorrectionFigures]:
    """Sum up the newest corrections of a hospital, at most 5,000, by version, scanner and month; `between` as
    in `page`.
    """
    groups: dict[tuple[str, str, str, str], list[CorrectionView]] = defaultdict(list)
    for each in page(session, hospital, model, between=between, limit=_AT_ONCE):
        groups[each.model, each.version, each.scanner or "", f"{each.answered_at:%Y-%m}"].append(each)
    return [
        CorrectionFigures(
            model=key[0],
            version=key[1],
            scanner=key[2] or None,
            month=key[3],
            corrected=sum(not each.accepted for each in own),
            accepted=sum(each.accepted for each in own),
            waiting=sum(each.labels is None for each in own),
            median_seconds=_median([each.seconds for each in own]),
            labels=_by_label(own),
        )
        for key, own in sorted(groups.items(), key=lambda item: (item[0][3], item[0]), reverse=True)
    ]


def _by_label(own: Sequence[CorrectionView]) -> dict[str, LabelFigures]:
    changes: dict[str, list[LabelChange]] = defaultdict(list)
    for each in own:
        for label, change in (each.labels or {}).items():
            changes[label].append(change)
    return {
        label: LabelFigures(
            median_dice=_median([change.dice for change in all_]),
            median_surface_dice=_median([change.surface_dice for change in all_]),
            added_ml=_mean([change.added_ml for change in all_]),
            removed_ml=_mean([change.removed_ml for change in all_]),
        )
        for label, all_ in sorted(changes.items())
    }


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return median(there) if there else None


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def delete_before(session: Session, instant: datetime) -> int:
    """Delete the oldest corrections from before an instant, some at once. Returns how many went."""
    return _delete(session, _numbers(session, Correction.at < instant))


def delete_of(session: Session, hospital: str) -> int:
    """Delete corrections of a hospital, some at once. Returns how many went."""
    return _delete(session, _numbers(session, Correction.hospital == hospital))


def _numbers(session: Session, condition: Any) -> list[int]:
    query = select(Correction.id).where(condition).order_by(Correction.id).limit(_AT_ONCE)
    return list(session.scalars(query))


def _delete(session: Session, numbers: Sequence[int]) -> int:
    if numbers:
        session.execute(delete(CorrectedLabel).where(CorrectedLabel.correction.in_(numbers)))
        session.execute(delete(Correction).where(Correction.id.in_(numbers)))
    return len(numbers)


def _views(session: Session, rows: Sequence[Correction]) -> list[CorrectionView]:
    labels: dict[int, dict[str, LabelChange]] = defaultdict(dict)
    numbers = [row.id for row in rows if row.state == "measured"]
    for start in range(0, len(numbers), 1000):
        query = select(CorrectedLabel).where(CorrectedLabel.correction.in_(numbers[start : start + 1000]))
        for each in session.scalars(query.order_by(CorrectedLabel.label)):
            labels[each.correction][each.label] = LabelChange.model_validate(each)
    return [
        CorrectionView(
            **{name: getattr(row, name) for name in CorrectionView.model_fields if name != "labels"},
            labels=labels[row.id] if row.state == "measured" else None,
        )
        for row in rows
    ]
