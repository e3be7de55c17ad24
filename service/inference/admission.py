"""Admission control: limit the scans in work and in the queue, and reject the others with a retry time.

A decoded scan holds its voxels in memory, and one in inference its probabilities, so this is where their
number is bounded, for every request that decodes one.

Slots and places in the queue are shared fairly between hospitals (`Caller.share`). A free slot goes to the
share with the fewest scans in work, of these to the one that was served longest ago. A request that finds the
queue full takes the place of the newest request of the share with most, unless that would leave it with
fewer: a burst of one hospital is rejected, and no other hospital's request. The rejection has an estimate of
when to retry.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from service.errors import ServiceBusy

_MAX_RETRY_AFTER_S = 120
# Weight of the newest duration in the running mean that Retry-After is made from.
_MEMORY = 0.2
# Shares of which it is known when they were last served.
_MOST_REMEMBERED = 1024


class Admission:
    """`slots` at work and `queue` waiting, over all shares, as one share sees them. For one event loop."""

    def __init__(self, slots: int, queue: int) -> None:
        self._line = _Line(slots, queue)
        self._share = ""

    def for_share(self, share: str) -> Admission:
        """The same slots and queue, for requests of another share."""
        bound = copy(self)
        bound._share = share
        return bound

    @property
    def slots(self) -> int:
        """Scans that may be in work at once."""
        return self._line.slots

    @property
    def running(self) -> int:
        """Scans in work, of all shares."""
        return self._line.running.total()

    @property
    def waiting(self) -> int:
        """Scans that take a place in the queue, of all shares."""
        return self._line.queued().total()

    @property
    def full(self) -> bool:
        """Whether a scan of this share would be rejected now."""
        return self._line.full and self._line.displaced_by(self._share) is None

    def retry_after(self) -> int:
        """Whole seconds until a slot is likely to be free, 1 to 120."""
        return self._line.retry_after()

    def refuse_if_full(self) -> None:
        """Raise ServiceBusy as `slot` would, to reject a request before its body is read."""
        if self.full:
            raise self._line.busy()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Turn]:
        """Wait for a slot and hold it.

        Raises ServiceBusy where the queue is full, or when another share takes the place.
        """
        line, arrived = self._line, time.monotonic()
        if line.full:
            line.displace_for(self._share)
        await line.acquire(self._share, queued=True)
        started = time.monotonic()
        held = Turn(line, self._share, started - arrived)
        try:
            yield held
        finally:
            held.end()
            line.mean_seconds += _MEMORY * (time.monotonic() - started - line.mean_seconds)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Hold a slot to decode a scan that is kept, however long the queue is."""
        arrived = time.monotonic()
        await self._line.acquire(self._share, queued=False)
        held = Turn(self._line, self._share, time.monotonic() - arrived)
        try:
            yield held
        finally:
            held.end()


class Turn:
    """A slot that is held. `waited`: the seconds until it was."""

    def __init__(self, line: _Line, share: str, waited: float) -> None:
        self.waited = waited
        self._line, self._share = line, share
        self._held = True

    async def rest(self) -> Literal["alone", "rested", "no-room"]:
        """Let the scans of other shares that wait go first, and wait for the slot again.

        The scan stays in memory, so that no more scans rest than there are slots: `no-room` says that one
        more would be too many, `alone` that no other share waits.
        """
        line, share = self._line, self._share
        if not line.others_wait(share):
            return "alone"
        if line.resting.total() >= line.slots:
            return "no-room"
        line.resting[share] += 1
        self.end()
        try:
            await line.acquire(share, queued=False, resumes=True)
            self._held = True
        finally:
            line.resting[share] -= 1
        return "rested"

    def end(self) -> None:
        """Give the slot back, if it is held."""
        if self._held:
            self._held = False
            self._line.release(self._share)


@dataclass(eq=False)
class _Waiting:
    """A request that waits.

    `queued`: it takes a place in the queue, which another share may take from it. `resumes`: it rested.
    """

    share: str
    queued: bool
    granted: asyncio.Future[None]
    resumes: bool = False


@dataclass
class _Line:
    """Every share's requests. No slot is free while one waits."""

    slots: int
    queue: int
    running: Counter[str] = field(default_factory=Counter)
    resting: Counter[str] = field(default_factory=Counter)
    waiting: list[_Waiting] = field(default_factory=list)
    mean_seconds: float = 1.0
    # Shares in the order in which they were last served.
    _served: dict[str, None] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        return self.running.total() + self.queued().total() >= self.slots + self.queue

    def queued(self) -> Counter[str]:
        """Places in the queue by share."""
        return Counter(each.share for each in self.waiting if each.queued)

    def others_wait(self, share: str) -> bool:
        """Whether a scan of another share waits for a slot."""
        return any(each.share != share and not each.granted.done() for each in self.waiting)

    def displaced_by(self, share: str) -> _Waiting | None:
        """The request that a new one of this share would displace; None where there is none."""
        queued = self.queued()
        if not queued:
            return None
        most = max(queued, key=lambda each: queued[each] + self.running[each])
        # Else the two would take the place from each other by turns.
        if queued[most] + self.running[most] <= queued[share] + self.running[share] + 1:
            return None
        return next(each for each in reversed(self.waiting) if each.queued and each.share == most)

    def displace_for(self, share: str) -> None:
        """Make room in a full queue. Raises ServiceBusy."""
        found = self.displaced_by(share)
        if found is None:
            raise self.busy()
        self.waiting.remove(found)
        if not found.granted.done():
            found.granted.set_exception(self.busy())

    async def acquire(self, share: str, *, queued: bool, resumes: bool = False) -> None:
        """Wait for a slot. Raises ServiceBusy when displaced."""
        entry = _Waiting(share, queued, asyncio.get_running_loop().create_future(), resumes)
        self.waiting.append(entry)
        self._grant()
        try:
            await entry.granted
        except BaseException:
            if entry in self.waiting:
                self.waiting.remove(entry)
            elif not entry.granted.cancelled() and entry.granted.exception() is None:
                # Cancelled between the grant and its use.
                self.release(share)
            raise

    def release(self, share: str) -> None:
        """Give a slot back, and on."""
        self.running[share] -= 1
        if not self.running[share]:
            del self.running[share]
        self._grant()

    def retry_after(self) -> int:
        ahead = (self.running.total() + self.queued().total()) / self.slots
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(self.mean_seconds * ahead)))

    def busy(self) -> ServiceBusy:
        seconds = self.retry_after()
        return ServiceBusy(
            f"{self.running.total()} scans are being worked on and {self.queued().total()} are waiting, "
            f"which is the limit here; send the scan again in {seconds} s.",
            headers={"Retry-After": str(seconds)},
            retry_after=seconds,
        )

    def _grant(self) -> None:
        while self.running.total() < self.slots:
            # A cancelled request leaves the list when its task goes on.
            # A share has no other scan in work while one of its scans rests.
            waiting = [
                each
                for each in self.waiting
                if not each.granted.done() and (each.resumes or not self.resting[each.share])
            ]
            if not waiting:
                return
            served = {share: place for place, share in enumerate(self._served)}
            chosen = min(waiting, key=lambda each: (self.running[each.share], served.get(each.share, -1)))
            self.waiting.remove(chosen)
            self.running[chosen.share] += 1
            self._served.pop(chosen.share, None)
            self._served[chosen.share] = None
            if len(self._served) > _MOST_REMEMBERED:
                del self._served[next(iter(self._served))]
            chosen.granted.set_result(None)
