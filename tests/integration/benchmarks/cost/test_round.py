from __future__ import annotations

from pathlib import Path

from benchmarks.cost.round import compute


def test_engine_ends_with_the_weights_of_a_plain_loop(tmp_path: Path) -> None:
    # compute raises when one bit of one weight differs
    cell = {"method": "iop-fl", "width": 2, "slices": 8, "size": 16, "rounds": 4}
    result = compute(cell, tmp_path)
    assert result["rounds"] == 2
    assert set(result) == {"engine_s", "plain_s", "ratio", "processor_ratio", "rounds"}


def test_a_round_without_training_is_held_against_the_least_there_is_to_do(tmp_path: Path) -> None:
    result = compute({"method": "none", "width": 2, "slices": 8, "size": 16, "rounds": 5}, tmp_path)
    assert set(result) == {"engine_s", "average_s", "write_s", "rounds"}
