"""Messages on alarms, before real HTTP servers that verify them, fail, redirect, and never end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from service.database import Database, Watch, WatchEvent, WatchMessage
from service.observation import append
from service.watch import sender
from service.watch.messages import KEPT, give_up, pause_after, put, take, undelivered
from service.watch.sender import Sender
from service.watch.watcher import close, look
from service.webhooks import Webhook
from tests.helpers.service.receiver import NEVER, SECRET, Receiver, receivers
from tests.unit.service.watch.test_watcher import BEGAN, assign, log_normal, year

Begin = Callable[..., Receiver]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """`begin(**fields)`: a receiver that listens on loopback."""
    with receivers() as listen:
        yield listen


def event(number: int = 1, **fields: Any) -> WatchEvent:
    own = {"hospital": "north", "model": "organ", "scanner": "CT 2", "kind": "alarm", "stream": "shift"}
    return WatchEvent(**own, at=BEGAN + timedelta(days=number), since=BEGAN, details={}, **fields)


def put_one(database: Database, *hooks: Webhook) -> None:
    with database.write() as session:
        put(session, hooks, "watch.alarm", event(), "investigate")


def send(database: Database, *hooks: Webhook) -> int:
    return asyncio.run(Sender(database, hooks, 1).send())


def waiting(database: Database) -> list[WatchMessage]:
    with database.read() as session:
        return list(session.scalars(select(WatchMessage).order_by(WatchMessage.id)))


def make_due(database: Database) -> None:
    with database.write() as session:
        session.execute(update(WatchMessage).values(due=datetime.now(UTC)))


def test_alarm_and_its_answer_are_received_with_nothing_of_a_patient(
    database: Database, begin: Begin
) -> None:
    receiver = begin()
    hooks = (receiver.hook,)
    assign(database, "sha256:1", BEGAN)
    with database.write() as session:
        append(session, year([*log_normal(400), *(9 * each for each in log_normal(40, 1))]))
    look(database, BEGAN, hooks)
    assert send(database, *hooks) == 1
    with database.write() as session:
        watch = session.get_one(Watch, ("north", "organ", "CT 2"))
        since = watch.since
        assert since is not None
        assert close(session, watch, BEGAN + timedelta(days=60), "ada", "of JOHN DOE", hooks) == 1
    assert send(database, *hooks) == 1
    (_, alarm), (_, answered) = receiver.received
    data = {"hospital": "north", "model": "organ", "scanner": "CT 2", "stream": "shift"}
    assert alarm["type"] == "watch.alarm"
    assert alarm["data"] == {**data, "since": since.isoformat(), "state": "investigate"}
    assert datetime.fromisoformat(alarm["timestamp"]) > since
    assert answered == {
        "type": "watch.answered",
        "timestamp": (BEGAN + timedelta(days=60)).isoformat(),
        "data": {**data, "since": since.isoformat(), "state": "routine"},
    }
    assert waiting(database) == []
    assert receiver.received[0][0] != receiver.received[1][0]


def test_message_is_of_the_transaction_of_its_alarm(database: Database, begin: Begin) -> None:
    hook = begin().hook
    with database.write() as session:
        put(session, [hook], "watch.alarm", event(), "investigate")
        session.flush()
        assert session.scalars(select(WatchMessage)).one().address == hook.address
        session.rollback()
    assert waiting(database) == []


def test_message_that_fails_is_sent_again_under_its_id_after_a_pause(
    database: Database, begin: Begin
) -> None:
    receiver = begin(statuses=[500, 404])
    put_one(database, receiver.hook)
    for attempt, pause in ((1, 5), (2, 20)):
        assert send(database, receiver.hook) == 0
        (row,) = waiting(database)
        assert row.attempts == attempt
        left = (row.due - datetime.now(UTC)).total_seconds()
        assert 0.8 * pause < left <= 1.1 * pause
        with database.read() as session:
            known = undelivered(session, [receiver.hook])
        # The first failure is no news.
        assert [(each.host, each.count) for each in known] == [("127.0.0.1", 1)] * (attempt - 1)
        # Not before.
        assert send(database, receiver.hook) == 0
        make_due(database)
    assert send(database, receiver.hook) == 1
    assert receiver.tried == 3
    assert [message for message, _ in receiver.received] == [row.id]
    assert waiting(database) == []


def test_redirect_is_not_followed(database: Database, begin: Begin) -> None:
    other = begin()
    receiver = begin(statuses=[307, 302], location=other.hook.url)
    put_one(database, receiver.hook)
    for _ in range(2):
        assert send(database, receiver.hook) == 0
        make_due(database)
    assert (receiver.tried, other.tried) == (2, 0)


def test_slow_receiver_ends_by_time_and_holds_up_no_other(
    database: Database, begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "_ANSWER_SECONDS", 3)
    slow, quick = begin(statuses=[NEVER]), begin(endless=True)
    put_one(database, slow.hook, quick.hook)
    assert send(database, slow.hook, quick.hook) == 1
    assert len(quick.received) == 1
    (row,) = waiting(database)
    assert row.address == slow.hook.address
    (record,) = caplog.records
    assert "webhook at 127.0.0.1: attempt 1 failed: " in record.getMessage()
    assert "secret-path" not in record.getMessage()


def test_nothing_listens_and_the_message_stays(database: Database, begin: Begin) -> None:
    hook = Webhook("http://127.0.0.1:1/", SECRET)
    put_one(database, hook)
    assert send(database, hook) == 0
    assert [each.attempts for each in waiting(database)] == [1]


def test_several_processes_send_each_message_once(
    database: Database, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    receivers = [begin(), begin()]
    hooks = [each.hook for each in receivers]
    for _ in range(30):
        put_one(database, *hooks)
    others = [Database(database.url.render_as_string(hide_password=False)) for _ in range(3)]

    async def race() -> int:
        senders = [Sender(each, hooks, 1) for each in others]
        sent = 0
        # A busy machine may cut a connection off: what was not received then is due again.
        for _ in range(10):
            for _ in range(2):
                sent += sum(await asyncio.gather(*(each.send() for each in senders)))
            if sent == 60:
                break
            make_due(database)
        return sent

    try:
        assert asyncio.run(race()) == 60
    finally:
        for each in others:
            each.dispose()
    failed = sum("failed:" in each.getMessage() for each in caplog.records)
    assert 60 <= sum(receiver.tried for receiver in receivers) <= 60 + failed
    for receiver in receivers:
        assert len({message for message, _ in receiver.received}) == 30
    assert waiting(database) == []


def test_message_of_a_process_that_died_while_sending_is_sent_after_a_minute(
    database: Database, begin: Begin
) -> None:
    receiver = begin()
    put_one(database, receiver.hook)
    (taken,) = take(database, {receiver.hook.address: receiver.hook})
    assert send(database, receiver.hook) == 0
    (row,) = waiting(database)
    assert 50 < (row.due - datetime.now(UTC)).total_seconds() <= 60
    make_due(database)
    assert send(database, receiver.hook) == 1
    assert [message for message, _ in receiver.received] == [taken.id]


def test_address_that_the_configuration_does_not_name_receives_nothing(
    database: Database, begin: Begin
) -> None:
    before, now = begin(), begin()
    put_one(database, before.hook)
    assert send(database, now.hook) == send(database) == 0
    assert (before.tried, now.tried) == (0, 0)
    with database.read() as session:
        assert before.hook.url not in json.dumps([each.body for each in waiting(database)])
        assert {each.address for each in session.scalars(select(WatchMessage))} == {before.hook.address}


def test_message_is_given_up_after_three_days(database: Database, begin: Begin) -> None:
    hook = begin().hook
    put_one(database, hook)
    put_one(database, hook)
    late, _ = waiting(database)
    with database.write() as session:
        begun = datetime.now(UTC) - KEPT
        ids = WatchMessage.id == late.id
        session.execute(update(WatchMessage).where(ids).values(created_at=begun))
        session.execute(update(WatchMessage).where(~ids).values(created_at=begun + timedelta(minutes=1)))
    with database.write() as session:
        assert give_up(session) == 1
    assert late.id not in {each.id for each in waiting(database)}


def test_pauses_grow_to_hours() -> None:
    assert [pause_after(attempt) for attempt in range(1, 9)] == [5, 20, 80, 320, 1280, 5120, 14400, 14400]
    assert pause_after(10**6) == 14400
