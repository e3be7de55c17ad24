"""Slots, queue, and what is said to those beyond."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import ServiceBusy
from service.inference.admission import Admission


def test_admission_runs_at_most_its_slots_in_order() -> None:
    async def scenario() -> tuple[int, list[int]]:
        admission = Admission(2, 10)
        most, order = 0, []

        async def scan(number: int) -> None:
            nonlocal most
            async with admission.slot():
                order.append(number)
                most = max(most, admission.running)
                await asyncio.sleep(0)

        await asyncio.gather(*(scan(number) for number in range(12)))
        assert (admission.running, admission.waiting) == (0, 0)
        return most, order

    most, order = asyncio.run(scenario())
    assert most == 2
    assert order == list(range(12))


def test_admission_above_the_queue_is_503_with_retry_after() -> None:
    async def scenario() -> None:
        admission = Admission(1, 1)
        release = asyncio.Event()

        async def hold() -> None:
            async with admission.slot():
                await release.wait()

        holders = [asyncio.create_task(hold()) for _ in range(2)]
        await asyncio.sleep(0)
        assert (admission.running, admission.waiting, admission.full) == (1, 1, True)
        with pytest.raises(ServiceBusy) as refused:
            async with admission.slot():
                pytest.fail("admitted beyond the queue")
        assert refused.value.status == 503
        assert 1 <= int(refused.value.headers["Retry-After"]) <= 120
        release.set()
        await asyncio.gather(*holders)
        async with admission.slot():
            assert admission.running == 1

    asyncio.run(scenario())


def test_failed_or_cancelled_scan_releases_its_slot() -> None:
    async def scenario() -> None:
        admission = Admission(1, 1)
        with pytest.raises(ValueError, match="broken"):
            async with admission.slot():
                raise ValueError("broken")
        async with admission.slot():

            async def wait() -> None:
                async with admission.slot():
                    pytest.fail("two at once")

            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
            assert admission.waiting == 1
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert admission.waiting == 0
        assert not admission.full

    asyncio.run(scenario())
