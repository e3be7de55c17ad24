"""Derive seeds by purpose, independent of what was drawn before."""

from __future__ import annotations

import hashlib
import json

_BITS = 63  # torch accepts seeds up to 2**64 - 1, but JSON readers reliably support 63 bits


def seed_of(seed: int, *parts: str | int) -> int:
    """Derive a seed from another seed and its use: a phase, a round, a site, a purpose.

    sha256 of the parts as JSON, so that ("a", "bc") and ("ab", "c") differ.
    """
    content = json.dumps([seed, *parts]).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> (64 - _BITS)
