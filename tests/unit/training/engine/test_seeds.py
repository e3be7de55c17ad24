from __future__ import annotations

import hashlib

import torch

from personalization.seeds import seed_of
from training.engine.seeds import generator, keyed


def test_a_seed_is_the_sha256_of_what_it_is_for():
    digest = hashlib.sha256(b'[3, "train", 2, "CS", "noise"]').digest()
    assert seed_of(3, "train", 2, "CS", "noise") == int.from_bytes(digest[:8], "big") >> 1


def test_each_part_matters_and_parts_do_not_run_together():
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


def test_generators_repeat_and_leave_the_global_one_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = torch.rand(4, generator=generator(0, "train", 1, "A", "x"))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.rand(4, generator=generator(0, "train", 1, "A", "x")), first)


def test_draws_from_a_key_repeat_with_it_and_with_nothing_else():
    first = keyed(b"one", "train", 1, "A", "x").normal(size=4)
    assert (keyed(b"one", "train", 1, "A", "x").normal(size=4) == first).all()
    for key, *parts in ((b"two", "train", 1, "A", "x"), (b"one", "train", 2, "A", "x"), (b"one", "train", 1)):
        assert not (keyed(key, *parts).normal(size=4) == first).any()
