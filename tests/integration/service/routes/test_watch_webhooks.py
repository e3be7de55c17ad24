"""A service that watches and tells: the alarm that it raises, and the answer that a person gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from service import observation
from service.database import WatchMessage
from service.watch import messages
from service.webhooks import read_webhooks
from tests.helpers.service.api import Api
from tests.helpers.service.receiver import SECRET, receivers
from tests.helpers.waiting import wait_for
from tests.unit.service.watch.test_watcher import answered, assign, log_normal


def test_alarm_and_its_answer_reach_the_address_of_the_configuration(
    start: Callable[..., Api],
    publish_bright: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "_FIRST_PAUSE", 0.05)
    publish_bright(tmp_path)
    with receivers() as begin:
        receiver = begin(statuses=[503])
        hook = {"url": receiver.hook.url, "secret": receiver.hook.secret}
        api = start(tmp_path, watch_webhooks=json.dumps([hook]), reconcile_every_seconds=0.1)
        assert api.client.put("/hospitals/north", json={"name": "North"}).status_code == 201
        begun = datetime.now(UTC) - timedelta(hours=441)
        assign(api.context.database, "sha256:1", begun)
        shifts = [*log_normal(400), *(9 * each for each in log_normal(40, 1))]
        with api.context.database.write() as session:
            rows = [answered(n, shift, begun + timedelta(hours=n)) for n, shift in enumerate(shifts)]
            observation.append(session, rows)
        wait_for(lambda: receiver.received)
        body = {"scanner": "CT 2", "reason": "of JOHN DOE", "actor": "ada"}
        said = api.client.post("/hospitals/north/watch/organ/answers", json=body)
        assert said.status_code == 200, said.text
        wait_for(lambda: len(receiver.received) == 2)
        # The first attempt failed.
        assert receiver.tried == 3
    found = [(each["type"], each["data"]["stream"], each["data"]["state"]) for _, each in receiver.received]
    assert found == [("watch.alarm", "shift", "investigate"), ("watch.answered", "shift", "routine")]
    assert "DOE" not in json.dumps(receiver.received)


def test_message_that_was_not_received_is_said_by_readiness_and_metrics(
    start: Callable[..., Api], publish_bright: Callable[[Path], object], tmp_path: Path
) -> None:
    publish_bright(tmp_path)
    hook = {"url": "http://127.0.0.1:9/hooks", "secret": SECRET}
    api = start(tmp_path, watch_webhooks=json.dumps([hook]))

    def part() -> dict[str, object]:
        found: dict[str, object] = api.client.get("/health/ready").json()["parts"]["webhooks"]
        return found

    assert part()["ok"]
    assert not part()["required"]
    (read,) = read_webhooks(json.dumps([hook]))
    now = datetime.now(UTC)
    with api.context.database.write() as session:
        own = {"address": read.address, "body": "{}", "created_at": now, "due": now + timedelta(hours=1)}
        session.add(WatchMessage(id="msg_1", attempts=3, **own))
    wait_for(lambda: not part()["ok"])
    assert "127.0.0.1: 1 message was not received" in str(part()["detail"])
    assert "locum_webhooks_undelivered 1.0" in api.client.get("/metrics").text
