"""Messages on alarms: written in the transaction of their alarm, and there until they were received.

A message that is not received is tried again, after pauses that grow from 5 s to 4 hours, for 3 days. A
process that sends one has it for a minute, so that of several processes one sends it. Where that process
dies, or the answer is lost, the message is sent twice: `webhook-id` is the same, by which the receiver knows.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from sqlalchemy import Select, delete, func, select, update
from sqlalchemy.orm import Session

from service.database import Database, WatchEvent, WatchMessage, database_now, in_turn
from service.webhooks import Webhook

Kind = Literal["watch.alarm", "watch.answered"]
KEPT: Final = timedelta(days=3)
"""For so long a message is tried."""
HELD: Final = timedelta(seconds=60)
"""For so long a process has a message that it took."""

_LOCK = "the messages of the watch"
_FIRST_PAUSE, _GROWTH, _LONGEST_PAUSE = 5.0, 4.0, 4 * 3600.0
_AT_ONCE = 20


def put(session: Session, hooks: Iterable[Webhook], kind: Kind, event: WatchEvent, state: str) -> None:
    """Write the message of an alarm for each webhook. It is sent once the transaction has committed."""
    at = event.at if event.answered_at is None else event.answered_at
    data = {
        "hospital": event.hospital,
        "model": event.model,
        "scanner": event.scanner or None,
        "stream": event.stream,
        "since": (event.since or event.at).isoformat(),
        "state": state,
    }
    body = json.dumps({"type": kind, "timestamp": at.isoformat(), "data": data})
    now = database_now(session)
    for hook in hooks:
        message = f"msg_{uuid.uuid4().hex}"
        own = {"id": message, "address": hook.address, "body": body, "created_at": now, "due": now}
        session.add(WatchMessage(**own, attempts=0))


def pause_after(attempts: int) -> float:
    """Seconds until a message is tried again that was tried so often, without the jitter."""
    return min(_FIRST_PAUSE * _GROWTH ** min(attempts - 1, 20), _LONGEST_PAUSE)


def give_up(session: Session) -> int:
    """Delete messages that were not received for too long. Returns how many."""
    late = select(WatchMessage.id).where(WatchMessage.created_at < database_now(session) - KEPT)
    found = list(session.scalars(late))
    session.execute(delete(WatchMessage).where(WatchMessage.id.in_(found)))
    return len(found)


@dataclass(frozen=True)
class Undelivered:
    """Messages of one webhook that were tried twice or more, and when the oldest of them was written."""

    host: str
    count: int
    since: datetime

    def __str__(self) -> str:
        """In words, for an operator."""
        said = "1 message was" if self.count == 1 else f"{self.count} messages were"
        return f"{self.host}: {said} not received, the oldest of {self.since:%Y-%m-%d %H:%M} UTC"


def undelivered(session: Session, hooks: Iterable[Webhook]) -> list[Undelivered]:
    """What these webhooks did not receive so far, by webhook. One failure alone is no news: it is tried again
    after seconds.
    """
    by_address = {each.address: each.host for each in hooks}
    query = select(WatchMessage.address, func.count(), func.min(WatchMessage.created_at)).where(
        WatchMessage.address.in_(by_address), WatchMessage.attempts >= 2
    )
    found = session.execute(query.group_by(WatchMessage.address))
    return sorted((Undelivered(by_address[row[0]], row[1], row[2]) for row in found), key=str)


@dataclass(frozen=True)
class Taken:
    """A message that this process has, at its attempt number `attempts`."""

    id: str
    hook: Webhook
    body: str
    attempts: int


def take(database: Database, hooks: Mapping[str, Webhook]) -> list[Taken]:
    """Take messages that are due, for webhooks by address. They are this process's for a minute."""
    with database.read() as session:
        if session.scalar(_due(session, hooks).limit(1)) is None:
            return []
    with database.write() as session:
        in_turn(session, _LOCK)
        found = session.scalars(_due(session, hooks).limit(_AT_ONCE)).all()
        for each in found:
            each.attempts, each.due = each.attempts + 1, database_now(session) + HELD
        return [Taken(each.id, hooks[each.address], each.body, each.attempts) for each in found]


def settle(database: Database, taken: Taken, received: bool) -> None:
    """Delete a message that was received; another one is due after a pause."""
    with database.write() as session:
        in_turn(session, _LOCK)
        mine = WatchMessage.id == taken.id
        if received:
            session.execute(delete(WatchMessage).where(mine))
            return
        pause = timedelta(seconds=pause_after(taken.attempts) * random.uniform(0.9, 1.1))
        # Unless it took so long that another process has it.
        mine = mine & (WatchMessage.attempts == taken.attempts)
        session.execute(update(WatchMessage).where(mine).values(due=database_now(session) + pause))


def _due(session: Session, hooks: Mapping[str, Webhook]) -> Select[WatchMessage]:
    # What another configuration named stays there until it is given up.
    mine, late = WatchMessage.address.in_(hooks), WatchMessage.due <= database_now(session)
    return select(WatchMessage).where(mine, late).order_by(WatchMessage.due)
