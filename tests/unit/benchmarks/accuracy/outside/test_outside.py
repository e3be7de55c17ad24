"""A hospital from outside: the ladder of scanners, and halves of its patients."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.accuracy.outside.hospital import halves
from benchmarks.accuracy.outside.scanner import SEVERITIES, ShiftedScanner
from model_store.scan import Scan


def scan(channels: int = 1) -> Scan:
    rows, columns = np.mgrid[:64, :80]
    image = 40 + rows + np.where((rows - 32) ** 2 + (columns - 40) ** 2 < 200, 100, 0)
    return Scan(np.repeat(image[..., None], channels, axis=2).astype(np.uint8), None, "png")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("site", ["one", "two", "three", "four", "five"])
def test_a_scanner_leaves_severity_0_alone_and_grows_with_severity(site: str, channels: int) -> None:
    scanner, before = ShiftedScanner.of(site, 0), scan(channels)
    assert scanner.at(0) is None
    away = []
    for severity in SEVERITIES[1:]:
        change = scanner.at(severity)
        assert change is not None
        after = change(before)
        assert after.voxels.shape == before.voxels.shape
        assert np.isfinite(after.voxels).all()
        away.append(np.abs(after.voxels - before.voxels.astype(float)).mean())
        np.testing.assert_array_equal(after.voxels, change(before).voxels)
    assert away == sorted(away)


def test_some_scanners_swap_black_and_white_at_the_highest_severity() -> None:
    scanners = [ShiftedScanner.of(f"site {number}", 0) for number in range(100)]
    assert 10 < sum(scanner.inverts for scanner in scanners) < 40
    inverts = next(scanner for scanner in scanners if scanner.inverts)
    before = scan()
    disc = np.zeros((64, 80), dtype=bool)
    disc[24:40, 32:48] = True
    brighter = {}
    for severity in (2, 3):
        change = inverts.at(severity)
        assert change is not None
        after = change(before).voxels[..., 0]
        ring = np.roll(disc, 24, axis=1) & ~disc
        brighter[severity] = after[disc].mean() > after[ring].mean()
    assert brighter == {2: True, 3: False}


def test_halves_are_disjoint_complete_and_drawn() -> None:
    patients = [f"p{i}" for i in range(9)]
    first, second = halves(patients, 1)
    assert sorted((*first, *second)) == patients
    assert (len(first), len(second)) == (5, 4)
    assert halves(patients, 1) == halves(list(reversed(patients)), 1) != halves(patients, 2)
