"""Parameters and members of bodies that more than one route takes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from pydantic import StringConstraints

from service.jobs.folder import JOB_ID

HOSPITAL_ID = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
_NAME, _DIGEST = MODEL_NAME[1:-1], "sha256:[0-9a-f]{64}"
VERSION = rf"^({_DIGEST}|{_NAME}@({_DIGEST}|[1-9][0-9]{{0,8}}))$"

HospitalId = Annotated[str, Path(pattern=HOSPITAL_ID, description="Letters, digits, `-` and `_`.")]
JobId = Annotated[str, Path(pattern=JOB_ID, description="Id of a job.")]
ModelName = Annotated[str, Path(pattern=MODEL_NAME, description="Name in the store.")]
VersionNumber = Annotated[int, Path(ge=1, le=999_999_999, description="Version number, from 1.")]

CohortId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", description="As POST answered it.")]

ScanName = Annotated[
    str,
    Path(
        min_length=1,
        max_length=200,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="Yours to choose, and to find the scan by; nothing is stored under it.",
    ),
]

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200)]
Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]
