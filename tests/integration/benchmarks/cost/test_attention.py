from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost.methods.attention import compute, multiply_adds, network


def test_the_floor_is_the_specifications_count() -> None:
    """For one image at 128x128, width w, D = 16 w features, n = 64 tokens, K = 3 sites."""
    width, features, tokens, sites = 8, 128, 64, 3
    plain, attended, whole = (
        multiply_adds(network(width, 128, sites, attention=attention, adapter=adapter), 128)
        for attention, adapter in ((False, False), (True, False), (True, True))
    )
    query_stage = 9 * tokens * (features // 2 * features + features * features)
    projections = 4 * tokens * features * features
    scores_and_values = 2 * tokens * (sites * tokens) * features
    assert attended - plain == query_stage + projections + scores_and_values
    assert whole - attended == 2 * 9 * width * width * 128 * 128
    encoder = 9 * 128 * 128 * width * (1 + width)  # the first block, for scale
    assert plain > 5 * encoder


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_cell(mode: str, tmp_path: Path) -> None:
    cell = {"mode": mode, "width": 2, "size": 32, "sites": 3, "adapter": True, "batch": 2, "repeats": 2}
    result = compute(cell, tmp_path)
    assert result["floor"] > 1
    assert result["over_floor"] == pytest.approx(result["ratio"] / result["floor"], rel=1e-3)
    assert result["with_gmac"] > result["plain_gmac"]
