"""What a hospital still gets of `/segment` while another floods it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from service.database import Hospital
from service.identity import keys
from service.settings import scan_limits

PLACES = 4
ROUTES = ("/segment", "/display")


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Any:
    store = tmp_path_factory.mktemp("store")
    publish_bright(store)
    found = start(store, auth="keys", inference_slots=1, inference_queue=PLACES - 1)
    now = datetime.now(UTC)
    with found.context.database.write() as session:
        for name in ("north", "south"):
            session.add(Hospital(id=name, name=name, site=None, created_at=now, updated_at=now))
    return found


@pytest.fixture(scope="module")
def secrets(api: Any) -> dict[str, str]:
    """Two readers' keys of north, one of south."""
    with api.context.database.write() as session:
        hospitals = {"first": "north", "second": "north", "south": "south"}
        return {
            name: keys.create(session, name, "reader", hospital)[1] for name, hospital in hospitals.items()
        }


@contextmanager
def slot_taken(api: Any) -> Iterator[None]:
    """A scan of north in work."""
    release, held = asyncio.Event(), threading.Event()

    async def hold() -> None:
        async with api.context.admission.for_share("north").slot():
            held.set()
            await release.wait()

    holder = asyncio.run_coroutine_threadsafe(hold(), api.loop)
    assert held.wait(10)
    try:
        yield
    finally:
        api.loop.call_soon_threadsafe(release.set)
        holder.result(10)


@pytest.mark.parametrize("route", ROUTES)
def test_burst_of_one_hospital_leaves_places_to_another(
    api: Any, secrets: dict[str, str], make_png: Callable[..., bytes], picture: Any, route: str
) -> None:
    scan = make_png(picture)

    def send(who: str) -> int:
        headers = {"Authorization": f"Bearer {secrets[who]}"}
        status: int = api.client.post(route, files={"scan": scan}, headers=headers).status_code
        return status

    def wait_for(waiting: int) -> None:
        deadline = time.monotonic() + 20
        while api.context.admission.waiting != waiting:
            assert time.monotonic() < deadline, f"{api.context.admission.waiting} are waiting"
            time.sleep(0.01)

    with ThreadPoolExecutor(PLACES + 1) as pool:
        with slot_taken(api):
            burst = [pool.submit(send, "first") for _ in range(PLACES - 1)]
            wait_for(PLACES - 1)
            # Another key of the hospital is no other share.
            assert send("second") == 503
            other = pool.submit(send, "south")
            (displaced,), _ = wait(burst, 20, FIRST_COMPLETED)
            assert displaced.result() == 503
            assert not other.done()
        assert other.result(30) == 200
        assert sorted(each.result(30) for each in burst) == [200, 200, 503]


def test_image_with_far_more_pixels_than_its_network_takes_is_413(
    api: Any, secrets: dict[str, str], make_png: Callable[..., bytes]
) -> None:
    """A file of kilobytes that held a slot for seconds."""
    headers = {"Authorization": f"Bearer {secrets['south']}"}
    large = make_png(np.zeros((2049, 2048), np.uint8))
    refused = api.client.post("/segment", files={"scan": large}, headers=headers)
    assert (refused.status_code, refused.json()["type"]) == (413, "urn:locum:problem:scan-too-large")
    assert "at most 4194304 pixels for a network's input of 32 x 32, found 2048 x 2049" in refused.text
    usual = make_png(np.zeros((2048, 2048), np.uint8))
    assert api.client.post("/segment", files={"scan": usual}, headers=headers).status_code == 200


def test_pixels_for_a_large_network_are_those_of_the_setting(api: Any) -> None:
    task = api.store.open("bright@1").manifest.task.model_copy(update={"size": (512, 512)})
    assert scan_limits(api.settings, task) == scan_limits(api.settings)
    fewer = api.settings.model_copy(update={"max_pixels_per_input": 20})
    assert scan_limits(fewer, task).max_pixels == 20 * 512 * 512
