"""How a handler's work on a job ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.jobs.records import Ending


@dataclass(frozen=True)
class Outcome:
    """What `service.jobs.leases.finish` is told; `reason` is owed for every end but `succeeded`."""

    state: Ending
    reason: str | None = None
    result: dict[str, Any] | None = None
    gate: dict[str, Any] | None = None
    candidate: tuple[str, int, str] | None = None
