"""The kinds of job, and the states that a job moves through."""

from __future__ import annotations

from typing import Literal

JobKind = Literal[
    "adaptation",
    "scan",
    "segment",
    "pacs-segment",
    "pacs-cohort",
    "mask-check",
    "mask-verdict",
    "quantisation",
]
WITH_RESULT: frozenset[str] = frozenset({"scan", "segment", "pacs-segment"})
"""Kinds that end with a file, `/jobs/{id}/result`."""

ON_ONE_SCAN: frozenset[str] = frozenset({"scan", "segment"})
"""Kinds that `POST /segment` starts, for one scan that is kept until the job ends."""

ADAPTING: frozenset[str] = frozenset({"adaptation", "scan"})
"""Kinds that adapt a model."""

QUANTISING: JobKind = "quantisation"
"""Makes a graph in another precision."""

JobState = Literal["queued", "running", "cancelling", "succeeded", "fell_back", "failed", "cancelled"]
JobEnd = Literal["succeeded", "fell_back", "failed", "cancelled"]

TERMINAL: frozenset[str] = frozenset({"succeeded", "fell_back", "failed", "cancelled"})
HELD: frozenset[str] = frozenset({"running", "cancelling"})
"""The states in which a worker holds a lease, or held one at its last heartbeat."""
