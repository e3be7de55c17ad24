"""What a body that is no upload may take, in bytes and in pauses, and that an answer under way is let be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from service.http.problems import Problem
from service.http.uploads.body_limit import MAX_BODY_BYTES, BodyLimitMiddleware, lift

LARGE = {"type": "http.request", "body": b" " * (MAX_BODY_BYTES + 1), "more_body": True}
END = {"type": "http.request", "body": b"", "more_body": False}
START = {"type": "http.response.start", "status": 200, "headers": []}


def run(app: Callable[..., Any], *messages: Message) -> None:
    """An application behind the limit, with a client that sends these messages and then nothing."""
    coming = [*messages]

    async def receive() -> Message:
        if not coming:
            await asyncio.sleep(60)
        return coming.pop(0)

    async def send(_: Message) -> None:
        pass

    async def within() -> None:
        scope: Scope = {"type": "http", "method": "PUT", "path": "/", "headers": []}
        async with asyncio.timeout(5):
            await BodyLimitMiddleware(app, idle_seconds=0.05)(scope, receive, send)

    asyncio.run(within())


async def reading(scope: Scope, receive: Receive, send: Send) -> None:
    await Request(scope, receive).body()


@pytest.mark.parametrize("sent", [[], [{**END, "body": b"{", "more_body": True}]])
def test_stalled_body_is_a_408_problem(sent: list[Message]) -> None:
    with pytest.raises(Problem, match="Nothing arrived for") as refused:
        run(reading, *sent)
    assert refused.value.status == 408


def test_large_body_is_a_413_problem_unless_the_limit_is_lifted() -> None:
    async def receiving(scope: Scope, receive: Receive, send: Send) -> None:
        lift(Request(scope))
        await reading(scope, receive, send)

    with pytest.raises(Problem) as refused:
        run(reading, LARGE)
    assert refused.value.status == 413
    run(receiving, LARGE, END)


def test_body_limit_does_not_disturb_waiting_for_a_disconnect() -> None:
    waited = []

    async def streaming(_: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        assert await receive() == LARGE
        try:
            async with asyncio.timeout(0.2):
                await receive()
        except TimeoutError:
            waited.append(True)

    run(streaming, LARGE)
    assert waited

    async def answering_later(scope: Scope, receive: Receive, send: Send) -> None:
        await reading(scope, receive, send)
        await streaming(scope, receive, send)

    run(answering_later, END, LARGE)
    assert len(waited) == 2
