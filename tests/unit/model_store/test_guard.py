"""Input guard: mergeable sums, Mahalanobis distance, and warnings for unusual scans."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.appearance import DESCRIPTORS, percentiles
from model_store.guard import Range, ReferenceStatistics, ScanSummary, check, is_mistaken, summarise
from model_store.preprocessing import prepare_for
from model_store.scan import Note, Scan, decode
from model_store.task import Normalisation, Task
from model_store.volume import VolumeGeometry

TASK = Task(name="ring", labels={"a": (1,)}, size=(64, 64), colour="luminance")


def image(pixels: NDArray[Any]) -> Scan:
    return Scan(pixels if pixels.ndim == 3 else pixels[..., None], None, "png")


def body(seed: int, size: int = 64) -> NDArray[np.float32]:
    """A bright disc with a brighter spot on black, varied slightly by seed to imitate patients."""
    rng = np.random.default_rng(seed)
    y, x = np.indices((size, size)) / size - 0.5
    y, x = y + rng.normal(0, 0.02), x + rng.normal(0, 0.02)
    disc = (x**2 + y**2 < rng.uniform(0.3, 0.4) ** 2) * rng.uniform(60, 100)
    spot = ((x - 0.1) ** 2 + y**2 < 0.01) * 80
    return (disc + spot + rng.normal(0, 4, (size, size))).clip(0, 255).astype(np.float32)


def summary(scan: Scan, task: Task = TASK) -> ScanSummary:
    return summarise(scan, prepare_for(task, scan))


def merged(summaries: list[ScanSummary]) -> ReferenceStatistics:
    return reduce(ReferenceStatistics.merge, [ReferenceStatistics.of(one) for one in summaries])


@pytest.fixture(scope="module")
def reference() -> ReferenceStatistics:
    return merged([summary(image(body(seed))) for seed in range(120)])


def test_check_rarely_warns_for_scans_like_the_reference(reference: ReferenceStatistics) -> None:
    warned = [check(summary(image(body(seed))), reference, TASK) for seed in range(1000, 1060)]
    assert sum(map(bool, warned)) <= 3


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        (255 - body(5), "brightness of its border|distribution"),
        (np.random.default_rng(0).uniform(0, 255, (64, 64)), "coarse structure|detail"),
        (np.tile(np.linspace(0, 255, 64), (64, 1)), "left and right|distribution"),
        (np.zeros((64, 64)), "same intensity everywhere"),
        (np.dstack([body(5), body(6), body(7)]), "colour image.*grey images"),
        (body(5, size=256), "256 rows per slice; training had 64"),
    ],
)
def test_check_of_an_unusual_scan_warns_with_the_reason(
    reference: ReferenceStatistics, pixels: NDArray[Any], said: str
) -> None:
    warnings = check(summary(image(pixels.astype(np.float32))), reference, TASK)
    assert any(re.search(said, warning.text) for warning in warnings), warnings


@pytest.mark.parametrize(
    ("scan", "gross"),
    [
        (image(body(5, size=256)), False),
        (image(body(5, size=288)), True),
        (image(np.dstack([body(5), body(6), body(7)])), False),
        (image(np.random.default_rng(0).uniform(0, 255, (64, 64)).astype(np.float32)), False),
        (Scan(np.dstack([body(5), body(6)])[..., None], np.eye(4), "nifti"), True),
        (Scan(body(5)[:, :, None, None], np.eye(4), "nifti"), False),
    ],
    ids=["four-times-the-size", "more-than-that", "colour", "noise", "volume", "volume-of-one-slice"],
)
def test_scan_that_no_training_scan_resembles_in_kind_is_gross(
    reference: ReferenceStatistics, scan: Scan, gross: bool
) -> None:
    warnings = check(summary(scan), reference, TASK)
    assert warnings
    assert any(warning.gross for warning in warnings) is gross


def test_image_among_training_volumes_is_gross_unless_they_had_one_slice() -> None:
    def trained_on(slices: int) -> ReferenceStatistics:
        scans = [np.dstack([body(10 * seed + z) for z in range(slices)])[..., None] for seed in range(5)]
        return merged([summary(Scan(voxels, np.eye(4), "nifti")) for voxels in scans])

    for slices, gross in ((1, False), (3, True)):
        first, *others = check(summary(image(body(5))), trained_on(slices), TASK)
        assert "trained on grey volumes" in first.text
        assert [first.gross, *(each.gross for each in others)] == [gross, *[False] * len(others)]


def test_full_size_image_for_a_classifier_is_not_gross(reference: ReferenceStatistics) -> None:
    task = Task(name="small", kind="classification", class_names=("a", "b"), size=(64, 64))
    warnings = check(summary(image(body(5, size=640)), task), reference, task)
    assert any("640 rows" in warning.text for warning in warnings)
    assert not any(warning.gross for warning in warnings)


@pytest.mark.parametrize(("modality", "said"), [("CT", True), ("MR", False), (None, False)])
def test_another_modality_than_the_task_names_is_gross(modality: str | None, said: bool) -> None:
    task = TASK.model_copy(update={"modality": "MR"})
    scan = replace(image(body(5)), modality=modality)
    warnings = check(summary(scan, task), None, task)
    assert [warning.gross for warning in warnings] == [True] * said
    # A task without a modality takes every one, and its manifest is as before there were any.
    assert check(summary(scan), None, TASK) == []
    assert "modality" not in TASK.model_dump()


def test_merged_site_statistics_equal_statistics_of_all_scans() -> None:
    summaries = [summary(image(body(seed))) for seed in range(12)]
    at_once, by_site = merged(summaries), merged(summaries[:5]).merge(merged(summaries[5:]))
    assert at_once.count == by_site.count == 12
    assert at_once.ranges == by_site.ranges
    assert at_once.kinds == by_site.kinds == {"grey image": 12}
    np.testing.assert_allclose(at_once.sums, by_site.sums)
    np.testing.assert_allclose(at_once.products, by_site.products)
    assert ReferenceStatistics.model_validate_json(at_once.model_dump_json()) == at_once


def test_distance_is_mahalanobis_with_the_shrunk_correlation() -> None:
    rng = np.random.default_rng(0)
    size, count = len(DESCRIPTORS), 5000
    vectors = rng.normal(3, 0.5, (count, size)) @ rng.normal(0, 1, (size, size))
    base = ReferenceStatistics.of(summary(image(body(0))))
    reference = base.model_copy(
        update={
            "count": count,
            "sums": tuple(vectors.sum(0)),
            "products": tuple(map(tuple, vectors.T @ vectors)),
        }
    )
    probe = vectors[0] + 1.0
    deviation = np.sqrt(vectors.var(0) + 0.05**2)
    correlation = np.cov(vectors.T, bias=True) / np.outer(deviation, deviation)
    np.fill_diagonal(correlation, 1)
    z = (probe - vectors.mean(0)) / deviation
    expected = z @ np.linalg.inv(0.9 * correlation + 0.1 * np.eye(size)) @ z / size / (1 + size / count)
    assert reference.distance(tuple(probe)) == pytest.approx(expected, rel=1e-6)
    own = np.mean([reference.distance(tuple(v)) for v in vectors[:500]])
    assert 0.3 < own < 1.5


def test_check_against_a_single_scan_reference_does_not_warn() -> None:
    one = merged([summary(image(body(0)))])
    assert not any("look like" in w.text for w in check(summary(image(body(1))), one, TASK))


def test_check_of_a_volume_compares_kind_spacing_and_tilt() -> None:
    rng = np.random.default_rng(1)
    voxels = rng.normal(100, 10, (32, 32, 12, 1)).astype(np.float32)

    def of(spacing: tuple[float, float, float], degrees: float = 0.0) -> ScanSummary:
        affine = np.diag([*spacing, 1.0])
        c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        turn = np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
        affine[:3, :3] = turn @ affine[:3, :3]
        return summary(Scan(voxels, affine, "nifti"))

    reference = merged([of((1, 1, 5), 3), of((1.1, 1.1, 4), 5)])
    assert check(of((1.05, 1, 5), 4), reference, TASK) == []
    said = " ".join(each.text for each in check(of((3, 3, 1), 30), reference, TASK))
    assert "3 mm per row; training had 1 to 1.1" in said
    assert "mm between slices" in said
    assert "tilted by 30°" in said
    as_image = summary(image(body(0)))
    assert "grey image; task 'ring' was trained on grey volumes" in check(as_image, reference, TASK)[0].text


def test_intensity_unit_warning_requires_a_normalisation_window() -> None:
    windowed = TASK.model_copy(update={"normalisation": Normalisation(window=(0, 200))})
    reference = merged([summary(image(body(seed)), windowed) for seed in range(30)])
    scaled = summary(image(body(99) * 16), windowed)
    assert any("same units" in warning.text for warning in check(scaled, reference, windowed))
    assert not any("same units" in warning.text for warning in check(scaled, reference, TASK))
    assert check(summary(image(body(99)), windowed), reference, windowed) == []


ORGAN = VolumeGeometry(spacing=(1.0, 1.0, 1.0), patch=(16, 16, 16), axes="kji", crop="nonzero")
OF_VOLUMES = Task(name="organ", labels={"organ": (1,)}, geometry=ORGAN)
# As nnU-Net's files say it, of volumes of 35 to 50 mm.
ELSEWHERE = ReferenceStatistics(
    count=20,
    kinds={"grey volume": 20},
    ranges={
        name: Range(low=low, high=high)
        for name, low, high in (
            *((name, 0.9, 1.1) for name in ("first_mm", "second_mm", "third_mm")),
            *((name, 35, 50) for name in ("first_length", "second_length", "third_length")),
            ("foreground", 80, 190),
        )
    },
)
IN_UNITS = OF_VOLUMES.model_copy(update={"normalisation": Normalisation(window=(0, 200))})


def block(
    sides: tuple[int, int, int],
    mm: tuple[float, float, float] = (1, 1, 1),
    task: Task = OF_VOLUMES,
    times: float = 1,
) -> ScanSummary:
    voxels = np.random.default_rng(1).normal(100, 10, (*sides, 1)).astype(np.float32)
    return summary(Scan(voxels * times, np.diag([*mm, 1.0]), "nifti"), task)


@pytest.mark.parametrize(
    ("found", "said", "gross"),
    [
        (block((40, 45, 40)), (), False),
        # More of the same was scanned, along one axis.
        (block((40, 45, 300)), ("300 mm long along the network's first axis; training had 35 to 50",), False),
        (block((240, 240, 40)), ("240 mm long along the network's second", "network's third axis"), True),
        (block((18, 45, 18), (2.5, 1, 2.5)), ("2.5 mm per voxel along the network's first", "third"), False),
        (block((40, 9, 40), (1, 5, 1)), ("5 mm per voxel along the network's second",), True),
    ],
)
def test_a_model_made_elsewhere_has_ranges_along_the_networks_axes(
    found: ScanSummary, said: tuple[str, ...], gross: bool
) -> None:
    warnings = check(found, ELSEWHERE, OF_VOLUMES)
    assert len(warnings) == len(said)
    assert all(words in warning.text for words, warning in zip(said, warnings, strict=True))
    assert [warning.gross for warning in warnings] == [gross] * len(said)


def test_what_is_cropped_is_no_length_of_the_scan() -> None:
    voxels = np.zeros((240, 240, 40, 1), np.float32)
    voxels[100:140, 100:145] = np.random.default_rng(1).normal(100, 10, (40, 45, 40, 1))
    assert check(summary(Scan(voxels, np.eye(4), "nifti"), OF_VOLUMES), ELSEWHERE, OF_VOLUMES) == []


@pytest.mark.parametrize(
    ("times", "task", "gross"), [(1, IN_UNITS, []), (0.01, IN_UNITS, [True]), (0.01, OF_VOLUMES, [])]
)
def test_a_scan_without_any_intensity_of_the_target_is_gross_where_units_matter(
    times: float, task: Task, gross: list[bool]
) -> None:
    warnings = check(block((40, 45, 40), task=task, times=times), ELSEWHERE, task)
    assert [warning.gross for warning in warnings] == gross
    assert all("in the same units?" in warning.text for warning in warnings)


def test_ranges_alone_stay_ranges_alone_and_learn_a_hospitals_scans() -> None:
    larger = block((200, 200, 40))
    assert is_mistaken(larger, ELSEWHERE, check(larger, ELSEWHERE, OF_VOLUMES))
    own = ReferenceStatistics.of(larger, ELSEWHERE)
    for widened in (ELSEWHERE.merge(own), own.merge(ELSEWHERE)):
        assert (widened.count, widened.sums, widened.ranges.keys()) == (21, None, ELSEWHERE.ranges.keys())
        assert check(larger, widened, OF_VOLUMES) == []
        assert ReferenceStatistics.model_validate_json(widened.model_dump_json(exclude_none=True)) == widened
    # A trained model's statistics have what they had.
    assert "first_mm" not in ReferenceStatistics.of(larger).ranges


def test_notes_on_the_file_are_no_warnings_of_the_guard(reference: ReferenceStatistics) -> None:
    noted = Scan(body(99)[..., None], None, "png", notes=(Note("files-ignored", "something odd"),))
    assert check(summary(noted), None, TASK) == check(summary(noted), reference, TASK) == []


def test_check_without_reference_warns_of_a_constant_scan_alone() -> None:
    assert check(summary(image(255 - body(0))), None, TASK) == []
    (warning,) = check(summary(image(np.ones((64, 64), np.uint8))), None, TASK)
    assert "same intensity everywhere" in warning.text


Change = Callable[[NDArray[Any]], NDArray[Any]]
SITES = ("CS", "DU", "FG", "HT")


def _summaries(folder: Path, task: Task, every: int, change: Change = lambda v: v) -> list[ScanSummary]:
    found = []
    for path in sorted((folder / "images").glob("*.png"))[::every]:
        scan = decode(path.read_bytes())
        found.append(summary(image(change(scan.voxels)), task))
    return found


def test_check_passes_a_new_institution_and_warns_for_other_anatomy(real_data: Path) -> None:
    """FLAIR of four institutions, each compared with the other three; then images that are not brain MRI."""
    task = Task(name="lgg", labels={"tumour": (255,)}, size=(96, 96), colour="luminance")
    by_site = {site: _summaries(real_data / "brain_lgg_flair" / site, task, every=2) for site in SITES}
    others = {
        "retina": _summaries(real_data / "retina_vessels" / "DRIVE", task, 1),
        "retina as grey": _summaries(real_data / "retina_vessels" / "DRIVE", task, 1, lambda v: v.mean(-1)),
        "ultrasound": _summaries(real_data / "breast_ultrasound" / "BUSI_tumour", task, 8),
        "inverted": _summaries(real_data / "brain_lgg_flair" / "CS", task, 4, lambda v: 255 - v),
    }
    for held_out in SITES:
        reference = merged([one for site in SITES if site != held_out for one in by_site[site]])
        warned = [bool(check(one, reference, task)) for one in by_site[held_out]]
        assert np.mean(warned) < 0.1, held_out
        for name, summaries in others.items():
            warned = [bool(check(one, reference, task)) for one in summaries]
            assert np.mean(warned) > 0.9, (held_out, name)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "int16", "int32"])
def test_percentiles_equal_those_of_numpy_to_the_bit(dtype: str) -> None:
    generator = np.random.default_rng(0)
    percents = (0, 1, 5, 25, 50, 75, 95, 99, 99.5, 100)
    for count in (1, 2, 3, 10, 1001, 65_537):
        values = generator.normal(100, 60, count).clip(0, 255).astype(dtype)
        expected = np.percentile(values, percents)
        assert percentiles(values, percents) == tuple(map(float, expected))
