"""Random generators seeded by purpose (run seed, phase, round, site), never by the order of execution."""

from __future__ import annotations

import hmac
import json

import numpy as np
import torch

from personalization.seeds import seed_of


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """Create a CPU generator for one purpose. The same arguments give the same numbers on any machine."""
    return torch.Generator().manual_seed(seed_of(seed, *parts))


def keyed(key: bytes, *parts: str | int) -> np.random.Generator:
    """Create a generator for one purpose. Its numbers repeat with the key and cannot be guessed without it.

    NumPy's, because torch's CPU generator uses only 32 bits of its seed, few enough to try them all.
    """
    digest = hmac.digest(key, json.dumps(parts).encode(), "sha256")
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
