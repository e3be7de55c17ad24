"""The headers of an answer to a scan, for the API's description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
