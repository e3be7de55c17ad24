"""The `locum` command, and a typed client of a running service.

    from locum import Client

    with Client("http://127.0.0.1:8000") as client:
        found = client.segment("scan.nii.gz", model="phantom", hospital="aster")
        found.mask          # a nibabel image on the scan's own grid
        found.report        # volumes, confidences, warnings, the receipt

`AsyncClient` has the same methods for asyncio. The package needs httpx, numpy and nibabel, and imports none
of Locum's other packages. Names are imported at their first use, so that `locum --help` does not wait for
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from locum.answers import (
        Alarm,
        Assignment,
        Candidate,
        Classification,
        Cohort,
        CohortScan,
        Event,
        Gate,
        Hospital,
        Job,
        JobSummary,
        Model,
        Observation,
        ObservedLabel,
        Receipt,
        Report,
        Section,
        Segmentation,
        Serving,
        Session,
        Status,
        Version,
        Watch,
    )
    from locum.client import AsyncClient, Client
    from locum.errors import (
        AnswerInvalid,
        JobFailed,
        LocumError,
        NotAllowed,
        Problem,
        ScanInvalid,
        Unreachable,
    )

_WHERE = {
    "locum.client": ("AsyncClient", "Client"),
    "locum.errors": (
        "AnswerInvalid",
        "JobFailed",
        "LocumError",
        "NotAllowed",
        "Problem",
        "ScanInvalid",
        "Unreachable",
    ),
    "locum.answers": (
        "Alarm",
        "Assignment",
        "Candidate",
        "Classification",
        "Cohort",
        "CohortScan",
        "Event",
        "Gate",
        "Hospital",
        "Job",
        "JobSummary",
        "Model",
        "Observation",
        "ObservedLabel",
        "Receipt",
        "Report",
        "Section",
        "Segmentation",
        "Serving",
        "Session",
        "Status",
        "Version",
        "Watch",
    ),
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [  # noqa: RUF022
    "Client",
    "AsyncClient",
    "Segmentation",
    "Classification",
    "Report",
    "Receipt",
    "Job",
    "JobSummary",
    "Status",
    "Section",
    "Event",
    "Candidate",
    "Gate",
    "Cohort",
    "CohortScan",
    "Hospital",
    "Serving",
    "Assignment",
    "Model",
    "Version",
    "Watch",
    "Alarm",
    "Observation",
    "ObservedLabel",
    "Session",
    "LocumError",
    "Problem",
    "NotAllowed",
    "Unreachable",
    "AnswerInvalid",
    "ScanInvalid",
    "JobFailed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
