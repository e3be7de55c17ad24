from __future__ import annotations

import asyncio
import threading

import pytest

from service.errors import PartNotReady
from service.runtime.readiness import PartState, Readiness


def test_readiness_reports_every_part_and_requires_all() -> None:
    told: list[tuple[str, bool]] = []
    trouble = [True]

    def queue() -> str:
        if trouble:
            raise ConnectionError("no Redis")
        return "answers"

    readiness = Readiness({"store": lambda: "3 names", "queue": queue}, lambda *seen: told.append(seen))
    asyncio.run(readiness.look())
    assert readiness.states == {
        "store": PartState(True, "3 names"),
        "queue": PartState(False, "ConnectionError: no Redis"),
    }
    assert not readiness.ready
    trouble.clear()
    asyncio.run(readiness.look())
    assert readiness.ready
    assert told == [("store", True), ("queue", False), ("store", True), ("queue", True)]
    readiness.close()


def test_part_with_a_sentence_of_the_service_is_shown_without_a_class() -> None:
    def worker() -> str:
        raise PartNotReady("no worker is running yet")

    readiness = Readiness({"worker": worker}, lambda *_: None)
    asyncio.run(readiness.look())
    assert readiness.states == {"worker": PartState(False, "no worker is running yet")}
    readiness.close()


def test_readiness_is_false_before_the_first_check() -> None:
    readiness = Readiness({"store": lambda: "fine"}, lambda *_: None)
    assert not readiness.ready
    readiness.close()


def test_readiness_is_false_while_a_check_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    hang, entered = threading.Event(), threading.Event()
    looks = 0

    def store() -> str:
        nonlocal looks
        looks += 1
        if looks > 1:
            entered.set()
            hang.wait(60)
        return "fine"

    readiness = Readiness({"store": store}, lambda *_: None)

    async def scenario() -> None:
        await readiness.look()
        assert readiness.ready
        looking = asyncio.create_task(readiness.look())
        await asyncio.to_thread(entered.wait, 60)
        assert readiness.ready
        monkeypatch.setattr("service.runtime.readiness.STALE_SECONDS", 0.0)
        assert not readiness.ready
        assert "have not come back" in readiness.states["store"].detail
        monkeypatch.undo()
        hang.set()
        await looking
        assert readiness.ready

    asyncio.run(scenario())
    readiness.close()


def test_part_that_starts_late_is_a_warning_once_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def worker() -> str:
        raise ConnectionError("none yet")

    readiness = Readiness({"worker": worker}, lambda *_: None, late=frozenset({"worker"}))
    asyncio.run(readiness.look())
    assert not readiness.ready
    assert readiness.states["worker"].detail.startswith("it is starting")
    assert caplog.messages == []
    monkeypatch.setattr("service.runtime.readiness._START_SECONDS", 0.0)
    for _ in range(2):
        asyncio.run(readiness.look())
    assert readiness.states["worker"].detail == "ConnectionError: none yet"
    assert caplog.messages == ["worker is not ready: none yet"]
    readiness.close()
