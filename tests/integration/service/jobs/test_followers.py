"""Many clients that follow jobs, against a running service."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest

from service.errors import TooManyFollowers
from service.jobs.leases import finish
from tests.helpers.service.asking import note, problem, submitted, take


def read_all(api: Any, job: str) -> list[dict[str, Any]]:
    with api.client.stream("GET", f"/jobs/{job}/events") as answer:
        assert answer.status_code == 200
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


def wait_for(api: Any, followers: int) -> None:
    deadline = time.monotonic() + 10
    while api.context.followers.count != followers:
        assert time.monotonic() < deadline, f"{api.context.followers.count} followers"
        time.sleep(0.01)


@pytest.fixture
def looks(api: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The jobs of each look at the database."""
    found: list[list[str]] = []
    read = api.context.followers._read
    monkeypatch.setattr(
        api.context.followers, "_read", lambda wanted: (found.append(sorted(wanted)), read(wanted))[1]
    )
    return found


def test_all_followers_of_a_job_hear_every_event_by_the_same_looks(
    api: Any, cohort: str, looks: list[list[str]]
) -> None:
    job = submitted(api, cohort)
    with ThreadPoolExecutor(30) as pool:
        started = time.monotonic()
        following = [pool.submit(read_all, api, job) for _ in range(30)]
        wait_for(api, 30)
        lease = take(api, job)
        note(api, lease, "epoch", {"epoch": 1, "loss": 0.5})
        assert api.client.get("/health/live").status_code == 200
        finish(api.context.database, lease, "fell_back", reason="nothing better was found")
        heard = [each.result(20) for each in following]
        seconds = time.monotonic() - started
    assert all(events == heard[0] for events in heard)
    assert [event.get("state", event.get("epoch")) for event in heard[0]] == [
        "queued",
        "running",
        1,
        "fell_back",
    ]
    # One look per interval, and one that each join may hasten: not one per follower and interval.
    assert len(looks) <= seconds / 0.3 + 30 + 2
    wait_for(api, 0)


def test_follower_above_the_limit_is_rejected_until_another_leaves(
    api: Any, cohort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.context.followers, "_most", 1)
    job = submitted(api, cohort)
    place = f"/jobs/{job}/events"
    with api.client.stream("GET", place) as first:
        lines = first.iter_lines()
        assert next(lines)
        refused = api.client.get(place)
        assert problem(refused) == (503, "busy")
        assert int(refused.headers["retry-after"]) >= 1
    wait_for(api, 0)
    with api.client.stream("GET", place) as next_one:
        assert next_one.status_code == 200


def test_follower_of_another_hospital_takes_the_place_of_the_one_with_most(
    api: Any, cohort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    followers = api.context.followers
    monkeypatch.setattr(followers, "_most", 3)
    job = submitted(api, cohort)

    async def follow() -> None:
        async with AsyncExitStack() as stack:
            north = [await stack.enter_async_context(followers.following(job, "north")) for _ in range(3)]
            with pytest.raises(TooManyFollowers):
                followers.refuse_if_full("north")
            await stack.enter_async_context(followers.following(job, "south"))
            assert [each.let_go for each in north] == [False, False, True]
            # It ends by itself, although its job goes on.
            assert [event.type async for event in north[2].after(2**40)] == []
            with pytest.raises(TooManyFollowers):
                followers.refuse_if_full("south")

    asyncio.run_coroutine_threadsafe(follow(), api.loop).result(20)
    wait_for(api, 0)


def test_head_of_a_stream_ends_at_once(api: Any, cohort: str) -> None:
    job = submitted(api, cohort)
    answer = api.client.head(f"/jobs/{job}/events")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
    wait_for(api, 0)
