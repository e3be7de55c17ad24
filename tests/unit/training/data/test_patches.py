"""Patches of volumes against slicing, turning by hand, and distances in millimetres."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from model_store.task import Task, VolumeGeometry
from tests.helpers.training.volumes import volumes
from training.local.schedule import Motion
from training.local.volumes import Volumes, patch_batches, patch_of

CUBE = Task(
    name="cube",
    labels={"one": (1,), "two": (2,)},
    geometry=VolumeGeometry(spacing=(1.0, 1.0, 1.0), patch=(8, 8, 8)),
)


def one(sides: tuple[int, int, int]) -> Volumes:
    draw = np.random.default_rng(0)
    image = draw.normal(size=(2, *sides)).astype(np.float32)
    target = draw.integers(0, 3, sides).astype(np.uint8)
    return Volumes((image,), (target,), ("p",), ("c",), ((1.0, 1.0, 1.0),), CUBE)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("corner", [(0, 0, 0), (3, 1, 2), (-2, 0, -1), (7, 5, 4)])
def test_a_patch_that_stays_is_cut_out_with_zeros_outside(corner: tuple[int, int, int]) -> None:
    found = one((12, 11, 10))
    image, target = patch_of(found, 0, corner)
    margin = 8
    for each, patch in ((found.images[0], image), (found.targets[0][None], target[None])):
        padded = np.pad(each, ((0, 0), *((margin, margin),) * 3))
        x, y, z = (margin + start for start in corner)
        assert np.array_equal(patch.numpy(), padded[:, x : x + 8, y : y + 8, z : z + 8])


def test_a_patch_that_is_sampled_in_place_is_the_one_that_is_cut_out() -> None:
    found = one((12, 11, 10))
    cut, sampled = (patch_of(found, 0, (2, 1, 1), m) for m in (None, torch.eye(3, dtype=torch.float64)))
    torch.testing.assert_close(sampled[0], cut[0], atol=1e-4, rtol=0)
    assert torch.equal(sampled[1], cut[1])


def test_a_quarter_turn_is_numpys() -> None:
    found = one((12, 11, 10))
    # x of the patch runs along y of the volume, and y against x.
    matrix = torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    image, target = patch_of(found, 0, (2, 1, 1), matrix)
    cut, classes = patch_of(found, 0, (2, 1, 1))
    turned = np.rot90(cut.numpy(), k=-1, axes=(1, 2))
    np.testing.assert_allclose(image.numpy(), turned, atol=1e-4)
    assert np.array_equal(target.numpy(), np.rot90(classes.numpy(), k=-1, axes=(0, 1)))


def test_a_turn_keeps_millimetres_whatever_the_spacing() -> None:
    spacing = (0.7, 1.0, 3.0)
    motion = Motion(moved=1.0, rotation=40.0, zoom=1.3, flip=0.5)
    draw, size = generator(), torch.tensor(spacing, dtype=torch.float64)
    offsets = torch.randn(20, 3, generator=draw, dtype=torch.float64)
    zooms = set()
    for _ in range(10):
        matrix = motion.draw(spacing, draw)
        assert matrix is not None
        lengths = ((offsets @ matrix.T) * size).norm(dim=1) / (offsets * size).norm(dim=1)
        torch.testing.assert_close(lengths, lengths[:1].expand(20))
        assert 1 / 1.3 <= float(lengths[0]) <= 1.3
        zooms.add(round(float(lengths[0]), 6))
    assert len(zooms) == 10


def test_no_motion_leaves_every_patch() -> None:
    assert Motion(flip=0.5).scaled(0.0).draw((1.0, 1.0, 1.0), generator()) is None
    moved = sum(Motion(flip=0.0).draw((1.0,) * 3, generator(seed)) is not None for seed in range(400))
    assert 160 < moved < 240


def test_the_last_patches_of_a_batch_are_centred_on_a_class_that_is_drawn() -> None:
    image = np.zeros((1, 32, 32, 32), np.float32)
    target = np.zeros((32, 32, 32), np.uint8)
    target[5, 6, 7], target[20, 21, 22] = 1, 2
    found = Volumes((image,), (target,), ("p",), ("c",), ((1.0, 1.0, 1.0),), CUBE)
    centres = []
    for _, targets in patch_batches(found, 100, 3, 1 / 3, None, generator()):
        assert targets.shape == (3, 8, 8, 8)
        centres.append(int(targets[2, 4, 4, 4]))
    assert set(centres) == {1, 2}
    assert 35 < centres.count(1) < 65  # each class alike, although nothing is said of their sizes


def test_patches_near_a_border_stay_inside_and_short_sides_are_padded_on_both() -> None:
    target = np.zeros((12, 6, 12), np.uint8)
    target[0, 0, 11] = 1
    image = np.ones((1, 12, 6, 12), np.float32)
    found = Volumes((image,), (target,), ("p",), ("c",), ((1.0, 1.0, 1.0),), CUBE)
    for images, targets in patch_batches(found, 5, 1, 1.0, None, generator()):
        assert images[0, 0].sum() == 8 * 6 * 8
        assert not images[:, :, :, 0].any()
        assert not images[:, :, :, 7].any()
        assert targets[0, 0, 1, 7] == 1


def test_volumes_come_alike_often_and_draws_are_of_the_generator_alone() -> None:
    found = volumes(4, 1)
    marked = replace(found, images=tuple(np.full_like(each, n) for n, each in enumerate(found.images)))
    seen = [
        float(image.max())
        for images, _ in patch_batches(marked, 10, 2, 0.5, None, generator())
        for image in images
    ]
    assert [seen.count(float(n)) for n in range(4)] == [5, 5, 5, 5]
    first, second, other = (
        [torch.cat([images.flatten(), targets.flatten().float()]) for images, targets in drawn]
        for drawn in (patch_batches(found, 3, 2, 0.5, Motion(), generator(seed)) for seed in (0, 0, 1))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_tiles_cover_every_voxel_of_small_volumes_and_are_bounded() -> None:
    found = volumes(3, 2)
    tiles = found.tiles()
    patch = found.geometry.patch
    assert tiles.images.shape[2:] == tiles.targets.shape[1:] == patch
    counts = [
        math.prod(math.ceil(side / length) for side, length in zip(each.shape, patch, strict=True))
        for each in found.targets
    ]
    assert [tiles.patients.count(name) for name in found.patients] == counts
    for index, name in enumerate(found.patients):
        own = [row for row, patient in enumerate(tiles.patients) if patient == name]
        assert set(np.unique(found.images[index])) <= {*np.unique(tiles.images[own])}
    assert len(found.tiles(2)) <= 2
