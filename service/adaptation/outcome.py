"""How a handler's work on a job ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model_store.artefact import Artefact
from service.jobs.records import Ending


@dataclass(frozen=True)
class Outcome:
    """What `service.jobs.leases.finish` is told; `reason` is owed for every end but `succeeded`."""

    state: Ending
    reason: str | None = None
    result: dict[str, Any] | None = None
    gate: dict[str, Any] | None = None
    candidate: tuple[str, int, str] | None = None


@dataclass(frozen=True)
class Published:
    """A candidate that a job published, with what the job keeps of it."""

    artefact: Artefact
    result: dict[str, Any]
    gate: dict[str, Any] | None

    def outcome(self, nothing_better: str) -> Outcome:
        """The end of the job; `nothing_better`: why it fell back, unless it was stopped."""
        result, candidate = self.result, (self.artefact.name, self.artefact.version, self.artefact.digest)
        if not result.get("fell_back"):
            return Outcome("succeeded", result.get("stopped"), result, self.gate, candidate)
        reason = result.get("stopped") or nothing_better
        return Outcome("fell_back", reason, result, self.gate, candidate)
