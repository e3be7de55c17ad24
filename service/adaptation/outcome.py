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


def outcome_of(
    candidate: Artefact, result: dict[str, Any], gate: dict[str, Any] | None, nothing_better: str = ""
) -> Outcome:
    """The end of a job that published `candidate`; `nothing_better`: why it fell back unless stopped."""
    published = (candidate.name, candidate.version, candidate.digest)
    if not result.get("fell_back"):
        return Outcome("succeeded", result.get("stopped"), result, gate, published)
    return Outcome("fell_back", result.get("stopped") or nothing_better, result, gate, published)
