"""Which scans of a cohort nothing is fitted to: those unlike the others or the task."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.guard import ReferenceStatistics, ScanSummary, distances, summarise
from model_store.preprocessing import prepare
from model_store.scan import Scan
from model_store.task import Task
from model_store.unlike import kinds_of

TASK = Task(name="disc", labels={"disc": (1,)}, size=(64, 64), colour="luminance")


def body(seed: int) -> NDArray[np.float32]:
    """A bright disc on black, varied by seed to imitate patients."""
    draw = np.random.default_rng(seed)
    y, x = np.indices((64, 64)) / 64 - 0.5 + draw.normal(0, 0.02, (2, 1, 1))
    disc = (x**2 + y**2 < draw.uniform(0.28, 0.35) ** 2) * draw.uniform(60, 100)
    return (disc + draw.normal(0, 4, (64, 64))).astype(np.float32)


def summary(pixels: NDArray[np.float32]) -> ScanSummary:
    scan = Scan(np.atleast_3d(pixels).astype(np.float32), None, "png")
    return summarise(scan, prepare(scan, TASK))


ORDINARY = [summary(body(100 + seed)) for seed in range(8)]
INVERTED = [summary(200 - body(200 + seed)) for seed in range(8)]
NOISY = [
    summary(body(300 + seed) + np.random.default_rng(seed).normal(0, 40, (64, 64)).astype(np.float32))
    for seed in range(8)
]
CONSTANT = summary(np.full((64, 64), 7, np.float32))


@pytest.fixture(scope="module")
def reference() -> ReferenceStatistics:
    known = [ReferenceStatistics.of(summary(body(seed))) for seed in range(40)]
    return reduce(ReferenceStatistics.merge, known)


def mixed(odd: list[ScanSummary], *places: int) -> list[ScanSummary]:
    return [odd[index] if index in places else each for index, each in enumerate(ORDINARY)]


@pytest.mark.parametrize("places", [(3,), (0, 7), (0, 2, 4, 6), (0, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("odd", [INVERTED, NOISY], ids=["inverted", "noisy"])
def test_scans_that_are_warned_of_beside_others_are_of_another_kind_and_left_out(
    reference: ReferenceStatistics, odd: list[ScanSummary], places: tuple[int, ...]
) -> None:
    found = kinds_of(mixed(odd, *places), reference, TASK)
    assert [*np.flatnonzero(~found.used)] == [*places]
    assert found.share_warned == len(places) / 8
    assert len({*found.kind.tolist()}) == 2
    assert {*found.kind[[*places]]}.isdisjoint(found.kind[found.used])


def test_a_cohort_of_which_all_scans_are_unlike_training_is_the_hospitals(
    reference: ReferenceStatistics,
) -> None:
    found = kinds_of(NOISY, reference, TASK)
    assert found.warned.all()
    assert found.used.all()
    # The fewer of two kinds that both look unlike training are left out all the same.
    both = kinds_of([*NOISY[:6], *INVERTED[:2]], reference, TASK)
    assert both.used.tolist() == [True] * 6 + [False] * 2


def test_a_scan_that_shows_nothing_is_left_out(reference: ReferenceStatistics) -> None:
    assert kinds_of([CONSTANT, *NOISY], reference, TASK).used.tolist() == [False] + [True] * 8
    assert kinds_of([CONSTANT, CONSTANT], reference, TASK).used.all()


def test_a_mistaken_scan_is_left_out(reference: ReferenceStatistics) -> None:
    pixels = body(5)
    volume = Scan(np.dstack([pixels, pixels])[..., None], np.eye(4), "nifti")
    found = kinds_of([*ORDINARY, summarise(volume, prepare(volume, TASK))], reference, TASK)
    assert found.mistaken.tolist() == found.warned.tolist() == [False] * 8 + [True]
    assert found.used.tolist() == [True] * 8 + [False]


@pytest.mark.parametrize("places", [(), (3,), (0, 7), (1, 4, 6)])
def test_without_a_reference_the_fewer_of_two_kinds_are_left_out(places: tuple[int, ...]) -> None:
    found = kinds_of(mixed(INVERTED, *places), None, TASK)
    assert [*np.flatnonzero(~found.used)] == [*places]


def test_two_kinds_of_which_none_is_warned_of_are_both_used() -> None:
    half = [ReferenceStatistics.of(each) for each in (*ORDINARY, *INVERTED)]
    found = kinds_of(mixed(INVERTED, 0, 1, 2), reduce(ReferenceStatistics.merge, half), TASK)
    assert found.used.all()


def test_distances_are_the_naive_mahalanobis_distances(reference: ReferenceStatistics) -> None:
    scans = [*ORDINARY[:3], *INVERTED[:2]]
    found = distances([each.appearance for each in scans], reference)
    mean = np.array(reference.sums) / reference.count
    for one, first in enumerate(scans):
        for other, second in enumerate(scans):
            moved = mean + np.array(first.appearance) - np.array(second.appearance)
            # The distance of a scan that differs from the mean by as much, without its factor for few scans.
            squared = reference.distance(tuple(moved)) * (1 + 12 / reference.count)
            assert found[one, other] == pytest.approx(np.sqrt(squared / 5.5), abs=1e-9)


def test_a_scan_of_another_colour_is_mistaken_and_not_gross() -> None:
    colour = TASK.model_copy(update={"channels": 3, "colour": "replicate"})

    def seen(pixels: NDArray[np.float32]) -> ScanSummary:
        scan = Scan(pixels, None, "png")
        return summarise(scan, prepare(scan, colour))

    pictures = [np.dstack([body(seed), body(seed) / 2, body(seed) / 3]) for seed in range(40)]
    known = [ReferenceStatistics.of(seen(each)) for each in pictures]
    grey = [seen(np.atleast_3d(body(100 + seed))) for seed in range(4)]
    found = kinds_of(grey, reduce(ReferenceStatistics.merge, known), colour)
    assert (found.share_mistaken, found.share_gross) == (1.0, 0.0)
