"""Parameters and members of bodies that more than one route takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Path
from pydantic import StringConstraints

from service.jobs.files import JOB_ID

HOSPITAL_ID = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
_NAME, _DIGEST = MODEL_NAME[1:-1], "sha256:[0-9a-f]{64}"
VERSION = rf"^({_DIGEST}|{_NAME}@({_DIGEST}|[1-9][0-9]{{0,8}}))$"

COHORT_ID = r"^[0-9a-f]{32}$"

# PostgreSQL keeps no NUL, and a log no other control character; a reason may have lines and tabs.
PRINTABLE = r"^[^\x00-\x1f\x7f]+$"
PRINTABLE_LINES = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]+$"

# What is said of a text that does not match, in place of the pattern.
IN_WORDS = {
    HOSPITAL_ID: "letters, digits, `-` and `_`, 64 at most, of which the first is a letter or a digit",
    MODEL_NAME: "a model's name: letters, digits, `-`, `_` and `.`, 128 at most, without a version",
    VERSION: "a number, sha256:… or name@3",
    PRINTABLE: "a text without control characters",
    PRINTABLE_LINES: "a text without control characters other than line breaks and tabs",
    COHORT_ID: "the id that POST answered: 32 digits of 0-9 and a-f",
}

HospitalId = Annotated[str, Path(pattern=HOSPITAL_ID, description="Letters, digits, `-` and `_`.")]
JobId = Annotated[str, Path(pattern=JOB_ID, description="Id of a job.")]
ModelName = Annotated[str, Path(pattern=MODEL_NAME, description="Name in the store.")]
VersionNumber = Annotated[int, Path(ge=1, le=999_999_999, description="Version number, from 1.")]

CohortId = Annotated[str, Path(pattern=COHORT_ID, description="As POST answered it.")]

ScanName = Annotated[
    str,
    Path(
        min_length=1,
        max_length=200,
        pattern=PRINTABLE,
        description="Yours to choose, and to find the scan by; nothing is stored under it.",
    ),
]

Text = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200, pattern=PRINTABLE)
]
Reason = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000, pattern=PRINTABLE_LINES)
]


ANSWER_HEADERS: Mapping[str, str] = {
    "Locum-Request": "Id of this request.",
    "Locum-Model": "`name@version` that was asked for.",
    "Locum-Graph": "sha256 of the onnx graph that answered.",
    "Locum-Personalization": "Whose network it was: `global`, `member; site=CS`, `cluster; cluster=2`, "
    "`hospital; hospital=dune` or `scan`.",
    "Locum-Warnings": "How many warnings there are, the guard's and others; a JSON answer lists them.",
    "Locum-Warning-Names": "Short names of the warnings, each once: `zero-shot`, `scan-unlike-task`. Absent "
    "without warnings.",
    "Server-Timing": "Milliseconds per stage.",
}


def described_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Names and descriptions as OpenAPI has them."""
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()}
