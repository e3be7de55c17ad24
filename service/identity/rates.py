"""How many requests a caller may send: counted in Redis, so that all API processes count together.

A sliding window of the setting's length, by the library `limits`. While Redis is away nothing is counted:
readiness reports it, and a limit is no reason to leave scans unanswered.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from limits import parse_many
from limits.aio.storage import RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from redis.asyncio import ConnectionPool
from redis.exceptions import RedisError

from service.errors import TooManyRequests

_log = logging.getLogger("locum.service")

# A request must not wait for a Redis that hangs, nor the next ones.
_REPLY_SECONDS = 0.5
_PAUSE_SECONDS = 5.0


class RateLimits:
    """Limits such as `600/minute; 20000/day`, of which each caller may exceed none."""

    def __init__(self, allowed: str, url: str) -> None:
        """`url` is that of Redis: redis://, rediss:// or unix://."""
        self._allowed = parse_many(allowed)
        self._pool = ConnectionPool.from_url(
            url, socket_timeout=_REPLY_SECONDS, socket_connect_timeout=_REPLY_SECONDS
        )
        # The pool has the address.
        options: dict[str, Any] = {"connection_pool": self._pool}
        storage = RedisStorage("async+redis://", implementation="redispy", key_prefix="locum-rate", **options)
        self._limiter = SlidingWindowCounterRateLimiter(storage)
        self._paused_until = 0.0

    async def count(self, caller: str) -> None:
        """Count a request of this caller. Raises TooManyRequests above a limit."""
        if time.monotonic() < self._paused_until:
            return
        try:
            for allowed in self._allowed:
                if not await self._limiter.hit(allowed, caller):
                    reset = (await self._limiter.get_window_stats(allowed, caller)).reset_time
                    raise _too_many(str(allowed), max(1, math.ceil(reset - time.time())))
        except (RedisError, OSError) as error:
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            _log.warning("requests are not counted: Redis does not answer (%s)", type(error).__name__)

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.aclose()


def _too_many(allowed: str, seconds: int) -> TooManyRequests:
    return TooManyRequests(
        f"a caller may send {allowed} (LOCUM_RATE_LIMIT): send this again in {seconds} s",
        headers={"Retry-After": str(seconds)},
        retry_after=seconds,
    )
