"""`/watch` and `/hospitals/{hospital}/watch/{model}`: what changed, since when, and what a person says."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from service.audit import trail
from service.database import Watch, WatchRule, caller_of
from service.database.hospitals import require_hospital
from service.errors import RequestInvalid
from service.http.audit import Audited, AuditedRoute
from service.http.dependencies import AsApprover, AsOperator, AsReader, actor_of
from service.http.parameters import HospitalId, ModelName, Reason, Text
from service.http.problems import problem_responses
from service.validation import HOSPITAL_ID
from service.watch import views
from service.watch.rules import Stop
from service.watch.views import Seen
from service.watch.watcher import close, restart, turn

router = APIRouter(tags=["watch"], route_class=AuditedRoute)

_MOST_EVENTS = 200


class AlarmView(BaseModel):
    """A stream of which the answers are not as they were."""

    id: int
    stream: str = Field(description="Such as `shift`, `volume of liver`, `no liver`, `warned` or `silence`.")
    at: datetime = Field(description="When the alarm was raised.")
    since: datetime = Field(description="When the change began, as far as the sum tells.")
    up: bool | None = Field(description="Whether the values are larger than before; null for silence.")


class WatchView(BaseModel):
    """The watch over the answers to one scanner's scans by one model at a hospital."""

    hospital: str
    model: str
    scanner: str | None = Field(description="Null where neither the client nor a header names it.")
    state: Literal["routine", "watch", "investigate"] = Field(
        description="`investigate`: an alarm waits for a person; `watch`: a sum is near its limit."
    )
    since: datetime | None = Field(description="When what alarms began.")
    learning: bool = Field(
        description="Whether there are too few answers, with `known`, to say what is usual (50)."
    )
    known: int = Field(description="Scans by which the hospital accepted the version: they are usual.")
    answers: int = Field(description="Answers since the series began.")
    began: datetime
    last: datetime = Field(description="The last answer.")
    today: int = Field(description="Answers of its last day.")
    usual_today: float = Field(description="What is usual on such a weekday.")
    months: float = Field(description="Months between false alarms, all streams together.")
    stop: Stop = Field(description="What happens at `investigate`.")
    price: str | None = Field(description="What this setting costs, in words; null before the first week.")
    streams: dict[str, float] = Field(
        description="How far each sum is on the way to its limit: 1 or more is an alarm."
    )
    alarms: list[AlarmView]


class WatchList(BaseModel):
    """All watches of the hospitals that the caller sees."""

    watches: list[WatchView]


class PointView(BaseModel):
    """One answer on the charts."""

    observation: int
    at: datetime
    request: str
    scanner: str | None
    values: dict[str, float]


class EventView(BaseModel):
    """An alarm, or a change that is drawn as a vertical rule."""

    id: int
    kind: Literal["alarm", "version", "software", "locum"]
    scanner: str
    at: datetime
    since: datetime | None
    stream: str | None
    details: dict[str, Any]
    answered_at: datetime | None
    answered_by: str | None
    reason: str | None
    deviant: list[PointView] = Field([], description="The answers that are farthest to its side.")


class WatchDetails(BaseModel):
    """The watches of one model at a hospital, its newest answers and what happened."""

    watches: list[WatchView]
    points: list[PointView] = Field(description="Oldest first.")
    events: list[EventView] = Field(description="Newest first.")


class RuleBody(BaseModel):
    """How often false alarms may be, and what happens at an alarm. Set before anything happened."""

    model_config = ConfigDict(extra="forbid")

    months: float = Field(
        12.0, ge=0.5, le=120, description="Months between false alarms, all streams together."
    )
    stop: Stop = Field(
        "warn", description="`warn` in every answer, `global`: the global model answers, `hold`: 409."
    )
    reason: Reason
    actor: Text | None = Field(None, description="As in an assignment.")


class AnswerBody(BaseModel):
    """What a person found out about the alarms of a scanner."""

    model_config = ConfigDict(extra="forbid")

    scanner: str | None = Field(None, max_length=200, description="Null: the scans without a known scanner.")
    reason: Reason
    actor: Text | None = Field(None, description="As in an assignment.")


@router.get("/watch", responses=problem_responses(404, 422))
def list_watches(
    context: AsReader, hospital: Annotated[str | None, Query(pattern=HOSPITAL_ID)] = None
) -> WatchList:
    """List the state of every watch: by hospital, model and scanner."""
    with context.database.read() as session:
        if hospital is not None:
            require_hospital(session, hospital)
        return WatchList(watches=[_view(each) for each in views.seen(session, hospital)])


@router.get("/hospitals/{hospital}/watch/{model}", responses=problem_responses(404, 422))
def get_watch(
    context: AsReader,
    hospital: HospitalId,
    model: ModelName,
    limit: Annotated[int, Query(ge=1, le=2000, description="Answers on the charts.")] = 500,
) -> WatchDetails:
    """Return the watches of one model, its newest answers, and what happened."""
    with context.database.read() as session:
        require_hospital(session, hospital)
        points = views.points(session, hospital, model, limit)
        return WatchDetails(
            watches=[_view(each) for each in views.seen(session, hospital, model)],
            points=[_point(stored.row, values) for stored, values in points],
            events=[
                EventView(
                    **views.as_json(event),
                    deviant=[
                        _point(stored.row, {str(event.stream): value})
                        for stored, value in views.deviant(event, points)
                    ]
                    if event.kind == "alarm"
                    else [],
                )
                for event in views.events(session, hospital, model, _MOST_EVENTS)
            ],
        )


@router.put("/hospitals/{hospital}/watch/{model}", responses=problem_responses(400, 403, 404, 408, 413, 422))
def set_watch(
    context: Annotated[AsApprover, Audited("watch.set", refused_only=True)],
    hospital: HospitalId,
    model: ModelName,
    body: RuleBody,
) -> WatchList:
    """Set how often false alarms may be, and what happens to answers when there is one."""
    with context.database.write() as session:
        require_hospital(session, hospital)
        actor = actor_of(caller_of(session), body.actor)
        own = {"hospital": hospital, "model": model, "months": body.months, "stop": body.stop}
        session.add(WatchRule(**own, actor=actor, reason=body.reason, at=datetime.now(UTC)))
        session.flush()
        found = WatchList(watches=[_view(each) for each in views.seen(session, hospital, model)])
        details = {**own, "reason": body.reason}
        trail.append(session, "watch.set", hospital=hospital, actor=actor, details=details)
        return found


@router.post(
    "/hospitals/{hospital}/watch/{model}/answers", responses=problem_responses(400, 403, 404, 408, 413, 422)
)
def answer_alarms(
    context: Annotated[AsOperator, Audited("watch.answered", refused_only=True)],
    hospital: HospitalId,
    model: ModelName,
    body: AnswerBody,
) -> WatchList:
    """Answer the alarms of a scanner: a new series begins, and the next answers say what is usual."""
    with context.database.write() as session:
        require_hospital(session, hospital)
        actor = actor_of(caller_of(session), body.actor)
        turn(session)
        watch = _required(session, hospital, model, body.scanner)
        now = datetime.now(UTC)
        closed = close(session, watch, now, actor, body.reason, context.settings.webhooks)
        restart(watch, now)
        session.flush()
        found = WatchList(watches=[_view(each) for each in views.seen(session, hospital, model)])
        details = {"model": model, "scanner": watch.scanner, "alarms": closed, "reason": body.reason}
        trail.append(session, "watch.answered", hospital=hospital, actor=actor, details=details)
        return found


def _required(session: Session, hospital: str, model: str, scanner: str | None) -> Watch:
    watch = session.get(Watch, (hospital, model, scanner or ""), with_for_update=True)
    if watch is None:
        known = [each.watch.scanner or "none" for each in views.seen(session, hospital, model)]
        reason = (
            f"no answers to its scans by this model were watched; known: {', '.join(known) or 'none yet'}"
        )
        raise RequestInvalid([{"field": "body.scanner", "reason": reason}])
    return watch


def _view(seen: Seen) -> WatchView:
    watch = seen.watch
    return WatchView(
        hospital=watch.hospital,
        model=watch.model,
        scanner=watch.scanner or None,
        state=watch.state,
        since=watch.since,
        learning=seen.learning,
        known=seen.known,
        answers=watch.answers,
        began=watch.began,
        last=watch.last_at,
        today=watch.today,
        usual_today=seen.usual_today,
        months=seen.rule.months,
        stop=seen.rule.stop,
        price=seen.price,
        streams=seen.strains,
        alarms=[
            AlarmView(
                id=each.id,
                stream=str(each.stream),
                at=each.at,
                since=each.since or each.at,
                up=each.details.get("up"),
            )
            for each in seen.alarms
        ],
    )


def _point(row: Any, values: dict[str, float]) -> PointView:
    own = {name: row[name] for name in ("at", "request", "scanner")}
    return PointView(observation=row["id"], values=values, **own)
