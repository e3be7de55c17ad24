"""Readiness: check the process's dependencies in the background, so that a request never waits.

The parts are checked in a thread of their own, so health answers from the last result even when every other
thread is busy. A hanging check shows by the age of its last result.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from service.errors import ServiceError

_log = logging.getLogger("locum.service")

INTERVAL_SECONDS = 2.0
STALE_SECONDS = 15.0
_START_SECONDS = 60.0
_STARTING = "it is starting: look again in a few seconds"

ReadinessCheck = Callable[[], str]
"""Says in words what it found; raises when the part does not work."""


@dataclass(frozen=True)
class PartState:
    """The result of one check. Without a part that is not `required` the service does less."""

    ok: bool
    detail: str
    required: bool = True


class Readiness:
    """The checks and the latest state of every part."""

    def __init__(
        self,
        checks: Mapping[str, ReadinessCheck],
        observe: Callable[[str, bool], None],
        optional: frozenset[str] = frozenset(),
        late: frozenset[str] = frozenset(),
    ) -> None:
        """`checks` by name of the part; `observe(part, ok)` receives every result.

        The service is ready without an `optional` part: it does less. A `late` part is started after the
        service, so in the first minute it is starting, and its absence is no warning.
        """
        self._late = late
        self._since = time.monotonic()
        self._checks = dict(checks)
        self._optional = optional
        self._observe = observe
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="readiness")
        self._states: Mapping[str, PartState] = {}
        self._seen = float("-inf")

    @property
    def states(self) -> Mapping[str, PartState]:
        """The states by name of the part."""
        if time.monotonic() - self._seen > STALE_SECONDS:
            why = f"the checks have not come back for {STALE_SECONDS:.0f} s"
            return {name: PartState(False, why, name not in self._optional) for name in self._checks}
        return self._states

    @property
    def ready(self) -> bool:
        """Whether every part works that the service needs."""
        return all(state.ok or not state.required for state in self.states.values())

    async def look(self) -> None:
        """Check every part once."""
        self._states = await asyncio.get_running_loop().run_in_executor(self._executor, self._look)
        self._seen = time.monotonic()

    async def watch(self) -> None:
        """Check again and again until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            await self.look()

    def close(self) -> None:
        """Release the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> dict[str, PartState]:
        states = {name: self._try(name, check) for name, check in self._checks.items()}
        for name, state in states.items():
            self._observe(name, state.ok)
        return states

    def _try(self, name: str, check: ReadinessCheck) -> PartState:
        required = name not in self._optional
        try:
            return PartState(True, check(), required)
        except Exception as error:  # whatever it is, the part does not work
            before = self._states.get(name)
            if name in self._late and time.monotonic() - self._since < _START_SECONDS:
                return PartState(False, _STARTING, required)
            if before is None or before.ok or name in self._late:
                _log.warning("%s is not ready: %s", name, error, extra={"part": name})
                self._late -= {name}
            # A sentence of the service's own needs no class before it.
            said = str(error) if isinstance(error, ServiceError) else f"{type(error).__name__}: {error}"
            return PartState(False, said, required)
