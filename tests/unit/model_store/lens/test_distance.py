"""Distances of scans from a fingerprint: what differs most, and what a lens would do of it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from model_store.errors import ScanMismatch
from model_store.guard import Apart, Range, ReferenceStatistics
from model_store.lens import Distances, Fingerprint, Kind, Lens, fit, seen_of
from model_store.lens.fingerprint import Sums
from model_store.lens.fit import foreseen
from model_store.preprocessing import prepare_for
from model_store.scan import Scan
from model_store.task import Normalisation, Task

TASK = Task(
    name="organ",
    labels={"organ": (1,)},
    size=(48, 48),
    normalisation=Normalisation(scope="volume", method="zscore"),
)
MEASURED = ReferenceStatistics(
    count=0,
    kinds={"grey volume": 1},
    ranges={
        "rows": Range(low=40, high=60),
        "columns": Range(low=48, high=48),
        "row_mm": Range(low=1, high=2),
        "column_mm": Range(low=1, high=2),
    },
)


def scan(seed: int, spacing: float = 1.0, blur: float = 1.0, bright: float = 3.0) -> Scan:
    """A volume of 4 slices with a bright organ off the centre, in texture that is blurred."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:48, :48]
    y, x = draw.normal([20, 28], 1.0)
    organ = np.hypot(rows - y, columns - x) < draw.uniform(9, 11)
    texture = ndimage.gaussian_filter(draw.normal(size=(48, 48, 4)), (blur, blur, 0))
    return of(bright * organ[..., None] + texture, spacing)


def of(voxels: NDArray[np.float64], spacing: float = 1.0) -> Scan:
    return Scan(
        (100 + 40 * voxels).astype(np.float32)[..., None], np.diag([-spacing, -spacing, 5.0, 1.0]), "nifti"
    )


def slices(of_scan: Scan) -> NDArray[np.float32]:
    prepared = prepare_for(TASK, of_scan)
    found: NDArray[np.float32] = prepared.slices  # type: ignore[union-attr]
    return found


@pytest.fixture(scope="module")
def fingerprint() -> Fingerprint:
    scanners = (0.8, 2.0), (1.0, 3.0), (1.2, 4.0)
    members = (
        seen_of((seed, slices(scan(seed, 1.0, *scanner))) for seed in range(5 * member, 5 * member + 5))
        for member, scanner in enumerate(scanners)
    )
    return Fingerprint.of([*members])


def measured(fingerprint: Fingerprint, scans: list[Scan]) -> Distances:
    found = Distances(fingerprint, TASK, MEASURED)
    for number, each in enumerate(scans):
        found.add(number, each)
    return found


def test_scans_are_as_far_one_by_one_and_together_as_their_features(fingerprint: Fingerprint) -> None:
    scans = [scan(seed) for seed in range(60, 64)]
    found = Distances(fingerprint, TASK, None)
    # Two patients with two scans each.
    for number, each in enumerate(scans):
        alone = found.add(number // 2, each)
        assert alone.shifts == pytest.approx(fingerprint.shifts(seen_of([(0, slices(each))])))
    whole = found.whole()
    together = seen_of((number // 2, slices(each)) for number, each in enumerate(scans))
    assert found.seen["field"].patients == 2
    assert whole.shifts == pytest.approx(fingerprint.shifts(together))
    assert (found.count, whole.apart, whole.most) == (4, {}, None)
    assert found.steps() == foreseen(together, fingerprint)


def test_an_inverted_scan_looks_inverted_and_nothing_differs_more(fingerprint: Fingerprint) -> None:
    scans = [of((100 - scan(seed).voxels[..., 0]) / 40) for seed in range(60, 64)]
    found = measured(fingerprint, scans)
    assert found.whole().polarity.inverted
    assert found.whole().most == "polarity"
    assert found.steps()["polarity"] == 1.0
    made = fit(lambda: ((number, slices(each)) for number, each in enumerate(scans)), fingerprint)
    assert made is not None
    assert made.lens.negated


@pytest.mark.parametrize("kind", ["spectrum", "field"])
def test_what_was_changed_differs_most_and_the_lens_would_take_it_back(
    fingerprint: Fingerprint, kind: Kind
) -> None:
    added = {
        "spectrum": np.random.default_rng(9).normal(size=(48, 48, 4)),
        "field": 5 * np.linspace(-1, 1, 48)[:, None, None],
    }[kind]
    scans = [of((scan(seed).voxels[..., 0] - 100) / 40 + added) for seed in range(60, 66)]
    found = measured(fingerprint, scans)
    assert found.whole().most == kind
    assert kind in found.steps()
    made = fit(lambda: ((number, slices(each)) for number, each in enumerate(scans)), fingerprint)
    assert made is not None
    # The first step is measured on the scans as they are by both.
    first = next(step for step in found.steps())
    assert found.steps()[first] == pytest.approx(made.shares[first])  # type: ignore[index]


def test_scans_like_the_members_have_no_step(fingerprint: Fingerprint) -> None:
    made = fit(lambda: [(seed, slices(scan(seed))) for seed in range(5)], fingerprint)
    assert made is not None
    assert made.lens == Lens(axes=2, channels=1)
    assert measured(fingerprint, [scan(seed) for seed in range(5)]).steps() == {}


def test_spacing_and_size_are_compared_with_the_ranges_of_training(fingerprint: Fingerprint) -> None:
    found = Distances(fingerprint, TASK, MEASURED)
    within = found.add("a", scan(60, spacing=1.5)).apart
    assert {name: (each.ratio, each.shift) for name, each in within.items()} == {
        "spacing": (1.0, 0.0),
        "size": (1.0, 0.0),
    }
    beyond = found.add("b", scan(61, spacing=8.0))
    # The guard's factor of a spacing within a slice is 1.5.
    assert beyond.apart["spacing"] == Apart(4.0, 1.5)
    assert beyond.apart["spacing"].shift == pytest.approx((2 * np.log(4) / np.log(1.5)) ** 2)
    assert beyond.most == "spacing"
    assert found.add("c", scan(62, spacing=0.5)).apart["spacing"].ratio == 0.5
    assert found.whole().apart["spacing"].ratio == pytest.approx(2 ** (1 / 3))


def test_a_mask_and_a_constant_scan_are_rejected_and_count_for_nothing(fingerprint: Fingerprint) -> None:
    found = Distances(fingerprint, TASK, None)
    with pytest.raises(ScanMismatch, match="found 2 different values, as masks have"):
        found.add("a", of((scan(0).voxels[..., 0] > 150).astype(float)))
    with pytest.raises(ScanMismatch, match="the same intensity everywhere"):
        found.add("b", of(np.zeros((48, 48, 4))))
    assert found.count == 0
    found.add("c", scan(60))
    assert found.seen["field"].patients == 1


def test_sums_that_are_included_are_those_of_one_pass() -> None:
    images = [(number % 2, slices(scan(number))) for number in range(4)]
    whole = Sums()
    for patient, each in images:
        own = Sums()
        own.add(patient, each)
        whole.include(own)
    once = seen_of(images)
    for kind, seen in whole.seen().items():
        np.testing.assert_allclose(seen.mean, once[kind].mean)
        assert seen.variance == pytest.approx(once[kind].variance)
        assert seen.patients == 2
