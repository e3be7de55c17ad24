"""Send messages on alarms to the webhooks that the configuration names, outside of any transaction."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime

import httpx
from sqlalchemy.exc import SQLAlchemyError

from service.database import Database
from service.watch.messages import Taken, settle, take
from service.webhooks import Webhook

_log = logging.getLogger("locum.service")
# All of an answer: no receiver needs longer. A process has a message for longer than that.
_ANSWER_SECONDS = 15.0


class Sender:
    """Sends what is due, every so many seconds. One slow receiver holds up no other, nor any job."""

    def __init__(self, database: Database, hooks: Sequence[Webhook], every_seconds: float) -> None:
        self._database = database
        self._hooks = {each.address: each for each in hooks}
        self._every_seconds = every_seconds
        self._verify = httpx.create_ssl_context()

    async def watch(self) -> None:
        """Send until cancelled. Outages of the database are reported by the readiness check."""
        while True:
            try:
                await self.send()
            except SQLAlchemyError as error:
                _log.debug("messages could not be read: %s", type(error).__name__)
            except Exception:
                # A bug: log it, and keep sending.
                _log.exception("sending messages: an unexpected error; it is tried again")
            await asyncio.sleep(self._every_seconds)

    async def send(self) -> int:
        """Send what is due, side by side. Returns how many messages were received."""
        taken = await asyncio.to_thread(take, self._database, self._hooks)
        if not taken:
            return 0
        # No proxy of the environment and no redirect: a message goes to its address alone.
        async with httpx.AsyncClient(
            verify=self._verify, trust_env=False, follow_redirects=False, timeout=_ANSWER_SECONDS
        ) as client:
            return sum(await asyncio.gather(*(self._deliver(client, each) for each in taken)))

    async def _deliver(self, client: httpx.AsyncClient, taken: Taken) -> bool:
        failure = await _failure_of(client, taken)
        if failure is not None:
            _log.warning("webhook at %s: attempt %d failed: %s", taken.hook.host, taken.attempts, failure)
        try:
            await asyncio.to_thread(settle, self._database, taken, failure is None)
        except SQLAlchemyError as error:
            # It is sent again, under its id, when this process has had it for a minute.
            _log.debug("a message could not be settled: %s", type(error).__name__)
        return failure is None


async def _failure_of(client: httpx.AsyncClient, taken: Taken) -> str | None:
    """Send one message; return what went wrong in words, None where it was received (2xx)."""
    headers = taken.hook.headers(taken.id, taken.body, datetime.now(UTC))
    try:
        # The body of the answer is not read: nothing depends on it, and it might never end.
        async with (
            asyncio.timeout(_ANSWER_SECONDS),
            client.stream("POST", taken.hook.url, content=taken.body, headers=headers) as answer,
        ):
            return None if answer.is_success else f"status {answer.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        # Its message may quote the URL.
        return type(error).__name__
