"""The gate of joined networks, check by check, on hand-drawn masks."""

from __future__ import annotations

import numpy as np
import pytest

from personalization.errors import LabelError
from personalization.fedoap.joining import JOINING, Joining, JoiningEpoch, ObservedJoining
from personalization.gate import judge

GOOD = Joining((JoiningEpoch(0, None, 0.2, 1.0), JoiningEpoch(1, 0.5, 0.8, 0.25)), 1)
# Two slices of the first scan, one of each other.
SLICES = ([0, 1], [2], [3], [4])


def masks(*sizes: int) -> np.ndarray:
    """One slice of 20 x 20 per size, with one square piece of that side."""
    maps = np.zeros((len(sizes), 20, 20), np.uint8)
    for one, side in zip(maps, sizes, strict=True):
        one[:side, :side] = 1
    return maps


DRAWN = masks(4, 6, 0, 0, 0)
FOUND = masks(4, 6, 1, 5, 5)


def failed(
    joining: Joining = GOOD, found: np.ndarray = FOUND, drawn: np.ndarray = DRAWN, drawn_on: int = 2
) -> dict[str, float | None]:
    """The checks that fail where the first `drawn_on` of four scans have masks."""
    scans = [
        (found[slices].transpose(1, 2, 0), drawn[slices].transpose(1, 2, 0) if scan < drawn_on else None)
        for scan, slices in enumerate(SLICES)
    ]
    verdict = judge(JOINING, ObservedJoining(joining, scans))
    bad = {check.name: check.value for check in verdict.checks if not check.passed}
    assert verdict.passed == (not bad)
    return bad


def test_judge_joining_passes_a_good_network() -> None:
    assert failed() == {}


def test_judge_joining_fails_without_dice_gain_or_with_low_dice() -> None:
    kept = Joining((JoiningEpoch(0, None, 0.9, 0.0),), 0)
    assert failed(kept) == {"dice_gain": 0.0}
    poor = Joining((JoiningEpoch(0, None, 0.1, None), JoiningEpoch(1, 0.5, 0.4, None)), 1)
    assert failed(poor) == {"validation_dice": 0.4}


def test_judge_joining_fails_with_many_false_positives() -> None:
    alarmed = Joining((JoiningEpoch(0, None, 0.2, 1.0), JoiningEpoch(1, 0.5, 0.8, 0.6)), 1)
    assert failed(alarmed) == {"false_positives": 0.6}


def test_judge_joining_fails_masks_twice_the_largest_drawn_one() -> None:
    # The largest drawn share of a scan is (16 + 36) / 800 = 0.065; twice that is 52 of 400 pixels.
    assert failed(found=masks(4, 6, 0, 7, 7)) == {}
    assert failed(found=masks(4, 6, 0, 8, 7)) == {"giant": 0.25}


def test_judge_joining_counts_empty_masks_above_the_drawn_rate() -> None:
    # One of two drawn scans is empty; both other scans are predicted empty: 0.5 more, which is the limit.
    assert failed(found=masks(4, 6, 0, 0, 0)) == {}
    drawn = masks(4, 6, 2, 0, 0)
    assert failed(found=masks(4, 6, 2, 0, 0), drawn=drawn) == {"emptied": 1.0}
    assert failed(found=masks(4, 6, 0, 0, 0), drawn=masks(4, 6, 0, 9, 9), drawn_on=4) == {}


def test_judge_joining_fails_fragmented_masks() -> None:
    found = FOUND.copy()
    found[:, 10::3, 10::3] = 1
    # 4 x 4 specks next to the square in each of five slices; each drawn slice has one piece.
    assert failed(found=found) == {"fragments": 18 / 2}


def test_judge_joining_rejects_mismatched_masks() -> None:
    with pytest.raises(LabelError, match="at least one scan with a mask, found none"):
        failed(drawn_on=0)
    with pytest.raises(LabelError, match="drawn: expected the scan's"):
        failed(drawn=DRAWN[:, :10])


def test_a_picture_is_one_plane() -> None:
    square = masks(4)[0]
    scans = [(square, square), (square[..., None], None)]
    assert all(check.passed for check in judge(JOINING, ObservedJoining(GOOD, scans)).checks)
