"""What a volume may cost, and the memory of every shape of one from its voxels to its mask."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.errors import ScanTooLarge
from model_store.preprocessing import finish, prepare_volume, price_of, volume_restore, windowed
from model_store.scan import Limits, Scan
from model_store.task import Task

MEBIBYTE = 2**20


def task(classes: int = 3, channels: int = 1, **geometry: Any) -> Task:
    return Task.model_validate(
        {
            "name": "t",
            "labels": {str(n): [n] for n in range(1, classes)},
            "channels": [{"name": f"c{n}", "normalisation": {"method": "zscore"}} for n in range(channels)],
            "stacked": channels > 1,
            "geometry": {"spacing": [1, 1, 1], "patch": [32, 32, 32], **geometry},
        }
    )


def volume(shape: tuple[int, ...], mm: tuple[float, ...], channels: int = 1) -> Scan:
    voxels = np.random.default_rng(0).integers(0, 255, (*shape, channels)).astype(np.uint8)
    return Scan(np.asfortranarray(voxels), np.diag([*mm, 1.0]), "nifti", mm_per_unit=1.0)


def masked(scan: Scan, own: Task, seed: int | None = None) -> NDArray[np.uint8]:
    """The mask of a network that is certain of the background, or says anything."""
    geometry = own.geometry
    assert geometry is not None
    prepared = prepare_volume(scan, own)
    certain = np.zeros((own.out_channels, *geometry.patch), np.float32)
    certain[0] = 1
    draw = np.random.default_rng(seed)

    def run(patch: NDArray[np.float32]) -> NDArray[np.float32]:
        return certain if seed is None else draw.random(certain.shape, np.float32)

    return finish(prepared.grid, own, windowed(prepared.volume, prepared.grid, own, run))[0]


@pytest.mark.parametrize("resampling", ["linear", "nnunet"])
@pytest.mark.parametrize(
    ("shape", "mm", "classes", "channels"),
    [
        ((1, 1000, 1000), (32, 0.032, 0.032), 64, 1),
        ((1000, 1000, 1), (0.032, 0.032, 32), 64, 1),
        ((8, 8, 8000), (4, 4, 0.01), 3, 1),
        ((64, 64, 64), (1, 1, 1), 105, 1),
        ((96, 96, 64), (1, 1, 1), 3, 8),
    ],
    ids=["flat-first", "flat-last", "long", "many-classes", "many-channels"],
)
def test_memory_of_a_volume_is_bounded_whatever_its_shape(
    shape: tuple[int, ...], mm: tuple[float, ...], classes: int, channels: int, resampling: str
) -> None:
    scan, own = volume(shape, mm, channels), task(classes, channels, resampling=resampling)
    price_of(scan, own).check(Limits(), own)
    tracemalloc.start()
    mask = masked(scan, own)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert mask.shape == shape
    # All outputs on the voxels of a flat scan would take three times 256 MiB.
    assert peak < 128 * MEBIBYTE, f"{peak / MEBIBYTE:.0f} MiB"


def test_strips_of_a_plane_are_the_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    scan, own = volume((9, 40, 52), (4, 1.3, 0.9)), task(4, patch=(16, 16, 16))
    whole = masked(scan, own, seed=1)
    monkeypatch.setattr(volume_restore, "_STRIP", 4 * 52 * 3)
    strips = masked(scan, own, seed=1)
    assert len(np.unique(whole)) == 4
    # Each strip is interpolated along the axis that is shorter for it first, which rounds otherwise.
    assert (whole != strips).mean() < 1e-3


@pytest.mark.parametrize(
    ("shape", "mm", "resampling", "limits", "words"),
    [
        ((8, 8, 8), (20, 20, 20), "linear", Limits(), "512 voxels would have 160 x 160 x 160, 8000 times"),
        ((160, 160, 160), (2.1, 2, 2), "linear", Limits(), "8 times is allowed"),
        ((64, 64, 64), (2, 2, 2), "linear", Limits(max_windows=100), "343 windows of task 't'"),
        ((1, 512, 512), (8, 1, 1), "linear", Limits(max_pixels=2**17), "planes of 262144 pixels"),
        ((8, 8, 20000), (4, 4, 0.01), "nnunet", Limits(max_decompressed=2**20), "resampling of the volume"),
    ],
)
def test_a_volume_that_costs_too_much_is_refused_with_figures(
    shape: tuple[int, ...], mm: tuple[float, ...], resampling: str, limits: Limits, words: str
) -> None:
    own = task(resampling=resampling)
    scan = Scan(np.broadcast_to(np.uint8(0), (*shape, 1)), np.diag([*mm, 1.0]), "nifti", mm_per_unit=1.0)
    with pytest.raises(ScanTooLarge, match=words):
        price_of(scan, own).check(limits, own)


def test_what_a_volume_costs_is_what_its_preparing_and_running_take() -> None:
    scan, own = volume((40, 30, 20), (2, 1, 1)), task(mirror=(0, 1), resampling="nnunet")
    price, prepared = price_of(scan, own), prepare_volume(scan, own)
    runs = []

    def run(patch: NDArray[np.float32]) -> NDArray[np.float32]:
        runs.append(1)
        return np.ones((own.out_channels, *patch.shape[1:]), np.float32)

    for _ in windowed(prepared.volume, prepared.grid, own, run):
        pass
    assert price.passes == len(runs) == 4 * price.windows
    assert (price.own, price.grid) == (24000, prepared.grid)
    assert 0 < price.preparing < 0.1
    assert price_of(volume((40, 30, 20), (1, 1, 1)), own).preparing == 0


@pytest.mark.parametrize(
    ("shape", "mm", "geometry", "within", "seconds"),
    [
        # The network's grid is small; the spline filter runs over the scan's own voxels.
        ((60, 60, 26000), (0.5, 0.5, 0.01), {"resampling": "nnunet"}, "all", 8),
        ((500, 500, 500), (0.1, 0.1, 0.1), {"crop": "nonzero"}, "all", 10),
        ((500, 500, 500), (0.1, 0.1, 0.1), {}, "region", 10),
    ],
    ids=["filter", "crop", "region"],
)
def test_steps_over_the_scans_own_voxels_are_priced(
    shape: tuple[int, ...], mm: tuple[float, ...], geometry: dict[str, Any], within: str, seconds: float
) -> None:
    own = task(**geometry)
    channel = own.channel_list[0]
    norm = channel.normalisation.model_copy(update={"within": within})
    own = own.model_copy(update={"channels": (channel.model_copy(update={"normalisation": norm}),)})
    scan = Scan(np.broadcast_to(np.uint8(0), (*shape, 1)), np.diag([*mm, 1.0]), "nifti", mm_per_unit=1.0)
    assert price_of(scan, own).preparing > seconds
