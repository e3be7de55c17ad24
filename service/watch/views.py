"""What the watch says: of all hospitals that a caller sees, and in detail of one model of one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.database import Database, Watch, WatchEvent, caller_of
from service.observation import Stored, page
from service.watch.budget import Budget
from service.watch.rules import Rule, rules_of
from service.watch.series import numbers_of, streams_of
from service.watch.silence import Arrivals
from service.watch.stream import REFERENCE
from service.watch.watcher import open_alarms

STATES: Final = ("routine", "watch", "investigate")
# The most deviant answers that an alarm shows.
_SHOWN = 6


@dataclass(frozen=True)
class Seen:
    """One scanner's watch, with the alarms that wait for a person and the price of its setting."""

    watch: Watch
    rule: Rule
    alarms: tuple[WatchEvent, ...]
    strains: dict[str, float]
    learning: bool
    known: int
    usual_today: float
    price: str | None


def seen(session: Session, hospital: str | None = None, model: str | None = None) -> list[Seen]:
    """The watches of hospitals that the caller may see, by hospital, model and scanner."""
    own = {"hospital": hospital, "model": model}
    named = {name: value for name, value in own.items() if value is not None}
    query = select(Watch).filter_by(**named).order_by(Watch.hospital, Watch.model, Watch.scanner)
    found = session.scalars(query).all()
    scanners = Counter((watch.hospital, watch.model) for watch in found)
    # Read for all watches at once: there may be hundreds.
    rules, alarms = rules_of(session, **named), open_alarms(session, **named)
    return [
        _seen(
            watch,
            rules.get((watch.hospital, watch.model), Rule()),
            [each for each in alarms if _key(each) == _key(watch)],
            scanners[watch.hospital, watch.model],
        )
        for watch in found
        if caller_of(session).sees(watch.hospital)
    ]


def _key(of: Watch | WatchEvent) -> tuple[str, str, str]:
    return of.hospital, of.model, of.scanner


def _seen(watch: Watch, rule: Rule, alarms: Sequence[WatchEvent], scanners: int) -> Seen:
    strains, known = dict(watch.streams.get("strains", {})), watch.streams.get("known", 0)
    arrivals = Arrivals.of(watch.arrivals)
    daily = sum(arrivals.usual(weekday) for weekday in range(7)) / 7
    # All scanners share the setting.
    budget = Budget(rule.months, scanners * max(len(strains), streams_of(1)))
    price = str(budget.price(daily)) if daily > 0 else None
    return Seen(
        watch,
        rule,
        tuple(alarms),
        strains,
        known + watch.answers < REFERENCE,
        known,
        arrivals.usual(watch.day.weekday()),
        price,
    )


def events(session: Session, hospital: str, model: str, limit: int) -> list[WatchEvent]:
    """The newest events of a hospital's model, newest first."""
    query = select(WatchEvent).where(WatchEvent.hospital == hospital, WatchEvent.model == model)
    return list(session.scalars(query.order_by(WatchEvent.id.desc()).limit(limit)))


def points(session: Session, hospital: str, model: str, limit: int) -> list[tuple[Stored, dict[str, float]]]:
    """The newest answers of a hospital's model, oldest first, with the numbers that are watched."""
    found = [each for each in page(session, hospital, model, limit=limit) if each.row["usual"]]
    return [(each, numbers_of(each)) for each in reversed(found)]


def deviant(alarm: WatchEvent, of: Sequence[tuple[Stored, dict[str, float]]]) -> list[tuple[Stored, float]]:
    """The answers between an alarm's change and a person's answer to it that are farthest to its side, the
    farthest first.
    """
    stream, up = str(alarm.stream), bool(alarm.details.get("up", True))
    since: datetime = alarm.since or alarm.at
    until = alarm.answered_at or datetime.max.replace(tzinfo=UTC)
    # The watch without a scanner is that of the others, too, where there are very many.
    late = [
        (stored, values[stream])
        for stored, values in of
        if stream in values
        and since <= stored.row["at"] <= until
        and alarm.scanner in ("", stored.row["scanner"])
    ]
    return sorted(late, key=lambda each: each[1], reverse=up)[:_SHOWN]


def states(database: Database) -> dict[tuple[str, str, str], int]:
    """(hospital, model, scanner) -> 0 routine, 1 watch, 2 investigate; empty without the database."""
    try:
        with database.read() as session:
            found = session.scalars(select(Watch)).all()
    except SQLAlchemyError:
        return {}
    return {(each.hospital, each.model, each.scanner): STATES.index(each.state) for each in found}


def as_json(event: WatchEvent) -> dict[str, Any]:
    """The columns of an event."""
    names = (
        "id",
        "kind",
        "scanner",
        "at",
        "since",
        "stream",
        "details",
        "answered_at",
        "answered_by",
        "reason",
    )
    return {name: getattr(event, name) for name in names}
