"""Jobs that clients follow: one look at the database for all followers, and a limit on their number.

A look reads every followed job in one thread, so a thousand followers cost what one costs, and other requests
keep their threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError

from service.database import Database, JobEvent
from service.database.job_states import TERMINAL
from service.errors import JobUnknown, TooManyFollowers
from service.jobs import records

LOOK_SECONDS = 0.3
"""How soon a follower hears of an event."""

_RETRY_SECONDS = 10


@dataclass(eq=False)
class Feed:
    """A job's events, as far as they were read, for all of its followers.

    `over`: no event follows those of `events`. `ended`: it is not read any more; a follower comes back with
    the id of its last event.
    """

    events: list[JobEvent] = field(default_factory=list)
    over: bool = False
    ended: bool = False
    followers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def after(self, last: int) -> AsyncIterator[JobEvent]:
        """Give the events after the one with id `last`, and go on until the job is over."""
        seen = 0
        while True:
            changed = self.changed
            for event in self.events[seen:]:
                seen += 1
                if event.id > last:
                    yield event
            if self.ended or (self.over and seen == len(self.events)):
                return
            if seen == len(self.events):
                await changed.wait()

    def add(self, events: list[JobEvent], over: bool) -> None:
        """Take in what was read."""
        self.events.extend(events)
        self.over = over
        if events or over:
            self._announce()

    def end(self) -> None:
        """Let the followers go."""
        self.ended = True
        self._announce()

    def _announce(self) -> None:
        # Each event wakes those that waited for it; who comes later waits for the next one.
        self.changed.set()
        self.changed = asyncio.Event()


class Followers:
    """Feeds of the jobs that are followed. For one event loop."""

    def __init__(self, database: Database, most: int, closing: threading.Event) -> None:
        """At most `most` followers at a time; all go when `closing` is set.

        `database` acts for the service itself.
        """
        self._database = database
        self._most = most
        self._closing = closing
        self._feeds: dict[str, Feed] = {}
        self._joined = asyncio.Event()

    @property
    def count(self) -> int:
        """Followers of all jobs."""
        return sum(feed.followers for feed in self._feeds.values())

    @asynccontextmanager
    async def following(self, job: str) -> AsyncIterator[Feed]:
        """Follow a job that the caller may see. Raises TooManyFollowers."""
        if self.count >= self._most:
            raise TooManyFollowers(
                f"{self._most} clients follow jobs already (LOCUM_MAX_FOLLOWERS): try again, or read "
                f"/jobs/{job} from time to time",
                headers={"Retry-After": str(_RETRY_SECONDS)},
                retry_after=_RETRY_SECONDS,
            )
        feed = self._feeds.setdefault(job, Feed())
        feed.followers += 1
        self._joined.set()
        if self._closing.is_set():
            feed.end()
        try:
            yield feed
        finally:
            feed.followers -= 1
            if feed.followers == 0 and self._feeds.get(job) is feed:
                del self._feeds[job]

    async def watch(self) -> None:
        """Read the events of followed jobs until cancelled."""
        while True:
            self._joined.clear()
            if self._closing.is_set():
                self._let_go()
            await self._look()
            # A new follower need not wait for the next look.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), LOOK_SECONDS if self._feeds else None)

    def _let_go(self) -> None:
        while self._feeds:
            self._feeds.popitem()[1].end()

    async def _look(self) -> None:
        feeds = {job: feed for job, feed in self._feeds.items() if not feed.over}
        if not feeds:
            return
        wanted = {job: feed.events[-1].id if feed.events else 0 for job, feed in feeds.items()}
        try:
            found = await asyncio.to_thread(self._read, wanted)
        except SQLAlchemyError:
            self._let_go()
            return
        for job, (events, over) in found.items():
            feeds[job].add(events, over)

    def _read(self, wanted: Mapping[str, int]) -> dict[str, tuple[list[JobEvent], bool]]:
        found: dict[str, tuple[list[JobEvent], bool]] = {}
        with self._database.read() as session:
            for job, last in wanted.items():
                try:
                    # In this order: a job that is over has no more events than those that are read next.
                    over = records.get(session, job).state in TERMINAL
                except JobUnknown:
                    found[job] = [], True
                    continue
                events = records.events_after(session, job, last, limit=records.EVENTS_AT_ONCE)
                found[job] = events, over and len(events) < records.EVENTS_AT_ONCE
        return found
