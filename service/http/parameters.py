"""Parameters and body members shared by several routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Header, Path, Query
from pydantic import BaseModel, Field, StringConstraints

from service.validation import COHORT_ID, HOSPITAL_ID, JOB_ID, MODEL_NAME, PRINTABLE, PRINTABLE_LINES

HospitalId = Annotated[str, Path(pattern=HOSPITAL_ID, description="Letters, digits, `-` and `_`.")]
JobId = Annotated[str, Path(pattern=JOB_ID, description="Id of a job.")]
ModelName = Annotated[str, Path(pattern=MODEL_NAME, description="Name in the store.")]
VersionNumber = Annotated[int, Path(ge=1, le=999_999_999, description="Version number, from 1.")]

CohortId = Annotated[str, Path(pattern=COHORT_ID, description="The id that POST returned.")]

ScanName = Annotated[
    str,
    Path(
        min_length=1,
        max_length=200,
        pattern=PRINTABLE,
        description="The client's own name for the scan. No file is stored under it.",
    ),
]

MOST_LISTED = 1000
Limit = Annotated[int, Query(ge=1, le=MOST_LISTED, description="Entries of a page at most.")]


class Page(BaseModel):
    """A part of a list."""

    next: str | None = Field(description="Sent as `after`, it asks for the next page; null on the last one.")


Text = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200, pattern=PRINTABLE)
]
Reason = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000, pattern=PRINTABLE_LINES)
]

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        description="The client's own id of this request: a repeated request makes no second job.",
    ),
]
IDEMPOTENT: dict[str, Any] = {
    "description": "Accepted, now or earlier under this Idempotency-Key.",
    "headers": {
        "Location": {"description": "The job.", "schema": {"type": "string"}},
        "Idempotency-Replayed": {
            "description": "`true`: an earlier request made the job.",
            "schema": {"type": "string"},
        },
    },
}
"""The answer 202 of a route with the header `Idempotency-Key`."""


ANSWER_HEADERS: Mapping[str, str] = {
    "Locum-Request": "Id of this request.",
    "Locum-Model": "`name@version` of the requested model.",
    "Locum-Graph": "sha256 of the onnx graph that answered.",
    "Locum-Personalization": "The network that answered: `global`, `member; site=CS`, `cluster; "
    "cluster=2`, `hospital; hospital=dune` or `scan`.",
    "Locum-Warnings": "Number of warnings, the guard's and others; a JSON answer lists them.",
    "Locum-Warning-Names": "Short names of the warnings, each once, such as `zero-shot`, `files-ignored`, "
    "`scan-unlike-task`. Absent without warnings.",
    "Server-Timing": "Milliseconds per stage.",
}


def described_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Names and descriptions as OpenAPI has them."""
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()}
