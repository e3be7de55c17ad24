"""Orientation: one body in any axis order, flip or tilt gives the same, correct mask.

The organ is two balls of different size in world millimetres, asymmetric along every axis, so its centroid
and its outline are known without any of the code under test. The "network" is a threshold on the slices it is
given.
"""

from __future__ import annotations

import gzip
from itertools import permutations, product
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.errors import ScanMismatch, ScanTooLarge
from model_store.preprocessing import Restorer, prepare, prepare_mask, restore, to_slices
from model_store.scan import Scan, decode, encode_nifti
from model_store.task import Normalisation, Plane, Task

BALLS = (((6.0, -4.0, 3.0), 13.0), ((-9.0, 11.0, -12.0), 8.0))
ORDERS = [(axes, flips) for axes in permutations(range(3)) for flips in product((False, True), repeat=3)]
PLANES: tuple[Plane, ...] = ("axial", "coronal", "sagittal")


def task(plane: Plane, size: tuple[int, int], **more: object) -> Task:
    return Task(
        name="balls",
        labels={"organ": (1,)},
        plane=plane,
        size=size,
        normalisation=Normalisation(method="none"),
        **more,
    )  # type: ignore[arg-type]


def world(shape: tuple[int, ...], affine: NDArray[np.float64]) -> NDArray[np.float64]:
    index = np.indices(shape).reshape(3, -1)
    return (affine[:3, :3] @ index + affine[:3, 3:]).reshape(3, *shape)


def organ(shape: tuple[int, ...], affine: NDArray[np.float64]) -> NDArray[np.bool_]:
    points = world(shape, affine)
    inside = np.zeros(shape, bool)
    for centre, radius in BALLS:
        inside |= ((points - np.array(centre)[:, None, None, None]) ** 2).sum(axis=0) <= radius**2
    return inside


def grid(
    spacing: tuple[float, float, float], extent: float = 56.0
) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    """An RAS grid centred near the origin, a little off it in each direction."""
    shape = tuple(int(extent // step) + extra for step, extra in zip(spacing, (0, 2, 5), strict=True))
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = [-step * (side - 1) / 2 for step, side in zip(spacing, shape, strict=True)]
    return shape, affine


def stored(
    voxels: NDArray[np.generic], affine: NDArray[np.float64], axes: tuple[int, ...], flips: tuple[bool, ...]
) -> tuple[NDArray[np.generic], NDArray[np.float64]]:
    """The same volume with its axes reordered and flipped by hand."""
    affine = affine.copy()
    for axis, flip in enumerate(flips):
        if flip:
            voxels = np.flip(voxels, axis)
            affine[:3, 3] += affine[:3, axis] * (voxels.shape[axis] - 1)
            affine[:3, axis] *= -1
    affine[:, :3] = affine[:, list(axes)]
    return voxels.transpose(axes), affine


def unstored(voxels: NDArray[np.uint8], axes: tuple[int, ...], flips: tuple[bool, ...]) -> NDArray[np.uint8]:
    voxels = voxels.transpose(np.argsort(axes))
    return voxels[tuple(slice(None, None, -1 if flip else None) for flip in flips)]


def intensities(inside: NDArray[np.bool_]) -> NDArray[np.int16]:
    rng = np.random.default_rng(3)
    return (rng.integers(0, 60, inside.shape) + 400 * inside).astype(np.int16)


def threshold(slices: NDArray[np.float32], at: float = 230, width: float = 40) -> NDArray[np.float32]:
    """A soft oracle: p(organ) = 0.5 where the intensity is `at`."""
    organ = 1 / (1 + np.exp(-(slices[:, :1] - at) / width))
    return np.concatenate([1 - organ, organ], axis=1).astype(np.float32)


def centroid(mask: NDArray[np.generic], affine: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(affine[:3, :3] @ np.argwhere(mask).mean(axis=0) + affine[:3, 3])


def dice(a: NDArray[np.generic], b: NDArray[np.generic]) -> float:
    return float(2 * (a.astype(bool) & b.astype(bool)).sum() / (a.astype(bool).sum() + b.astype(bool).sum()))


TRUE_CENTROID = centroid(*(lambda s, a: (organ(s, a), a))(*grid((0.5, 0.5, 0.5))))


@pytest.mark.parametrize("plane", PLANES)
def test_all_48_axis_orders_give_identical_slices_and_masks(plane: Plane) -> None:
    shape, affine = grid((2.0, 2.5, 3.0))
    inside = organ(shape, affine)
    voxels = intensities(inside)
    this = task(plane, (48, 32), neighbours=1)
    first = prepare(Scan(voxels[..., None], affine, "nifti"), this)
    mask = restore(threshold(first.slices[:, 1:2]), first.geometry)
    # The mask is correct, not only consistent: it is where the organ was placed, in millimetres.
    assert dice(mask, inside) > 0.93
    assert np.abs(centroid(mask, affine) - TRUE_CENTROID).max() < 0.6
    drawn = prepare_mask(Scan(inside.astype(np.uint8)[..., None], affine, "nifti"), this, first.geometry)
    assert dice(drawn, first.slices[:, 1] > 230) > 0.9

    for axes, flips in ORDERS:
        turned, turned_affine = stored(voxels, affine, axes, flips)
        prepared = prepare(Scan(turned[..., None], turned_affine, "nifti"), this)
        np.testing.assert_array_equal(prepared.slices, first.slices, err_msg=f"{axes} {flips}")
        own = restore(threshold(prepared.slices[:, 1:2]), prepared.geometry)
        np.testing.assert_array_equal(unstored(own, axes, flips), mask, err_msg=f"{axes} {flips}")
        label, _ = stored(inside.astype(np.uint8), affine, axes, flips)
        again = prepare_mask(Scan(label[..., None], turned_affine, "nifti"), this, prepared.geometry)
        np.testing.assert_array_equal(again, drawn, err_msg=f"{axes} {flips}")


@pytest.mark.parametrize("scope", ["image", "volume"])
def test_normalisation_is_bit_identical_in_any_stored_order(scope: str) -> None:
    shape, affine = grid((3.0, 3.5, 4.0))
    voxels = intensities(organ(shape, affine)).astype(np.float32) * np.float32(0.37)
    this = Task(
        name="balls",
        labels={"organ": (1,)},
        size=(32, 32),
        normalisation=Normalisation(scope=scope, percentiles=(1, 99)),  # type: ignore[arg-type]
    )
    first = prepare(Scan(voxels[..., None], affine, "nifti"), this).slices
    for axes, flips in ORDERS[::5]:
        turned, turned_affine = stored(voxels, affine, axes, flips)
        same = prepare(Scan(np.asfortranarray(turned)[..., None], turned_affine, "nifti"), this).slices
        np.testing.assert_array_equal(same, first)


@pytest.mark.parametrize(
    ("plane", "slice_axis", "row", "column"),
    [
        ("axial", (2, 1), (1, -1), (0, -1)),
        ("coronal", (1, -1), (2, -1), (0, -1)),
        ("sagittal", (0, -1), (2, -1), (1, -1)),
    ],
)
def test_slices_rows_and_columns_run_in_the_documented_direction(
    plane: Plane, slice_axis: tuple[int, int], row: tuple[int, int], column: tuple[int, int]
) -> None:
    """Each voxel holds its own R, A or S coordinate, so a slice shows which way it runs."""
    shape, affine = (18, 20, 22), np.diag([1.0, 1.0, 1.0, 1.0])
    turned_shape_axes, flips = (2, 0, 1), (True, False, True)
    for world_axis in range(3):
        voxels, turned = stored(
            world(shape, affine)[world_axis].astype(np.float32), affine, turned_shape_axes, flips
        )
        slices = prepare(Scan(voxels[..., None], turned, "nifti"), task(plane, (32, 32))).slices[:, 0]
        for array_axis, (expected_axis, sign) in enumerate((slice_axis, row, column)):
            change = float(np.diff(slices.mean(axis=tuple({0, 1, 2} - {array_axis}))).mean())
            assert np.sign(round(change, 3)) == (sign if expected_axis == world_axis else 0)


@pytest.mark.parametrize("degrees", [10, 30, 44])
@pytest.mark.parametrize("plane", PLANES)
def test_tilted_volume_gives_the_correct_mask_on_its_own_grid(plane: Plane, degrees: int) -> None:
    shape, affine = grid((2.0, 2.2, 2.5), extent=72)
    turn = np.eye(4)
    turn[:3, :3] = nib.eulerangles.euler2mat(
        np.radians(degrees) / 3, np.radians(degrees), np.radians(degrees) / 4
    )
    tilted = turn @ affine
    inside = organ(shape, tilted)
    scan = Scan(intensities(inside)[..., None], tilted, "nifti")
    prepared = prepare(scan, task(plane, (64, 64)))
    assert prepared.geometry.resampled == (degrees > 15)
    own = restore(threshold(prepared.slices), prepared.geometry)
    assert own.shape == shape
    assert dice(own, inside) > 0.92
    assert np.abs(centroid(own, tilted) - TRUE_CENTROID).max() < 0.6
    # The drawn mask overlaps the organ in the network's slices, and its display slices have their shape.
    drawn = Scan(inside.astype(np.uint8)[..., None], tilted, "nifti")
    assert (
        dice(prepare_mask(drawn, task(plane, (64, 64)), prepared.geometry), prepared.slices[:, 0] > 230) > 0.9
    )
    assert to_slices(inside.astype(np.uint8), prepared.geometry).shape == prepared.geometry.slices


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_strongly_tilted_volume_gives_the_same_mask_in_any_stored_order(axes: tuple[int, ...]) -> None:
    shape, affine = grid((2.0, 2.2, 2.5), extent=64)
    turn = np.eye(4)
    turn[:3, :3] = nib.eulerangles.euler2mat(0.1, 0.5, 0.2)
    tilted = turn @ affine
    voxels = intensities(organ(shape, tilted))
    flips = (True, False, True)
    masks = []
    for order, flip in (((0, 1, 2), (False, False, False)), (axes, flips)):
        turned, turned_affine = stored(voxels, tilted, order, flip)
        prepared = prepare(Scan(turned[..., None], turned_affine, "nifti"), task("axial", (64, 64)))
        masks.append(unstored(restore(threshold(prepared.slices), prepared.geometry), order, flip))
    assert dice(*masks) > 0.999


def test_resampled_grid_is_aligned_to_patient_axes_and_covers_the_volume() -> None:
    shape, affine = grid((2.0, 2.2, 2.5))
    turn = np.eye(4)
    turn[:3, :3] = nib.eulerangles.euler2mat(0.2, 0.6, 0.1)
    tilted = turn @ affine
    geometry = prepare(
        Scan(np.ones((*shape, 1), np.float32), tilted, "nifti"), task("axial", (32, 32))
    ).geometry
    to_world = tilted @ np.array(geometry.to_own)
    np.testing.assert_allclose(
        np.abs(to_world[:3, :3]), np.abs(to_world[:3, :3]).max(0) * np.eye(3)[::-1], atol=1e-9
    )
    corners = world((2, 2, 2), tilted @ np.diag([*[side - 1 for side in shape], 1])).reshape(3, -1)
    index = np.linalg.inv(to_world) @ np.vstack([corners, np.ones(8)])
    assert (index[:3] > -0.5).all()
    assert (index[:3] < np.array(geometry.slices)[:, None] - 0.5).all()
    np.testing.assert_allclose(geometry.spacing, (2.5, 2.2, 2.0), rtol=1e-9)


def test_restorer_in_batches_equals_restore_of_the_whole() -> None:
    shape, affine = grid((4.0, 4.0, 4.0))
    prepared = prepare(
        Scan(intensities(organ(shape, affine))[..., None], affine, "nifti"), task("axial", (32, 16))
    )
    probabilities = threshold(prepared.slices)
    restorer = Restorer(prepared.geometry)
    for start in range(0, len(probabilities), 3):
        restorer.add(probabilities[start : start + 3])
    np.testing.assert_array_equal(restorer.finish(), restore(probabilities, prepared.geometry))


def test_slab_with_too_thin_slices_is_rejected_with_its_sizes() -> None:
    scan = Scan(np.zeros((64, 64, 3, 1), np.int16), np.eye(4), "nifti")
    with pytest.raises(ScanMismatch, match=r"coronal slices.*3 x 64"):
        prepare(scan, task("coronal", (32, 32)))
    assert len(prepare(scan, task("axial", (32, 32))).slices) == 3


def test_volume_with_too_many_slices_is_rejected_before_resizing() -> None:
    rod = np.broadcast_to(np.int16(0), (8, 8, 200_000, 1))
    with pytest.raises(ScanTooLarge, match="200000 axial slices"):
        prepare(Scan(rod, np.eye(4), "nifti"), task("axial", (512, 512)))


@pytest.mark.parametrize("name", ["t2.nii.gz", "anatomical.nii", "MR_Gd.nii.gz", "CT_AVM.nii.gz"])
def test_real_file_gives_the_slices_of_its_canonical_copy(real_data: Path, name: str) -> None:
    path = real_data / "io_samples" / "nifti" / name
    original = decode(path.read_bytes())
    canonical = decode(nib.as_closest_canonical(nib.load(path)).to_bytes())
    this = task("axial", (256, 256))
    ours, theirs = prepare(original, this), prepare(canonical, this)
    np.testing.assert_array_equal(ours.slices, theirs.slices)
    # Round trip: voxels that are bright in the slices are bright in the file.
    level = float(np.percentile(original.voxels[original.voxels > 0], 80))
    back = restore(threshold(ours.slices, level, width=float(original.voxels.max()) / 20), ours.geometry)
    assert dice(back, original.voxels[..., 0] > level) > 0.8  # resized there and back
    returned = nib.Nifti1Image.from_bytes(gzip.decompress(encode_nifti(back, original.affine)))
    np.testing.assert_allclose(returned.affine, nib.load(path).affine, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(returned.dataobj), back)


def test_real_mask_survives_the_round_trip_through_slices(real_data: Path) -> None:
    root = real_data / "hippocampus_nifti"
    this = Task(
        name="hippocampus", labels={"anterior": (1,), "posterior": (2,)}, size=(64, 64), plane="coronal"
    )
    for image in sorted((root / "images").glob("*.nii.gz"))[:6]:
        scan, mask = decode(image.read_bytes()), decode((root / "labels" / image.name).read_bytes())
        prepared = prepare(scan, this)
        classes = prepare_mask(mask, this, prepared.geometry)
        one_hot = np.moveaxis(np.eye(3, dtype=np.float32)[classes], -1, 1)
        assert dice(restore(one_hot, prepared.geometry), mask.voxels[..., 0]) > 0.9
