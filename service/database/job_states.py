"""The states that a job moves through."""

from __future__ import annotations

from typing import Literal

JobState = Literal["queued", "running", "cancelling", "succeeded", "fell_back", "failed", "cancelled"]
JobEnd = Literal["succeeded", "fell_back", "failed", "cancelled"]

TERMINAL: frozenset[str] = frozenset({"succeeded", "fell_back", "failed", "cancelled"})
HELD: frozenset[str] = frozenset({"running", "cancelling"})
"""The states in which a worker holds a lease, or held one at its last heartbeat."""
