"""Rate limits, counted in a real Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from service.errors import TooManyRequests
from service.identity.rates import RateLimits
from service.runtime.broker import Broker
from service.settings import Settings


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    broker = Broker(Settings(state_dir=tmp_path_factory.mktemp("state"), redis_url=None))
    broker.start()
    yield broker.url
    broker.stop()


@pytest.mark.process
def test_caller_above_a_limit_is_rejected_and_another_is_not(redis_url: str) -> None:
    async def ask() -> None:
        limits = RateLimits("3/minute; 100/day", redis_url)
        other_process = RateLimits("3/minute; 100/day", redis_url)
        for counted in (limits, other_process, limits):
            await counted.count("key:ada")
        with pytest.raises(TooManyRequests, match="3 per 1 minute") as caught:
            await other_process.count("key:ada")
        assert 1 <= int(caught.value.headers["Retry-After"]) <= 60
        await limits.count("key:bob")
        await limits.close()
        await other_process.close()

    asyncio.run(ask())


@pytest.mark.process
def test_every_limit_counts(redis_url: str) -> None:
    async def ask() -> None:
        limits = RateLimits("100/minute; 2/hour", redis_url)
        for _ in range(2):
            await limits.count("key:eve")
        with pytest.raises(TooManyRequests, match="2 per 1 hour"):
            await limits.count("key:eve")
        await limits.close()

    asyncio.run(ask())


def test_requests_pass_while_redis_is_away(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        limits = RateLimits("1/minute", "redis://127.0.0.1:1")
        for _ in range(5):
            await limits.count("key:ada")
        await limits.close()

    with caplog.at_level(logging.WARNING, "locum.service"):
        asyncio.run(ask())
    assert [record.message for record in caplog.records if "not counted" in record.message] == [
        "requests are not counted: Redis does not answer (ConnectionError)"
    ]
