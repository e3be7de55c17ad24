from __future__ import annotations

import hashlib

import torch

from personalization.seeds import seed_of
from training.engine.seeds import generator, keyed


def test_seed_of_is_the_sha256_of_its_parts():
    digest = hashlib.sha256(b'[3, "train", 2, "CS", "noise"]').digest()
    assert seed_of(3, "train", 2, "CS", "noise") == int.from_bytes(digest[:8], "big") >> 1


def test_seed_of_differs_by_each_part_and_by_part_boundaries():
    seeds = [
        seed_of(0, "train", 1, "A", "x"),
        seed_of(1, "train", 1, "A", "x"),
        seed_of(0, "export", 1, "A", "x"),
        seed_of(0, "train", 2, "A", "x"),
        seed_of(0, "train", 1, "B", "x"),
        seed_of(0, "train", 1, "A", "y"),
        seed_of(0, "train", 1, "Ax", ""),
        seed_of(0, "train", "1", "A", "x"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generator_repeats_and_keeps_the_global_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = torch.rand(4, generator=generator(0, "train", 1, "A", "x"))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.rand(4, generator=generator(0, "train", 1, "A", "x")), first)


def test_keyed_draws_repeat_only_with_the_same_key_and_parts():
    first = keyed(b"one", "train", 1, "A", "x").normal(size=4)
    assert (keyed(b"one", "train", 1, "A", "x").normal(size=4) == first).all()
    for key, *parts in ((b"two", "train", 1, "A", "x"), (b"one", "train", 2, "A", "x"), (b"one", "train", 1)):
        assert not (keyed(key, *parts).normal(size=4) == first).any()
