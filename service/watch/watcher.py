"""Look at what was observed since the last look, and raise alarms.

A look is one transaction: the rows after the cursor, in order, the sums that they change, the alarms that
they raise, and the cursor. A process that is killed leaves none of it, and of two processes one finds nothing
left.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from service.database import (
    Assignment,
    CorrectedLabel,
    Correction,
    Database,
    Observation,
    Watch,
    WatchCursor,
    WatchEvent,
    in_turn,
)
from service.observation import Stored
from service.observation.rows import newer
from service.watch import messages
from service.watch.accepted import accepted_scans
from service.watch.budget import Budget
from service.watch.rules import rule_of
from service.watch.series import CONFIDENCE, CORRECTIONS, Series, streams_of
from service.watch.silence import Arrivals
from service.watch.stream import Alarm
from service.webhooks import Webhook

_log = logging.getLogger("locum.service")

_LOCK = "the watch"
# Rows of a transaction: others write in between.
_AT_ONCE = 200
# A series of less than a day tells no rate.
_FEWEST_DAYS = 1.0
SILENCE = "silence"
MOST_SCANNERS = 32
"""Scanners of a hospital that are watched by themselves, for each model: clients may name any number."""
_Key = tuple[str, str, str]


def look(database: Database, now: datetime | None = None, hooks: Sequence[Webhook] = ()) -> int:
    """Watch all that was observed since the last look. Returns how many answers that were.

    `now` is the present, for tests and demonstrations; `hooks` are to receive what alarms.
    """
    total = 0
    while done := _look_at_some(database, hooks):
        total += done
    while _look_at_corrections(database, hooks):
        pass
    _look_for_silence(database, now or datetime.now(UTC), hooks)
    return total


def _look_at_some(database: Database, hooks: Sequence[Webhook]) -> int:
    with database.write() as session:
        turn(session)
        cursor = session.get_one(WatchCursor, 1)
        rows = newer(session, cursor.last, _AT_ONCE)
        if not rows:
            return 0
        by_key: dict[_Key, list[Stored]] = {}
        for stored in rows:
            row = stored.row
            if row["hospital"] is not None and row["usual"]:
                key = _watched_as(session, (row["hospital"], row["model"], row["scanner"] or ""))
                by_key.setdefault(key, []).append(stored)
        for key, own in by_key.items():
            _follow(session, key, own, hooks)
        cursor.last = rows[-1].row["id"]
        return len(rows)


def _watched_as(session: Session, key: _Key) -> _Key:
    """The watch of a scanner's answers: beyond a number, scanners share the watch of unknown ones."""
    hospital, model, _ = key
    if session.get(Watch, key) is not None:
        return key
    query = select(func.count()).where(Watch.hospital == hospital, Watch.model == model)
    return key if (session.scalar(query) or 0) < MOST_SCANNERS else (hospital, model, "")


def _follow(session: Session, key: _Key, rows: Sequence[Stored], hooks: Sequence[Webhook]) -> None:
    """Take the answers of one scanner by one model, oldest first."""
    served = _served(session, *key[:2])
    seen = _seen_before(session, rows)
    watch = session.get(Watch, key)
    series = Series() if watch is None else Series.of(watch.streams, watch.usual)
    budget = _budget(session, key, len(rows[-1].labels), corrected=CORRECTIONS in series.levels)
    for stored in rows:
        row = stored.row
        # The same scan again says nothing new; what a person asked of another version is no answer to watch.
        if row["id"] in seen or served(row["at"]) != row["version"]:
            continue
        if watch is None:
            watch, series = _begun(session, key, row), _series(session, row)
        _note_changes(session, watch, row)
        if row["version"] != watch.version:
            series = _restart(session, watch, row, hooks)
        _note_arrival(watch, row["at"])
        watch.last_at = row["at"]
        alarms = series.take(stored, budget.spacing(_per_day(watch, series, row["at"])))
        watch.answers = series.answers
        for stream, alarm in alarms.items():
            _raise(session, watch, stream, row["at"], hooks, alarm=alarm, observation=row["id"])
    if watch is None:
        return
    watch.streams, watch.usual = series.state, series.usual
    _settle(session, watch, series)


def _look_at_corrections(database: Database, hooks: Sequence[Webhook]) -> bool:
    """Take some of the corrections that were measured since; return whether there were any."""
    with database.write() as session:
        turn(session)
        new = select(Correction).where(Correction.state == "measured", ~Correction.watched)
        rows = list(session.scalars(new.order_by(Correction.id).limit(_AT_ONCE)))
        for row in rows:
            row.watched = True
            key = _watched_as(session, (row.hospital, row.model, row.scanner or ""))
            watch = session.get(Watch, key)
            if watch is not None and (row.version, row.answered_at >= watch.began) == (watch.version, True):
                _follow_correction(session, key, watch, row, hooks)
        return bool(rows)


def _follow_correction(
    session: Session, key: _Key, watch: Watch, row: Correction, hooks: Sequence[Webhook]
) -> None:
    """Take how much of the answer was left: the surface Dice of the label that changed most."""
    agreement = session.scalar(
        select(func.min(CorrectedLabel.surface_dice)).where(CorrectedLabel.correction == row.id)
    )
    if agreement is None:
        return
    series = Series.of(watch.streams, watch.usual)
    days = max((row.at - watch.began) / timedelta(days=1), _FEWEST_DAYS)
    per_day = max((series.corrections + 1) / days, 1 / 30)
    labels = sum(name.startswith(CONFIDENCE) for name in series.levels)
    budget = _budget(session, key, labels, corrected=True)
    alarm = series.take_correction(agreement, budget.spacing(per_day))
    watch.streams, watch.usual = series.state, series.usual
    session.flush()
    if alarm is not None:
        since = _corrected_at(session, watch, series.corrections - alarm.since - 1) or row.at
        _raise(session, watch, CORRECTIONS, row.at, hooks, alarm=alarm, since=since)
    _settle(session, watch, series)


def _corrected_at(session: Session, watch: Watch, back: int) -> datetime | None:
    """When the answer was given that was corrected so many corrections ago."""
    query = (
        select(Correction.answered_at)
        .where(Correction.hospital == watch.hospital, Correction.model == watch.model, Correction.watched)
        .where(Correction.version == watch.version, Correction.scanner == (watch.scanner or None))
    )
    return session.scalar(query.order_by(Correction.id.desc()).offset(max(back, 0)).limit(1))


def _served(session: Session, hospital: str, model: str) -> Any:
    """Which version's digest a hospital was served at a time."""
    query = select(Assignment.at, Assignment.digest).where(
        Assignment.hospital == hospital, Assignment.model == model
    )
    log = session.execute(query.order_by(Assignment.sequence)).all()
    times = [each.at for each in log]

    def at(time: datetime) -> str | None:
        place = bisect_right(times, time)
        return log[max(place, 1) - 1].digest if log else None

    return at


def _seen_before(session: Session, rows: Sequence[Stored]) -> set[int]:
    """The numbers of the answers to scans that this version had answered before."""
    scans = {each.row["scan"] for each in rows}
    columns = (Observation.id, Observation.scan, Observation.version)
    query = (
        select(*columns)
        .where(Observation.hospital == rows[0].row["hospital"], Observation.scan.in_(scans))
        .where(Observation.usual, Observation.id <= rows[-1].row["id"])
    )
    first: dict[tuple[str, str], int] = {}
    for number, scan, version in session.execute(query.order_by(Observation.id)):
        first.setdefault((scan, version), number)
    return {each.row["id"] for each in rows if first[each.row["scan"], each.row["version"]] != each.row["id"]}


def _begun(session: Session, key: _Key, row: Mapping[str, Any]) -> Watch:
    hospital, model, scanner = key
    watch = Watch(
        hospital=hospital,
        model=model,
        scanner=scanner,
        state="routine",
        version=row["version"],
        software=_software(row),
        locum=row["locum"],
        began=row["at"],
        answers=0,
        last_at=row["at"],
        day=row["at"].date(),
        today=0,
        arrivals=asdict(Arrivals()),
        streams={},
        usual=b"",
    )
    session.add(watch)
    return watch


def _restart(session: Session, watch: Watch, row: Mapping[str, Any], hooks: Sequence[Webhook]) -> Series:
    """Begin another series, with an answer of another version; what alarmed before was of the other."""
    watch.version, watch.began = row["version"], row["at"]
    close(session, watch, row["at"], "service", "another version was assigned", hooks)
    return _series(session, row)


def _series(session: Session, row: Mapping[str, Any]) -> Series:
    """The beginning of a version's series: after the scans by which the hospital accepted it, if it did."""
    return Series.after(accepted_scans(session, row["hospital"], row["version"], row["precision"]))


def turn(session: Session) -> None:
    """Wait for a look that is going on, and let none begin before the end of the transaction."""
    in_turn(session, _LOCK)


def forget(session: Session, hospital: str) -> None:
    """Delete the watches of a hospital, with what they hold of its answers."""
    turn(session)
    session.execute(delete(Watch).where(Watch.hospital == hospital))


def restart(watch: Watch, at: datetime) -> None:
    """Begin a new series: the next answers say what is usual. In a transaction that has its `turn`."""
    watch.began, watch.answers, watch.streams, watch.usual = at, 0, {}, b""
    watch.arrivals = asdict(Arrivals.of(watch.arrivals).answered())
    watch.state, watch.since = "routine", None


def close(
    session: Session,
    watch: Watch,
    at: datetime,
    actor: str,
    reason: str,
    hooks: Sequence[Webhook] = (),
) -> int:
    """Answer the alarms of a watch, and tell `hooks`. Returns how many there were."""
    alarms = open_alarms(session, **_place(watch))
    for each in alarms:
        each.answered_at, each.answered_by, each.reason = at, actor, reason
        messages.put(session, hooks, "watch.answered", each, "routine")
    return len(alarms)


def open_alarms(session: Session, **named: str) -> list[WatchEvent]:
    """The unanswered alarms, oldest first: of the hospital, model and scanner that are named, else of all."""
    query = select(WatchEvent).filter_by(kind="alarm", answered_at=None, **named)
    return list(session.scalars(query.order_by(WatchEvent.id)))


def _place(watch: Watch) -> dict[str, str]:
    return {"hospital": watch.hospital, "model": watch.model, "scanner": watch.scanner}


def _note_changes(session: Session, watch: Watch, row: Mapping[str, Any]) -> None:
    """Note what an alarm is read beside: another version, software of the scanner, or Locum."""
    now = {"version": row["version"], "software": _software(row) or watch.software, "locum": row["locum"]}
    for kind, value in now.items():
        before = getattr(watch, kind)
        if value == before:
            continue
        if before:
            details = {"before": before, "after": value}
            _add_event(session, watch, kind, row["at"], observation=row["id"], details=details)
        if kind != "version":
            setattr(watch, kind, value)


def _software(row: Mapping[str, Any]) -> str:
    return str((row["acquisition"] or {}).get("software", ""))[:64]


def _note_arrival(watch: Watch, at: datetime) -> None:
    _end_days(watch, at.date())
    watch.today += 1


def _end_days(watch: Watch, today: date) -> None:
    """Count the days that have ended before `today`."""
    arrivals = Arrivals.of(watch.arrivals)
    while watch.day < today:
        arrivals = arrivals.after(watch.day.weekday(), watch.today)
        watch.day, watch.today = watch.day + timedelta(days=1), 0
    watch.arrivals = asdict(arrivals)


def _per_day(watch: Watch, series: Series, at: datetime) -> float:
    """Answers a day of this scanner, as they were so far."""
    arrivals = Arrivals.of(watch.arrivals)
    usual = sum(arrivals.usual(weekday) for weekday in range(7)) / 7
    if usual > 0 and all(arrivals.days):
        return usual
    days = max((at - watch.began) / timedelta(days=1), _FEWEST_DAYS)
    return max((series.answers + 1) / days, 1 / 30)


def _budget(session: Session, key: _Key, labels: int, *, corrected: bool = False) -> Budget:
    """The setting of a hospital's model, for the streams of all of its scanners."""
    hospital, model, scanner = key
    query = select(Watch.scanner).where(Watch.hospital == hospital, Watch.model == model)
    scanners = {*session.scalars(query), scanner}
    streams = streams_of(labels) + corrected
    return Budget(rule_of(session, hospital, model).months, streams * len(scanners))


def _raise(
    session: Session,
    watch: Watch,
    stream: str,
    at: datetime,
    hooks: Sequence[Webhook],
    *,
    alarm: Alarm | None = None,
    observation: int | None = None,
    since: datetime | None = None,
) -> None:
    """Raise an alarm, unless the stream has an unanswered one."""
    if any(each.stream == stream for each in open_alarms(session, **_place(watch))):
        return
    details: dict[str, Any] = {}
    if alarm is not None:
        details = {"up": alarm.up, "height": alarm.height, "limit": alarm.limit}
        place = watch.answers - alarm.at + alarm.since
        since = since or _time_of(session, watch, place, watch.answers) or at
    event = _add_event(
        session, watch, "alarm", at, since=since, stream=stream, observation=observation, details=details
    )
    messages.put(session, hooks, "watch.alarm", event, "investigate")
    # No scan's name, no patient: these are the hospital's own names.
    _log.warning("watch: %s of '%s' at %s calls: %s", watch.scanner, watch.model, watch.hospital, stream)


def _time_of(session: Session, watch: Watch, place: int, newest: int) -> datetime | None:
    """When the answer at a place of the series was given, of which `newest` is the newest."""
    query = (
        select(Observation.at)
        .where(Observation.hospital == watch.hospital, Observation.model == watch.model)
        .where(Observation.scanner == (watch.scanner or None), Observation.version == watch.version)
        .where(Observation.usual, Observation.at >= watch.began, Observation.at <= watch.last_at)
    )
    back = max(newest - place - 1, 0)
    return session.scalar(query.order_by(Observation.id.desc()).offset(back).limit(1))


def _add_event(session: Session, watch: Watch, kind: str, at: datetime, **fields: Any) -> WatchEvent:
    own = {"hospital": watch.hospital, "model": watch.model, "scanner": watch.scanner}
    event = WatchEvent(**own, kind=kind, at=at, **fields)
    session.add(event)
    session.flush()
    return event


def _settle(session: Session, watch: Watch, series: Series) -> None:
    """Set the state: somebody must look, a sum is near its limit, or all is as usual."""
    alarms = open_alarms(session, **_place(watch))
    if alarms:
        watch.state = "investigate"
        watch.since = min(each.since or each.at for each in alarms)
    else:
        watch.state, watch.since = ("watch" if series.is_near else "routine"), None


def _look_for_silence(database: Database, now: datetime, hooks: Sequence[Webhook]) -> None:
    """Count the days that have ended, and call where nothing arrived though something usually does."""
    today = now.date()
    with database.read() as session:
        due: list[_Key] = [(*row,) for row in session.execute(_KEYS.where(Watch.day < today))]
    for key in due:
        with database.write() as session:
            turn(session)
            watch = session.get(Watch, key)
            if watch is None:
                continue
            _end_days(watch, today)
            arrivals = Arrivals.of(watch.arrivals)
            if arrivals.probability < _budget(session, key, 1).daily:
                since = watch.last_at
                _raise(session, watch, SILENCE, now, hooks, since=since)
                _settle(session, watch, Series.of(watch.streams, watch.usual))


_KEYS = select(Watch.hospital, Watch.model, Watch.scanner)
