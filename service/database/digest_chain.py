"""The digests that chain the rows of the audit trail."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

FIRST_PREVIOUS = "0" * 64
"""What row 1 has in place of a digest before it."""


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a row: its columns but `digest`, as JSON with sorted names (64 hex digits)."""
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


def _canonical(content: Mapping[str, Any]) -> str:
    def plain(value: object) -> str:
        assert isinstance(value, datetime)
        return value.astimezone(UTC).isoformat(timespec="microseconds")

    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=plain)
