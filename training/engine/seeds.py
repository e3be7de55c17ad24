"""Random numbers that depend on what they are for, never on when or where they are drawn."""

from __future__ import annotations

import hmac
import json

import numpy as np
import torch

from personalization.seeds import seed_of


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """A fresh CPU generator for one purpose: the same arguments give the same numbers on any machine."""
    return torch.Generator().manual_seed(seed_of(seed, *parts))


def keyed(key: bytes, *parts: str | int) -> np.random.Generator:
    """Draws for one purpose that repeat with the key, and cannot be guessed without it.

    NumPy's, since of a seed of torch's CPU generator 32 bits count: all of them can be tried.
    """
    digest = hmac.digest(key, json.dumps(parts).encode(), "sha256")
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
