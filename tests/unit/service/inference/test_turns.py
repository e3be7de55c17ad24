"""The work on a scan in a thread: it rests while others wait, and ends when its client leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from service.inference.admission import Admission
from service.inference.volumes import TakesLonger
from service.routes.scan_request import Work
from service.settings import Settings


class Client:
    """A request with a client that stays until `left`."""

    def __init__(self) -> None:
        self.left = False

    async def is_disconnected(self) -> bool:
        return self.left


def worked(
    share: Admission, client: Client, work: Callable[[Work], Any], tmp_path: Path, *, by_job: bool = False
) -> Any:
    """What the work gives, in a slot of a share."""
    settings = Settings(store=tmp_path, turn_seconds=1e-6, volume_seconds=10)

    async def held() -> Any:
        async with share.slot() as turn:
            own = Work(client, settings, turn, by_job=by_job)  # type: ignore[arg-type]
            return await own.run(lambda: work(own))

    return held()


def test_a_long_scan_lets_the_scan_of_another_hospital_by(tmp_path: Path) -> None:
    async def scenario() -> None:
        whole, done, began = Admission(1, 8), threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def long(own: Work) -> str:
            loop.call_soon_threadsafe(began.set)
            while not done.is_set():
                own.look()
            assert own.rested > 0
            return "long"

        def small(own: Work) -> str:
            done.set()
            return "small"

        north = asyncio.create_task(worked(whole.for_share("north"), Client(), long, tmp_path))
        await began.wait()
        south = asyncio.create_task(worked(whole.for_share("south"), Client(), small, tmp_path))
        # South's scan is done while north's goes on: without a rest, neither would end.
        assert await asyncio.wait_for(asyncio.gather(north, south), 60) == ["long", "small"]

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_the_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = Client()

        def long(own: Work) -> None:
            client.left = True
            while True:
                own.look()

        with pytest.raises(ClientDisconnect):
            await asyncio.wait_for(worked(Admission(1, 1), client, long, tmp_path), 60)

    asyncio.run(scenario())


def test_a_scan_that_may_not_rest_becomes_a_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        whole, stop = Admission(1, 8), threading.Event()

        def long(own: Work) -> None:
            while not stop.is_set():
                own.look()

        def scan(share: str, work: Callable[[Work], Any]) -> asyncio.Task[Any]:
            return asyncio.create_task(worked(whole.for_share(share), Client(), work, tmp_path, by_job=True))

        north, east = scan("north", long), scan("east", long)
        # The one rests for the other, which has no room to rest for south, and makes it by its end.
        assert await asyncio.wait_for(scan("south", lambda _: "small"), 60) == "small"
        stop.set()
        found = await asyncio.wait_for(asyncio.gather(north, east, return_exceptions=True), 60)
        assert sorted(map(type, found), key=str) == sorted([TakesLonger, type(None)], key=str)

    asyncio.run(scenario())
