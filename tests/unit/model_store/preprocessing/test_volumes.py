"""Volumes to the network's grid and back: orientation, resampling, normalisation, channels, masks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from numpy.typing import NDArray
from scipy import ndimage

from model_store.errors import MaskMismatch, ScanMismatch, ScanTooLarge, TaskError
from model_store.preprocessing import (
    VolumeRestorer,
    join_channels,
    prepare_volume,
    prepare_volume_mask,
)
from model_store.preprocessing.volume_restore import PercentVolumeRestorer, as_logits, as_probabilities
from model_store.scans.types import Scan
from model_store.task import Task

PATCH = [8, 8, 8]


def task(**fields: Any) -> Task:
    geometry = {"spacing": [2, 2, 2], "patch": PATCH, **fields.pop("geometry", {})}
    content = {"name": "v", "labels": {"a": [1], "b": [2]}, "normalisation": {"method": "none"}, **fields}
    if "channels" in content:
        del content["normalisation"]
    return Task.model_validate({**content, "geometry": geometry})


def scan(voxels: NDArray[Any], affine: NDArray[np.float64] | None = None) -> Scan:
    channels = voxels if voxels.ndim == 4 else voxels[..., np.newaxis]
    return Scan(channels, np.eye(4) if affine is None else affine, "nifti")


def blobs(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    noise = np.random.default_rng(seed).random(shape, dtype=np.float32)
    return np.asarray(ndimage.gaussian_filter(noise, 1.5) * 100, np.float32)


def orientations() -> Iterator[NDArray[np.float64]]:
    """All 48 ways in which three axes of a file may run along the patient's."""
    for order in itertools.permutations(range(3)):
        for signs in itertools.product((1, -1), repeat=3):
            yield np.array([[axis, sign] for axis, sign in zip(order, signs, strict=True)], float)


def stored(
    volume: NDArray[Any], affine: NDArray[np.float64], orientation: NDArray[np.float64]
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """The same volume in the patient, stored with other axes."""
    turned = nib.orientations.apply_orientation(volume, orientation)
    return turned, affine @ nib.orientations.inv_ornt_aff(orientation, volume.shape)


def oblique(spacing: tuple[float, float, float], degrees: float) -> NDArray[np.float64]:
    angle = np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    sine, cosine = np.sin(angle / 2), np.cos(angle / 2)
    tilt = np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])
    affine = np.eye(4)
    affine[:3, :3] = turn @ tilt @ np.diag(spacing)
    affine[:3, 3] = (-31.5, 17.25, 40)
    return affine


def restored(
    prepared: Any, own: Task, planes: NDArray[np.float32], axis: int, **options: Any
) -> NDArray[np.uint8]:
    restorer = VolumeRestorer(prepared.grid, own, axis, **options)
    for plane in np.moveaxis(planes, 1 + axis, 0):
        restorer.add(plane)
    return restorer.finish()


class TestTheWayThere:
    @pytest.mark.parametrize("spacing", [(0.8, 1.3, 3.0), (3.1, 2.2, 0.7), (2, 2, 2)])
    def test_linear_resampling_is_simpleitks_and_scipys(self, spacing: tuple[float, float, float]) -> None:
        values = blobs((21, 18, 13))
        found = prepare_volume(scan(values, np.diag([*spacing, 1.0])), task()).volume[0]
        side = [max(1, round(n * mm / 2)) for n, mm in zip(values.shape, spacing, strict=True)]
        assert found.shape == tuple(side)
        zoomed = ndimage.zoom(
            values.astype(np.float64), np.array(side) / values.shape, order=1, mode="nearest", grid_mode=True
        )
        np.testing.assert_allclose(found, zoomed, rtol=1e-6)
        image = sitk.GetImageFromArray(values.transpose())
        grid = sitk.ResampleImageFilter()
        steps = [n / m for n, m in zip(values.shape, side, strict=True)]
        grid.SetSize(side)
        grid.SetOutputSpacing(steps)
        grid.SetOutputOrigin([(step - 1) / 2 for step in steps])
        grid.SetInterpolator(sitk.sitkLinear)
        grid.SetUseNearestNeighborExtrapolator(True)
        by_itk = sitk.GetArrayFromImage(grid.Execute(image)).transpose()
        np.testing.assert_allclose(found, by_itk, rtol=2e-6)

    @pytest.mark.parametrize("axes", ["RAS", "LPS", "PIR"])
    @pytest.mark.parametrize("spacing", [(0.8, 1.3, 3.0), (3.5, 1.1, 2.0)])
    def test_monais_rule_is_monais_orientation_and_spacing(
        self, axes: str, spacing: tuple[float, float, float]
    ) -> None:
        import torch
        from monai.data.meta_tensor import MetaTensor
        from monai.transforms.spatial.array import Orientation, Spacing

        for orientation in list(orientations())[::5]:
            values, affine = stored(blobs((21, 18, 13)), oblique(spacing, 8), orientation)
            image = MetaTensor(torch.from_numpy(values.copy())[None], affine=torch.from_numpy(affine))
            image = Spacing(pixdim=(2, 2, 2))(Orientation(axcodes=axes, labels=None)(image))
            found = prepare_volume(
                scan(values, affine), task(geometry={"axes": axes, "resampling": "monai"})
            ).volume
            assert found.shape == tuple(image.shape)
            np.testing.assert_allclose(found, image.numpy(), atol=2e-4)

    def test_monais_rule_is_monais_grid_on_oblique_affines_as_headers_have_them(self) -> None:
        import torch
        from monai.data.meta_tensor import MetaTensor
        from monai.transforms.spatial.array import Orientation, Spacing

        rng = np.random.default_rng(0)
        own = task(geometry={"axes": "RAS", "resampling": "monai", "spacing": [1.5, 1.5, 2]})
        values = blobs((19, 16, 12))
        centred = 0
        for _ in range(60):
            turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
            affine = np.eye(4)
            affine[:3, :3] = turn @ np.diag(rng.uniform(0.6, 3.2, 3))
            affine[:3, 3] = rng.uniform(-200, 200, 3)
            affine = affine.astype(np.float32).astype(np.float64)
            image = MetaTensor(torch.from_numpy(values.copy())[None], affine=torch.from_numpy(affine))
            image = Spacing(pixdim=(1.5, 1.5, 2))(Orientation(axcodes="RAS", labels=None)(image))
            found = prepare_volume(scan(values, affine), own)
            assert found.volume.shape == tuple(image.shape)
            np.testing.assert_allclose(found.volume, image.numpy(), atol=2e-4)
            centred += any(axis.offset for axis in found.grid.axes)
        assert 20 < centred < 60

    @pytest.mark.parametrize("spacing", [(2.0009, 1.1, 2.0), (1.9991, 2.0, 3.0)])
    def test_monais_rule_leaves_a_voxel_that_is_nearly_of_the_spacing(
        self, spacing: tuple[float, float, float]
    ) -> None:
        prepared = prepare_volume(
            scan(blobs((21, 18, 13)), np.diag([*spacing, 1.0])), task(geometry={"resampling": "monai"})
        )
        assert prepared.grid.axes[0].same
        assert prepared.volume.shape[1] == 21

    def test_every_orientation_of_a_file_is_the_same_input(self) -> None:
        affine = oblique((0.9, 1.2, 2.5), 20)
        values = (blobs((17, 22, 9)) * 10).astype(np.int16)
        own = task(normalisation={"percentiles": [1, 99]})
        expected = prepare_volume(scan(values, affine), own)
        for orientation in orientations():
            found = prepare_volume(scan(*stored(values, affine, orientation)), own)
            np.testing.assert_allclose(found.volume, expected.volume, atol=2e-6)
            assert found.grid.tilt_degrees == pytest.approx(expected.grid.tilt_degrees)

    def test_stored_axes_are_taken_as_nnunet_reads_them(self) -> None:
        values = blobs((9, 12, 10))
        flipped = np.diag([-1.0, 1, -1, 1])
        prepared = prepare_volume(scan(values, flipped), task(geometry={"axes": "jki", "spacing": None}))
        np.testing.assert_array_equal(prepared.volume[0], values.transpose(1, 2, 0))
        assert [axis.spacing for axis in prepared.grid.axes] == [1, 1, 1]

    def test_cubic_resampling_takes_the_nearest_plane_of_thick_slices(self) -> None:
        values = blobs((20, 22, 6))
        own = task(geometry={"resampling": "nnunet", "axes": "kji", "spacing": [2, 1.5, 1.5]})
        prepared = prepare_volume(scan(values, np.diag([1.0, 1, 5, 1])), own)
        assert prepared.grid.apart == (0, 0)
        assert prepared.volume.shape == (1, 15, 15, 13)
        plane = values[:, :, 0].T
        zoomed = ndimage.zoom(plane, (15 / 22, 13 / 20), order=3, mode="nearest", grid_mode=True)
        np.testing.assert_allclose(prepared.volume[0, 0], zoomed.clip(plane.min(), plane.max()), rtol=1e-5)

    def test_the_margin_of_zeros_is_cropped_and_restored(self) -> None:
        values = np.zeros((20, 21, 22), np.int16)
        values[4:16, 5:18, 6:15] = 7
        own = task(geometry={"crop": "nonzero", "spacing": None})
        prepared = prepare_volume(scan(values), own)
        assert prepared.volume.shape == (1, 12, 13, 9)
        outputs = np.zeros((3, 12, 13, 9), np.float32)
        outputs[2] = 1
        np.testing.assert_array_equal(restored(prepared, own, outputs, 1) == 2, values > 0)
        # Nothing is left of a volume of zeros, so nothing is cropped.
        assert prepare_volume(scan(np.zeros((9, 9, 9), np.int16)), own).volume.shape == (1, 9, 9, 9)

    def test_images_other_channels_and_too_many_voxels_are_refused(self) -> None:
        with pytest.raises(ScanMismatch, match="segments volumes, and the scan is an image"):
            prepare_volume(Scan(np.zeros((32, 32, 1), np.uint8), None, "png"), task())
        two = scan(np.zeros((9, 9, 9, 2), np.uint8))
        with pytest.raises(ScanMismatch, match="expects one value per voxel, found 2"):
            prepare_volume(two, task())
        with pytest.raises(ScanMismatch, match=r"3 channels \(x, y, z\), found one file with 2; send one"):
            prepare_volume(two, task(channels=[{"name": each} for each in "xyz"]))
        with pytest.raises(ScanTooLarge, match=r"spacing of 0.02 x 0.02 x 0.02 mm.*send a part"):
            prepare_volume(scan(np.zeros((64, 64, 64), np.uint8)), task(geometry={"spacing": [0.02] * 3}))


class TestNormalisation:
    def normalised(self, values: NDArray[Any], **normalisation: Any) -> NDArray[np.float32]:
        own = task(geometry={"spacing": None}, normalisation=normalisation)
        return prepare_volume(scan(values), own).volume[0]

    @pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.float64])
    def test_statistics_are_numpys(self, dtype: type) -> None:
        values = (blobs((19, 14, 16)) * 2).astype(dtype)
        values[:6] = 0
        wide = values.astype(np.float64)
        low, high = np.percentile(wide, (2, 97.5))
        clipped = wide.clip(low, high)
        np.testing.assert_allclose(
            self.normalised(values, percentiles=[2, 97.5]),
            (clipped - clipped.mean()) / clipped.std(),
            atol=1e-5,
        )
        windowed = wide.clip(20, 60)
        np.testing.assert_allclose(
            self.normalised(values, window=[20, 60], method="minmax"),
            (windowed - windowed.min()) / np.ptp(windowed),
            atol=1e-6,
        )
        np.testing.assert_allclose(
            self.normalised(values, window=[20, 60], method="fixed", mean=40, std=8),
            (windowed - 40) / 8,
            atol=1e-5,
        )

    @pytest.mark.parametrize("dtype", [np.int16, np.float32])
    def test_of_non_zero_voxels_zeros_stay(self, dtype: type) -> None:
        values = (blobs((19, 14, 16)) * 2).astype(dtype)
        values[:6] = 0
        inside = values[values != 0].astype(np.float64)
        found = self.normalised(values, within="nonzero")
        assert (found[values == 0] == 0).all()
        np.testing.assert_allclose(found[values != 0], (inside - inside.mean()) / inside.std(), atol=1e-5)

    @pytest.mark.parametrize("dtype", [np.int16, np.float32])
    def test_of_the_region_holes_count_and_the_outside_is_zero(self, dtype: type) -> None:
        values = np.zeros((12, 12, 12), dtype)
        values[2:10, 2:10, 2:10] = (blobs((8, 8, 8)) * 4).astype(dtype) + 1
        values[5, 5, 5] = 0
        inside = values[2:10, 2:10, 2:10].astype(np.float64)
        found = self.normalised(values, within="region")
        expected = (inside - inside.mean()) / inside.std()
        np.testing.assert_allclose(found[2:10, 2:10, 2:10], expected, atol=1e-5)
        assert (found[:2] == 0).all()
        assert found[5, 5, 5] != 0

    @pytest.mark.parametrize("dtype", [np.int16, np.float32])
    def test_steps_are_monais_in_their_order(self, dtype: type) -> None:
        import torch
        from monai.transforms.intensity.array import (
            NormalizeIntensity,
            ScaleIntensity,
            ScaleIntensityRange,
            ScaleIntensityRangePercentiles,
        )

        values = (blobs((19, 14, 16)) * 2).astype(dtype)
        steps = [
            {"step": "rescale", "window": [20, 160], "to": [0, 2], "clip": True},
            {"step": "zscore", "within": "nonzero"},
            {"step": "rescale", "percentiles": [5, 95], "to": [-1, 1]},
            {"step": "rescale", "to": [0, 1]},
        ]
        expected: Any = torch.from_numpy(values.astype(np.float32))[None]
        for transform in (
            ScaleIntensityRange(20, 160, 0, 2, clip=True),
            NormalizeIntensity(nonzero=True),
            ScaleIntensityRangePercentiles(5, 95, -1, 1),
            ScaleIntensity(),
        ):
            expected = transform(expected)
        found = self.normalised(values, steps=steps)
        np.testing.assert_allclose(found, np.asarray(expected)[0], atol=1e-5)

    def test_after_resampling_the_statistics_are_of_what_the_network_sees(self) -> None:
        values = blobs((19, 14, 16))
        for when in ("before", "after"):
            own = task(geometry={"normalise": when}, normalisation={"method": "zscore"})
            found = prepare_volume(scan(values), own).volume
            assert (abs(float(found.std()) - 1) < 1e-5) == (when == "after")

    def test_constant_and_empty_volumes_become_zeros(self) -> None:
        for value in (0, 7):
            constant = np.full((9, 9, 9), value, np.float32)
            assert (self.normalised(constant) == 0).all()
            assert (self.normalised(constant, method="minmax") == 0).all()
        assert (self.normalised(np.zeros((9, 9, 9), np.int16), within="nonzero") == 0).all()

    def test_each_channel_has_its_own(self) -> None:
        values = np.stack([blobs((10, 11, 12), seed) for seed in range(2)], axis=-1)
        own = task(
            geometry={"spacing": None},
            channels=[
                {"name": "ct", "normalisation": {"method": "none", "window": [40, 60]}},
                {"name": "pet"},
            ],
            stacked=True,
        )
        ct, pet = prepare_volume(scan(values), own).volume
        np.testing.assert_allclose(ct, values[..., 0].clip(40, 60))
        assert float(pet.mean()) == pytest.approx(0, abs=1e-5)


class TestTheWayBack:
    @pytest.mark.parametrize("spacing", [(2, 2, 2), (0.9, 1.2, 3.5), (3.1, 2.2, 0.7)])
    @pytest.mark.parametrize("degrees", [0, 25])
    def test_a_mask_comes_back_to_the_files_grid_in_every_orientation(
        self, spacing: tuple[float, float, float], degrees: float
    ) -> None:
        own = task()
        shape = [int(40 // mm) for mm in spacing]
        place = [np.arange(side) * mm for side, mm in zip(shape, spacing, strict=True)]
        x, y, z = np.meshgrid(*place, indexing="ij")
        # Two balls off the middle, so every axis has a direction.
        truth = np.where((x - 12) ** 2 + (y - 22) ** 2 + (z - 18) ** 2 < 81, 1, 0)
        truth = np.where((x - 28) ** 2 + (y - 14) ** 2 + (z - 24) ** 2 < 64, 2, truth).astype(np.uint8)
        affine = oblique(spacing, degrees)
        for orientation in orientations():
            mask, own_affine = stored(truth, affine, orientation)
            prepared = prepare_volume(scan(mask.astype(np.int16), own_affine), own)
            classes = prepare_volume_mask(scan(mask, own_affine), own, prepared.grid)
            assert classes.shape == prepared.volume.shape[1:]
            outputs = np.stack([classes == label for label in range(3)]).astype(np.float32)
            for axis in range(3):
                back = restored(prepared, own, outputs, axis)
                assert back.shape == mask.shape
                for label in (1, 2):
                    both = ((back == label) & (mask == label)).sum()
                    assert 2 * both / ((back == label).sum() + (mask == label).sum()) > 0.9

    @pytest.mark.parametrize("rule", ["linear", "monai"])
    @pytest.mark.parametrize("restore", ["probabilities", "logits"])
    @pytest.mark.parametrize("regions", [False, True])
    def test_planes_give_what_the_whole_volume_gives(self, rule: str, restore: str, regions: bool) -> None:
        labels = {"whole": [1, 2], "core": [2]} if regions else {"a": [1], "b": [2]}
        own = task(
            labels=labels,
            regions=list(labels) if regions else [],
            geometry={"restore": restore, "resampling": rule},
        )
        affine = np.diag([0.9, 1.2, 3.5, 1])
        prepared = prepare_volume(scan(blobs((23, 20, 11)), affine), own)
        logits = np.random.default_rng(4).normal(size=(own.out_channels, *prepared.volume.shape[1:])) * 3
        logits = logits.astype(np.float32)
        probabilities = as_probabilities(logits, regions=regions)
        values = probabilities if restore == "probabilities" else as_logits(probabilities, regions=regions)
        # The same interpolation by scipy, of the whole volume.
        grid = np.meshgrid(*[axis.in_network() for axis in prepared.grid.axes], indexing="ij")
        whole = np.stack([ndimage.map_coordinates(each, grid, order=1, mode="nearest") for each in values])
        if regions:
            expected = own.classes_of_regions(whole > (0.5 if restore == "probabilities" else 0))
        else:
            expected = whole.argmax(axis=0)
        for axis, kind in itertools.product(range(3), ("probabilities", "logits")):
            given = probabilities if kind == "probabilities" else logits
            found = restored(prepared, own, given, axis, kind=kind)
            # scipy computes in float64: a tie may be decided differently.
            assert (found != expected).mean() < 1e-3

    def test_labels_are_taken_by_the_nearest_voxel(self) -> None:
        own = task(geometry={"restore": "labels"})
        prepared = prepare_volume(scan(blobs((20, 20, 20))), own)
        outputs = np.random.default_rng(5).random((3, 10, 10, 10), dtype=np.float32)
        expected = outputs.argmax(axis=0).repeat(2, 0).repeat(2, 1).repeat(2, 2)
        for axis in range(3):
            np.testing.assert_array_equal(restored(prepared, own, outputs, axis), expected)

    def test_a_map_of_percents_is_interpolated(self) -> None:
        prepared = prepare_volume(scan(blobs((8, 8, 4)), np.diag([2.0, 2, 4, 1])), task())
        ramp = np.broadcast_to(np.linspace(0, 1, 8, dtype=np.float32), (8, 8, 8))
        restorer = PercentVolumeRestorer(prepared.grid, 1)
        for plane in np.moveaxis(ramp, 1, 0):
            restorer.add(plane)
        expected = np.rint(100 * (ramp[0, 0].reshape(4, 2).mean(axis=1)))
        np.testing.assert_array_equal(restorer.finish()[3, 5], expected)

    def test_missing_surplus_and_misshapen_planes_are_refused(self) -> None:
        prepared = prepare_volume(scan(blobs((20, 20, 20))), task())
        restorer = VolumeRestorer(prepared.grid, task())
        with pytest.raises(ValueError, match=r"expected 10 planes \[K, 10, 10\], found \[3, 9, 10\]"):
            restorer.add(np.zeros((3, 9, 10), np.float32))
        restorer.add(np.zeros((3, 10, 10), np.float32))
        with pytest.raises(ValueError, match="expected 10 planes, found 1"):
            restorer.finish()
        for _ in range(9):
            restorer.add(np.zeros((3, 10, 10), np.float32))
        with pytest.raises(ValueError, match="as plane 11"):
            restorer.add(np.zeros((3, 10, 10), np.float32))

    def test_logits_and_probabilities_are_each_others_inverse(self) -> None:
        logits = np.random.default_rng(6).normal(size=(3, 50)).astype(np.float32) * 5
        sigmoids = as_logits(as_probabilities(logits, regions=True), regions=True)
        np.testing.assert_allclose(sigmoids, logits, atol=0.2, rtol=1e-3)
        back = as_logits(as_probabilities(logits, regions=False), regions=False)
        np.testing.assert_allclose(back - back[0], logits - logits[0], atol=1e-3)
        extremes = np.array([[0.0], [1.0]], np.float32)
        assert np.isfinite(as_logits(extremes, regions=True)).all()


class TestMasks:
    def test_a_mask_on_another_grid_and_values_outside_the_task_are_refused(self) -> None:
        prepared = prepare_volume(scan(blobs((20, 20, 20))), task())
        with pytest.raises(MaskMismatch, match="the mask has 20 x 20 x 19 voxels"):
            prepare_volume_mask(scan(np.zeros((20, 20, 19), np.uint8)), task(), prepared.grid)
        with pytest.raises(TaskError, match="does not name: 9"):
            prepare_volume_mask(scan(np.full((20, 20, 20), 9, np.uint8)), task(), prepared.grid)


class TestSeveralFiles:
    def two(self) -> Task:
        return task(channels=[{"name": "T1"}, {"name": "FLAIR"}])

    def test_channels_are_joined_by_name_in_the_tasks_order(self) -> None:
        t1, flair = scan(blobs((9, 10, 11))), scan(blobs((9, 10, 11), 1))
        joined = join_channels({"flair": flair, "T1": t1}, self.two())
        assert joined.channel_names == ("flair", "T1")
        own = self.two().model_copy(update={"geometry": task(geometry={"spacing": None}).geometry})
        prepared = prepare_volume(joined, own).volume
        for found, channel in zip(prepared, (t1, flair), strict=True):
            expected = channel.voxels[..., 0]
            np.testing.assert_allclose(found, (expected - expected.mean()) / expected.std(), atol=1e-4)
        by_number = join_channels({"case_0001": flair, "case_0000": t1}, own)
        np.testing.assert_array_equal(prepare_volume(by_number, own).volume, prepared)

    def test_a_missing_an_unknown_and_a_colour_channel_are_named(self) -> None:
        one = scan(blobs((9, 10, 11)))
        with pytest.raises(ScanMismatch, match="expects the channels T1, FLAIR, and FLAIR is missing"):
            join_channels({"T1": one}, self.two())
        with pytest.raises(ScanMismatch, match="found t2 too"):
            join_channels({"T1": one, "FLAIR": one, "t2": one}, self.two())
        with pytest.raises(ScanMismatch, match=r"channel FLAIR: expected a volume.*3 values per voxel"):
            join_channels({"T1": one, "FLAIR": scan(np.zeros((9, 10, 11, 3)))}, self.two())

    def test_channels_on_other_grids_are_refused_and_never_resampled(self) -> None:
        one = scan(blobs((9, 10, 11)))
        with pytest.raises(ScanMismatch, match="FLAIR is not on the grid of channel T1: it has 9 x 10 x 12"):
            join_channels({"T1": one, "FLAIR": scan(blobs((9, 10, 12)))}, self.two())
        moved = np.eye(4)
        moved[0, 3] = 0.4
        with pytest.raises(ScanMismatch, match=r"a voxel 0.4 mm apart\. Channels must share one grid"):
            join_channels({"T1": one, "FLAIR": replace(one, affine=moved)}, self.two())
        moved[0, 3] = 0.001
        join_channels({"T1": one, "FLAIR": replace(one, affine=moved)}, self.two())
