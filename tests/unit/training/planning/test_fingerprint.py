"""Fingerprints: sums over sites are the pooled cases, no bin is one patient's, and lies are found."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch

from model_store.errors import ScanMismatch
from model_store.scans.types import Scan
from model_store.task import Task
from training.algorithm import SiteSize, State
from training.planning.fingerprint import (
    INTENSITIES,
    LENGTHS,
    Measured,
    capped,
    check,
    fingerprint,
    measure,
    shortest_decimal,
    summary,
)

TASK = Task(name="organ", labels={"organ": (1,), "lesion": (2,)}, size=(64, 64))


def measured(seed: int, count: int, spacing: float, centre: float, spread: float) -> list[Measured]:
    """CT cases of a made-up hospital: its own spacing, sizes and intensities; two cases of each patient."""
    draw = np.random.default_rng(seed)
    found = []
    for case in range(count):
        voxels = np.round(draw.normal(centre + draw.normal(0, 8), spread, (40, 50, 30, 1)))
        voxels[:4] = -1000
        mask = np.zeros((40, 50, 30, 1), np.uint8)
        mask[10:20, 10 : 20 + case, 10:20] = 1 + case % 2
        affine = np.diag([spacing, spacing * draw.choice([1, 1.1]), 2 * spacing, 1.0])
        scan = Scan(voxels, affine, "nifti")
        found.append(measure(f"p{seed}-{case // 2}", scan, Scan(mask, affine, "nifti"), TASK))
    return found


HOSPITALS = [
    measured(0, 12, 0.7, 60, 20),
    measured(1, 30, 0.8, 120, 35),
    measured(2, 8, 1.2, -20, 15),
]


def added(states: list[State]) -> State:
    return reduce(lambda one, other: {name: one[name] + other[name] for name in one}, states)


def test_merged_is_pooled_for_unlike_sites() -> None:
    merged = added([fingerprint(cases, 1, least=1) for cases in HOSPITALS])
    pooled = fingerprint([case for cases in HOSPITALS for case in cases], 1, least=1)
    for name in ("cases", "spacing", "shape", "extent", "kept", "ct"):
        assert torch.equal(merged[name], pooled[name]), name
    for name in ("intensity", "moments"):
        torch.testing.assert_close(merged[name], pooled[name], rtol=1e-12, atol=1e-12)


def test_merged_summary_is_that_of_the_lists_that_never_leave() -> None:
    cases = [case for hospital in HOSPITALS for case in hospital]
    found = summary(added([fingerprint(hospital, 1) for hospital in HOSPITALS]))
    spacing, shape = np.array([c.spacing for c in cases]), np.array([c.shape for c in cases])
    assert found.cases == 50
    assert found.spacing == pytest.approx(np.median(spacing, 0), rel=0.02)
    assert found.finest == pytest.approx(np.percentile(spacing, 10, 0), rel=0.06)
    assert found.shape == pytest.approx(np.median(shape, 0), rel=0.02)
    assert found.extent == pytest.approx(np.median(shape * spacing, 0), rel=0.02)


def test_intensities_are_those_of_equally_many_voxels_per_case() -> None:
    # The pooled foreground, resampled so that every case counts alike, as nnU-Net draws it.
    voxels, weights = [], []
    for seed, count, _, centre, spread in (
        (0, 12, 0.7, 60, 20),
        (1, 30, 0.8, 120, 35),
        (2, 8, 1.2, -20, 15),
    ):
        draw = np.random.default_rng(seed)
        for case in range(count):
            image = np.round(draw.normal(centre + draw.normal(0, 8), spread, (40, 50, 30)))
            draw.choice([1, 1.1])
            inside = image[10:20, 10 : 20 + case, 10:20].ravel()
            voxels.append(inside)
            weights.append(np.full(len(inside), 1 / len(inside)))
    values, mass = np.concatenate(voxels), np.concatenate(weights)
    order = np.argsort(values)
    ends = np.cumsum(mass[order]) / mass.sum()
    exact = [float(values[order][np.searchsorted(ends, share)]) for share in (0.005, 0.5, 0.995)]
    mean = float(np.average(values, weights=mass))
    found = summary(added([fingerprint(hospital, 1) for hospital in HOSPITALS])).intensities[0]
    assert found is not None
    assert (found.low, found.median, found.high) == pytest.approx(exact, abs=4)
    assert found.mean == pytest.approx(mean, rel=1e-9)
    assert found.std == pytest.approx(np.sqrt(np.average((values - mean) ** 2, weights=mass)), rel=1e-9)


def test_no_bin_has_fewer_patients_than_the_least() -> None:
    draw = np.random.default_rng(5)
    cases = [
        replace(case, patient=f"p{i // 2}", spacing=tuple(draw.uniform(0.5, 2, 3)))
        for i, case in enumerate(HOSPITALS[1])
    ]
    for least in (3, 5, 15):
        for name in ("spacing", "shape", "extent", "kept"):
            counts = fingerprint(cases, 1, least=least)[name]
            assert counts[counts > 0].min() >= least, name
            assert (counts.sum(dim=-1) == len(cases)).all(), name


def test_ends_of_the_intensities_are_no_single_patients() -> None:
    cases = HOSPITALS[0]
    assert cases[0].histograms is not None
    bright = 0.9 * cases[0].histograms
    bright[0, 1000] += 0.1
    sent = fingerprint([replace(cases[0], histograms=bright), *cases[1:]], 1)
    assert sent["intensity"][0, 1000] == 0
    assert float(sent["intensity"].sum()) == pytest.approx(len(cases))


def histograms_of(*bins: dict[int, float]) -> list[Measured]:
    """A case of each of as many patients, with these shares of its foreground by bin."""
    made = []
    for index, shares in enumerate(bins):
        histogram = np.zeros((1, INTENSITIES))
        histogram[0, [*shares]] = [*shares.values()]
        made.append(replace(HOSPITALS[0][0], patient=f"p{index}", histograms=histogram))
    return made


@pytest.mark.parametrize(
    ("cases", "sent"),
    [
        # What one patient alone has inside: an implant, contrast.
        ([{100: 0.5, 900: 0.5}, {100: 0.5, 900: 0.5}, {100: 0.4, 500: 0.3, 900: 0.3}], {100: 1.4, 900: 1.6}),
        ([{100: 1}, {100: 1}, {100: 1}, {100: 0.5, 700: 0.5}], {100: 4}),
        ([{100: 1}, {100: 1}, {100: 1}, {100: 0.5, 3: 0.5}], {100: 4}),
        # Bins that only few share are merged; a bin of three patients stays as it is.
        ([{10: 1}, {12: 1}, {20: 1}], {15: 3}),
        ([{10: 1}, {10: 1}, {10: 1}, {11: 1}, {12: 1}, {12: 1}, {13: 1}], {10: 3, 12: 4}),
    ],
)
def test_every_bin_of_intensities_is_of_several_patients(
    cases: list[dict[int, float]], sent: dict[int, float]
) -> None:
    histogram = fingerprint(histograms_of(*cases), 1)["intensity"][0]
    assert {int(i): round(float(histogram[i]), 6) for i in histogram.nonzero()} == sent


def test_site_with_too_few_patients_sends_nothing() -> None:
    four_cases_of_two_patients = HOSPITALS[0][:4]
    assert fingerprint(four_cases_of_two_patients, 1) == {}
    assert fingerprint(HOSPITALS[0], 1, least=7) == {}


def test_site_without_ct_sends_no_intensities() -> None:
    sent = fingerprint([replace(case, looks_like_ct=False) for case in HOSPITALS[0]], 1)
    assert sent["intensity"].abs().sum() == sent["moments"].abs().sum() == 0
    assert summary(sent).intensities == (None,)


def test_axes_are_the_patients_and_margins_of_zeros_are_cut_off() -> None:
    voxels = np.zeros((20, 30, 40, 1))
    voxels[2:12, 5:25, 8:40] = 7
    # Stored axes run to A, S and L, in 1, 2 and 3 mm.
    affine = np.array([[0, 0, -3, 0], [1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 1.0]])
    found = measure("p", Scan(voxels, affine, "nifti"), Scan(voxels > 8, affine, "nifti"), TASK)
    assert found.spacing == (3, 1, 2)
    assert found.shape == (32, 10, 20)
    assert found.kept == pytest.approx(10 * 20 * 32 / (20 * 30 * 40))
    assert found.histograms is None


@pytest.mark.parametrize(
    ("stated", "of_the_file", "least", "expected"),
    [
        (None, None, -1000, True),
        (None, None, -100, False),
        ("CT", None, -100, True),
        (None, "CT", 0, True),
        (None, "MR", -1000, False),
        ("MR", "CT", -1000, False),
    ],
)
def test_modality_is_the_tasks_or_the_files_or_told_by_air(
    stated: str | None, of_the_file: str | None, least: int, expected: bool
) -> None:
    voxels = np.full((10, 10, 10, 1), least)
    scan = Scan(voxels, np.eye(4), "nifti", modality=of_the_file)
    task = TASK.model_copy(update={"modality": stated})
    assert measure("p", scan, Scan(voxels * 0, np.eye(4), "nifti"), task).looks_like_ct is expected


def test_picture_is_refused_with_what_to_do() -> None:
    picture = Scan(np.zeros((64, 64, 1), np.uint8), None, "png")
    with pytest.raises(ScanMismatch, match="found a picture; train without a plan"):
        measure("p", picture, picture, TASK)


@pytest.mark.parametrize("mm", [0.1, 0.35, 0.7, 0.75, 0.9, 1.0, 1.25, 1.5, 3.0, 5.0, 36, 137, 240, 500])
def test_lengths_come_back_as_scanners_write_them(mm: float) -> None:
    case = replace(HOSPITALS[0][0], spacing=(mm, mm, mm))
    counts = fingerprint([case], 1, least=1)["spacing"][0]
    assert shortest_decimal(int(counts.argmax())) == mm


def lie(**changes: torch.Tensor) -> State:
    return {**fingerprint(HOSPITALS[0], 1), **changes}


def lengths(value: float, cases: float = 12.0) -> torch.Tensor:
    """A histogram in which all cases have this length along every axis."""
    made = torch.zeros(3, LENGTHS)
    made[:, int(np.clip(np.floor(np.log(value / 0.05) / np.log(1.01)), 0, LENGTHS - 1))] = cases
    return made


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (lie(cases=torch.tensor([13.0])), "expected 1 to 12 cases"),
        (lie(cases=torch.tensor([0.5])), "expected 1 to 12 cases"),
        (lie(kept=torch.full((20,), torch.nan)), "finite"),
        (lie(kept=torch.tensor([13.0, -1.0, *[0.0] * 18])), "counts of 0 or more"),
        (lie(spacing=torch.ones(3, LENGTHS)), "spacing: expected a histogram of 12 cases"),
        (lie(ct=torch.tensor([13.0])), "at most 12 cases with CT"),
        (lie(intensity=torch.ones(1, INTENSITIES)), "mass 1"),
        (lie(moments=torch.tensor([[12.0, 1200.0, 1.0]])), "same intensities"),
        (lie(moments=torch.tensor([[12.0, 12e5, 1e12]])), "expected Hounsfield units"),
        (lie(moments=torch.tensor([[12.0, 1200.0, 1e300]], dtype=torch.double)), "expected Hounsfield units"),
        (lie(spacing=lengths(137)), "spacing: expected 0 to 50, found 137 to 137"),
        (lie(shape=lengths(4900)), "shape: expected 1 to 4096"),
        (lie(shape=lengths(0.2)), "shape: expected 1 to 4096"),
        (lie(spacing=lengths(49), extent=lengths(0.05)), "extent: expected about voxels times mm per voxel"),
        (lie(cases=torch.tensor([1e300], dtype=torch.double)), "expected 1 to 12 cases"),
        (lie(extra=torch.zeros(1)), "expected the tensors"),
        (lie(shape=torch.zeros(3, 7)), "expected the tensors"),
    ],
)
def test_server_finds_what_no_site_can_have(sent: State, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(sent, SiteSize(cases=12), 1)


def test_server_accepts_what_sites_send() -> None:
    for cases in HOSPITALS:
        check(fingerprint(cases, 1), SiteSize(cases=len(cases)), 1)
    check({}, SiteSize(cases=2), 1)


def test_no_site_has_more_than_half_of_a_plan() -> None:
    honest = {"north": fingerprint(HOSPITALS[0], 1), "south": fingerprint(HOSPITALS[0], 1)}
    states, words = capped(honest)
    assert (states, words) == (honest, "")
    liar = lie(cases=torch.tensor([1000.0]), spacing=lengths(0.05, 1000), ct=torch.tensor([1000.0]))
    states, words = capped({**honest, "liar": liar})
    assert words.startswith("liar announces 1000 of 1024 training cases: it counts as 23")
    # A length that an honest site has.
    assert summary(added([*states.values()])).spacing == pytest.approx((0.7, 0.7, 1.4))
    states, words = capped({"north": honest["north"], "liar": liar})
    assert float(states["liar"]["cases"][0]) == 12
    assert capped({"liar": liar}) == ({"liar": liar}, "")
    assert capped({}) == ({}, "")
