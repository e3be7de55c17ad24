"""Random numbers that depend on what they are for, never on when or where they are drawn."""

from __future__ import annotations

import hashlib
import hmac
import json

import numpy as np
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


def keyed(key: bytes, *parts: str | int) -> np.random.Generator:
    """Draws for one purpose that repeat with the key, and cannot be guessed without it.

    NumPy's, since of a seed of torch's CPU generator 32 bits count: all of them can be tried.
    """
    digest = hmac.digest(key, json.dumps(parts).encode(), "sha256")
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
