"""A row of the audit trail as a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC
from typing import Any


def line(row: Mapping[str, Any]) -> str:
    """Return the columns of a row, of which `at` is ISO 8601 in UTC with microseconds.

    Without `digest`, with sorted names and without spaces, this is the text that the digest is of.
    """
    at = row["at"].astimezone(UTC).isoformat(timespec="microseconds")
    return json.dumps({**row, "at": at}, ensure_ascii=False)
