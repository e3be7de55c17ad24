"""Tell others of alarms: messages are written in the transaction of their alarm, and sent after it.

A message that is not received is sent again, after pauses that grow from 5 s to 4 hours, for 3 days. A
process that sends one has it for a minute, so that of several processes one sends it. Where that process
dies, or the answer is lost, the message is sent twice: `webhook-id` is the same, by which the receiver knows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import httpx
from sqlalchemy import Select, delete, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.database import Database, WatchEvent, WatchMessage, database_now, in_turn
from service.webhooks import Webhook

Kind = Literal["watch.alarm", "watch.answered"]
KEPT: Final = timedelta(days=3)
"""For so long a message is tried."""

_log = logging.getLogger("locum.service")
_LOCK = "the messages of the watch"
_FIRST_PAUSE, _GROWTH, _LONGEST_PAUSE = 5.0, 4.0, 4 * 3600.0
# All of an answer: longer than that no receiver needs. A process has a message for longer.
_ANSWER_SECONDS = 15.0
_HELD = timedelta(seconds=60)
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
class _Taken:
    """A message that this process has, at its attempt number `attempts`."""

    id: str
    hook: Webhook
    body: str
    attempts: int


class Messenger:
    """Sends what is due to the webhooks that the configuration names."""

    def __init__(self, database: Database, hooks: Sequence[Webhook], every_seconds: float) -> None:
        self._database = database
        self._hooks = {each.address: each for each in hooks}
        self._every_seconds = every_seconds
        # No proxy of the environment: a message goes to its address alone. SSL_CERT_FILE is obeyed.
        self._verify = httpx.create_ssl_context()

    async def watch(self) -> None:
        """Send until cancelled. Outages of the database are reported by the readiness check."""
        while self._hooks:
            try:
                await self.send()
            except SQLAlchemyError as error:
                _log.debug("messages could not be read: %s", type(error).__name__)
            except Exception:
                # A bug: log it, and keep sending.
                _log.exception("sending messages: an unexpected error; it is tried again")
            await asyncio.sleep(self._every_seconds)

    async def send(self) -> int:
        """Send what is due, side by side. Returns how many messages were received."""
        taken = await asyncio.to_thread(self._take)
        if not taken:
            return 0
        async with httpx.AsyncClient(
            verify=self._verify, trust_env=False, follow_redirects=False, timeout=_ANSWER_SECONDS
        ) as client:
            return sum(await asyncio.gather(*(self._deliver(client, each) for each in taken)))

    def _take(self) -> list[_Taken]:
        with self._database.read() as session:
            if session.scalar(self._due(session).limit(1)) is None:
                return []
        with self._database.write() as session:
            in_turn(session, _LOCK)
            found = session.scalars(self._due(session).limit(_AT_ONCE)).all()
            for each in found:
                each.attempts, each.due = each.attempts + 1, database_now(session) + _HELD
            return [_Taken(each.id, self._hooks[each.address], each.body, each.attempts) for each in found]

    def _due(self, session: Session) -> Select[WatchMessage]:
        # What another configuration named stays there until it is given up.
        mine, late = WatchMessage.address.in_(self._hooks), WatchMessage.due <= database_now(session)
        return select(WatchMessage).where(mine, late).order_by(WatchMessage.due)

    async def _deliver(self, client: httpx.AsyncClient, taken: _Taken) -> bool:
        failure = await _failure_of(client, taken)
        if failure is not None:
            _log.warning("webhook at %s: attempt %d failed: %s", taken.hook.host, taken.attempts, failure)
        try:
            await asyncio.to_thread(self._settle, taken, failure is None)
        except SQLAlchemyError as error:
            # It is sent again, under its id, when this process has had it for a minute.
            _log.debug("a message could not be settled: %s", type(error).__name__)
        return failure is None

    def _settle(self, taken: _Taken, received: bool) -> None:
        with self._database.write() as session:
            in_turn(session, _LOCK)
            mine = WatchMessage.id == taken.id
            if received:
                session.execute(delete(WatchMessage).where(mine))
                return
            pause = timedelta(seconds=pause_after(taken.attempts) * random.uniform(0.9, 1.1))
            # Unless it took so long that another process has it.
            mine = mine & (WatchMessage.attempts == taken.attempts)
            session.execute(update(WatchMessage).where(mine).values(due=database_now(session) + pause))


async def _failure_of(client: httpx.AsyncClient, taken: _Taken) -> str | None:
    """Send one message; return what went wrong in words, None where it was received (2xx)."""
    headers = taken.hook.headers(taken.id, taken.body, datetime.now(UTC))
    try:
        # The body of the answer is not read: nothing depends on it, and it might never end.
        async with (
            asyncio.timeout(_ANSWER_SECONDS),
            client.stream("POST", taken.hook.url, content=taken.body, headers=headers) as answer,
        ):
            return None if answer.is_success else f"status {answer.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        # Its message may quote the URL.
        return type(error).__name__
