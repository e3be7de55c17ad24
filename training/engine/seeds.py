"""Random numbers that depend on what they are for, never on when or where they are drawn."""

from __future__ import annotations

import hashlib
import json

import torch

_BITS = 63  # torch takes seeds up to 2**64 - 1, JSON readers are sure of 63 bits


def derive(seed: int, *parts: str | int) -> int:
    """A seed from a run's seed and what it is for (phase, round, site, purpose).

    sha256 of the parts as JSON, so that ("a", "bc") and ("ab", "c") differ.
    """
    content = json.dumps([seed, *parts]).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> (64 - _BITS)


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """A fresh CPU generator for one purpose: the same arguments give the same numbers on any machine."""
    return torch.Generator().manual_seed(derive(seed, *parts))
