"""Admission control: limit the scans in work and in the queue, and reject the others with a retry time.

A decoded scan holds its voxels in memory, and one in inference its probabilities, so this is where their
number is bounded, for every request that decodes one.
A request beyond the queue is rejected at once, with an estimate of when to retry.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from service.errors import ServiceBusy

_MAX_RETRY_AFTER_S = 120
# Weight of the newest duration in the running mean that Retry-After is made from.
_MEMORY = 0.2


class Admission:
    """`slots` at work, `queue` waiting, first come first served. For one event loop."""

    def __init__(self, slots: int, queue: int) -> None:
        self.slots = slots
        self.queue = queue
        self.running = 0
        self.waiting = 0
        self._semaphore = asyncio.Semaphore(slots)
        self._mean_seconds = 1.0

    @property
    def full(self) -> bool:
        """Whether a scan would be rejected now."""
        return self.running + self.waiting >= self.slots + self.queue

    def retry_after(self) -> int:
        """Whole seconds until a slot is likely to be free, 1 to 120."""
        ahead = (self.running + self.waiting) / self.slots
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(self._mean_seconds * ahead)))

    def refuse_if_full(self) -> None:
        """Raise ServiceBusy as `slot` would, to reject a request before its body is read."""
        if self.full:
            raise self._busy()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Wait for a slot and hold it; gives the seconds waited. Raises ServiceBusy beyond the queue."""
        self.refuse_if_full()
        arrived = time.monotonic()
        self.waiting += 1
        try:
            await self._semaphore.acquire()
        finally:
            self.waiting -= 1
        started = time.monotonic()
        try:
            with self._held():
                yield started - arrived
        finally:
            self._mean_seconds += _MEMORY * (time.monotonic() - started - self._mean_seconds)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a slot to decode a scan that is kept, however long the queue is."""
        await self._semaphore.acquire()
        with self._held():
            yield

    @contextmanager
    def _held(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._semaphore.release()

    def _busy(self) -> ServiceBusy:
        seconds = self.retry_after()
        return ServiceBusy(
            f"{self.running} scans are being worked on and {self.waiting} are waiting, which is the limit "
            f"here; send the scan again in {seconds} s.",
            headers={"Retry-After": str(seconds)},
            retry_after=seconds,
        )
