"""The attention of a scan, from that of its slices."""

from __future__ import annotations

import numpy as np
import pytest

from service.inference.uncertainty import Attention

SOURCES = ("own", "aster", "birch")


def test_attention_shares_are_the_mean_over_slices_of_all_batches() -> None:
    found = Attention(SOURCES)
    found.add(np.array([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]], np.float32))
    found.add(np.array([[0.8, 0.1, 0.1]], np.float32))
    assert found.shares == pytest.approx({"own": 0.5, "aster": 0.8 / 3, "birch": 0.7 / 3}, rel=1e-6)


def test_network_without_attention_has_no_shares() -> None:
    found = Attention(None)
    found.add(None)
    assert found.shares is None


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        (None, r"\[S, 3\], found none"),
        (np.ones((2, 4), np.float32) / 4, r"found \[2, 4\]"),
        (np.full((1, 3), 0.5, np.float32), "add up to 1"),
        (np.array([[np.nan, 0.5, 0.5]], np.float32), "add up to 1"),
        (np.array([[-0.5, 1.0, 0.5]], np.float32), "add up to 1"),
    ],
)
def test_attention_of_wrong_shape_or_sum_is_rejected(shares: np.ndarray | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Attention(SOURCES).add(shares)
