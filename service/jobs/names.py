"""What a hospital's adapted model is called in the store."""

from __future__ import annotations

import hashlib

_LONGEST = 128
_DIGITS = 8


def adapted_name(model: str, hospital: str) -> str:
    """`brain.at-dune`; where that is too long for a name, cut, and told apart by eight digits of its hash."""
    name = f"{model}.at-{hospital}"
    if len(name) <= _LONGEST:
        return name
    digits = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{name[: _LONGEST - _DIGITS - 1]}-{digits}"
