"""The kinds of job: one module per kind declares its worker, options, stages and card.

No other module of the service compares a job's kind with a name: it asks the declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated

from pydantic import WithJsonSchema

from service.job_kinds.kind import JobKind

__all__ = ["KINDS", "JobKind", "KindName", "names_where"]

# In the order of the API's description.
_NAMES = (
    "adaptation",
    "scan",
    "segment",
    "pacs-segment",
    "pacs-cohort",
    "mask-check",
    "mask-verdict",
    "quantisation",
    "correction",
    "shadow",
    "pacs-correction",
    "acceptance",
    "pacs-follow-up",
)


def _declared(name: str) -> JobKind:
    found: JobKind = import_module(f"{__name__}.{name.replace('-', '_')}").KIND
    return found


KINDS: Mapping[str, JobKind] = {name: _declared(name) for name in _NAMES}

KindName = Annotated[str, WithJsonSchema({"type": "string", "enum": [*KINDS]})]
"""A kind in the API's answers."""


def names_where(condition: Callable[[JobKind], bool]) -> tuple[str, ...]:
    """The kinds of which the condition holds, for a query of the database."""
    return tuple(name for name, kind in KINDS.items() if condition(kind))
