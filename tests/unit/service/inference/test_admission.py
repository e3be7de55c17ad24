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


def queued(admission: Admission, name: str, log: list[str]) -> asyncio.Task[None]:
    """A request that holds its slot for one turn of the loop, and notes its name when it has it."""

    async def scan() -> None:
        async with admission.slot():
            log.append(name)
            await asyncio.sleep(0)

    return asyncio.create_task(scan())


def test_slots_go_to_the_shares_in_turns_and_within_a_share_in_order() -> None:
    async def scenario() -> list[str]:
        whole, log = Admission(1, 20), list[str]()
        north, south = whole.for_share("north"), whole.for_share("south")
        tasks = [queued(north, f"n{number}", log) for number in range(6)]
        await asyncio.sleep(0)
        tasks += [queued(south, f"s{number}", log) for number in range(2)]
        await asyncio.gather(*tasks)
        assert (whole.running, whole.waiting) == (0, 0)
        return log

    assert asyncio.run(scenario()) == ["n0", "n1", "s0", "n2", "s1", "n3", "n4", "n5"]


def test_free_slot_goes_to_the_share_with_fewest_in_work() -> None:
    async def scenario() -> None:
        whole, log = Admission(3, 20), list[str]()
        north, south = whole.for_share("north"), whole.for_share("south")
        async with south.turn(), north.turn():
            async with north.turn():
                tasks = [queued(north, "n", log), queued(south, "s", log)]
                await asyncio.sleep(0)
            await asyncio.gather(*tasks)
        assert log == ["s", "n"]

    asyncio.run(scenario())


def test_full_queue_takes_the_place_of_the_share_with_most() -> None:
    async def scenario() -> None:
        whole, log = Admission(1, 4), list[str]()
        north, south = whole.for_share("north"), whole.for_share("south")
        async with north.slot():
            burst = [queued(north, f"n{number}", log) for number in range(4)]
            await asyncio.sleep(0)
            assert north.full
            assert not south.full
            others = [queued(south, f"s{number}", log) for number in range(3)]
            await asyncio.sleep(0)
            # One in work and two waiting of north, two of south: the third of south is one too many.
            assert (whole.running, whole.waiting) == (1, 4)
            assert north.full
            assert south.full
        outcomes = await asyncio.gather(*burst, *others, return_exceptions=True)
        assert log == ["s0", "n0", "s1", "n1"]
        refused = [isinstance(outcome, ServiceBusy) for outcome in outcomes]
        assert refused == [False, False, True, True, False, False, True]

    asyncio.run(scenario())


def test_request_that_is_cancelled_when_it_is_granted_passes_its_slot_on() -> None:
    async def scenario() -> None:
        whole, log = Admission(1, 4), list[str]()
        async with whole.slot():
            first, second = queued(whole, "first", log), queued(whole, "second", log)
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert log == ["second"]
        assert (whole.running, whole.waiting) == (0, 0)

    asyncio.run(scenario())


def test_a_scan_that_rests_lets_another_share_by_and_goes_on_before_its_own() -> None:
    async def scenario() -> None:
        whole, log = Admission(1, 20), list[str]()
        north, south = whole.for_share("north"), whole.for_share("south")
        async with north.slot() as turn:
            assert await turn.rest() == "alone"
            tasks = [queued(north, "n", log)]
            await asyncio.sleep(0)
            # Others of the same share do not count: they take as long.
            assert await turn.rest() == "alone"
            tasks += [queued(south, "s1", log), queued(south, "s2", log)]
            await asyncio.sleep(0)
            assert await turn.rest() == "rested"
            log.append("on")
            assert whole.running == 1
        await asyncio.gather(*tasks)
        assert log == ["s1", "on", "n", "s2"] or log == ["s1", "on", "s2", "n"]
        assert (whole.running, whole.waiting) == (0, 0)

    asyncio.run(scenario())


def test_no_more_scans_rest_than_there_are_slots() -> None:
    async def scenario() -> None:
        whole, rests = Admission(1, 20), list[str]()
        north, east, south = map(whole.for_share, ("north", "east", "south"))
        go_on = asyncio.Event()

        async def long(share: Admission) -> None:
            async with share.slot() as turn:
                await asyncio.sleep(0)
                rests.append(await turn.rest())
                await go_on.wait()

        log: list[str] = []
        tasks = [asyncio.create_task(long(each)) for each in (north, east)]
        await asyncio.sleep(0)
        tasks.append(queued(south, "s", log))
        for _ in range(10):
            await asyncio.sleep(0)
        # North rests for east, which may not rest too: its scan and north's are in memory.
        assert rests == ["no-room"]
        go_on.set()
        await asyncio.gather(*tasks)
        assert sorted(rests) == ["no-room", "rested"]
        assert (log, whole.running) == (["s"], 0)

    asyncio.run(scenario())


def test_a_scan_that_is_cancelled_while_it_rests_holds_no_slot() -> None:
    async def scenario() -> None:
        whole = Admission(1, 20)
        north, south = whole.for_share("north"), whole.for_share("south")
        release = asyncio.Event()

        async def long() -> None:
            async with north.slot() as turn:
                while not whole.waiting:
                    await asyncio.sleep(0)
                await turn.rest()

        async def hold() -> None:
            async with south.slot():
                await release.wait()

        first = asyncio.create_task(long())
        await asyncio.sleep(0)
        second = asyncio.create_task(hold())
        for _ in range(5):
            await asyncio.sleep(0)
        assert (whole.running, first.done()) == (1, False)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert whole.running == 1
        release.set()
        await second
        assert whole.running == 0
        async with north.slot():
            assert whole.running == 1

    asyncio.run(scenario())
