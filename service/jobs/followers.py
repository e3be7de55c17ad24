"""Jobs that clients follow: one look at the database for all followers, and a limit on their number.

A look reads every followed job in one thread, so a thousand followers cost what one costs, and other requests
keep their threads. Above the limit, a follower takes the place of the newest of the share (`Caller.share`)
with most, unless that would leave it with fewer; a client that is let go returns with the id of its last
event.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
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

    `over`: no event follows those of `events`. `ended`: it is not read any more.
    """

    events: list[JobEvent] = field(default_factory=list)
    over: bool = False
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, events: list[JobEvent], over: bool) -> None:
        """Take in what was read."""
        self.events.extend(events)
        self.over = over
        if events or over:
            self.announce()

    def end(self) -> None:
        """Let the followers go."""
        self.ended = True
        self.announce()

    def announce(self) -> None:
        """Wake the followers."""
        # Each event wakes those that waited for it; who comes later waits for the next one.
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(eq=False)
class Follower:
    """One client that follows a job. `let_go`: it comes back with the id of its last event, if it likes."""

    job: str
    share: str
    feed: Feed
    let_go: bool = False

    async def after(self, last: int) -> AsyncIterator[JobEvent]:
        """Give the events after the one with id `last`, and go on until the job is over."""
        seen, feed = 0, self.feed
        while True:
            changed = feed.changed
            for event in feed.events[seen:]:
                seen += 1
                if event.id > last:
                    yield event
            if feed.ended or self.let_go or (feed.over and seen == len(feed.events)):
                return
            if seen == len(feed.events):
                await changed.wait()


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
        self._followers: list[Follower] = []
        self._joined = asyncio.Event()

    @property
    def count(self) -> int:
        """Followers of all jobs."""
        return len(self._followers)

    def refuse_if_full(self, share: str) -> None:
        """Raise TooManyFollowers as `following` would, before the database is asked."""
        if self.count >= self._most and self._displaced_by(share) is None:
            raise TooManyFollowers(
                f"{self._most} clients follow jobs already (LOCUM_MAX_FOLLOWERS): try again, or read the job "
                "from time to time",
                headers={"Retry-After": str(_RETRY_SECONDS)},
                retry_after=_RETRY_SECONDS,
            )

    @asynccontextmanager
    async def following(self, job: str, share: str) -> AsyncIterator[Follower]:
        """Follow a job that the caller may see, for its share. Raises TooManyFollowers."""
        self.refuse_if_full(share)
        if self.count >= self._most and (displaced := self._displaced_by(share)) is not None:
            self._leave(displaced)
        follower = Follower(job, share, self._feeds.setdefault(job, Feed()))
        self._followers.append(follower)
        self._joined.set()
        if self._closing.is_set():
            follower.feed.end()
        try:
            yield follower
        finally:
            self._leave(follower)

    def _displaced_by(self, share: str) -> Follower | None:
        """The follower that a new one of this share would displace; None where there is none."""
        counts = Counter(each.share for each in self._followers)
        most = max(counts, key=lambda each: counts[each])
        if counts[most] <= counts[share] + 1:
            return None
        return next(each for each in reversed(self._followers) if each.share == most)

    def _leave(self, follower: Follower) -> None:
        if follower.let_go:
            return
        follower.let_go = True
        follower.feed.announce()
        self._followers.remove(follower)
        followed = any(each.feed is follower.feed for each in self._followers)
        if not followed and self._feeds.get(follower.job) is follower.feed:
            del self._feeds[follower.job]

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
