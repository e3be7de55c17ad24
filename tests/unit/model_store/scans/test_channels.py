"""Scans of several channels: names of files, zips of channels, 4-D NIfTI."""

from __future__ import annotations

import io
import zipfile

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.errors import ScanError, ScanMismatch, ScanTooLarge, UnsupportedScan
from model_store.preprocessing import prepare_volume
from model_store.scan import Limits, decode, deidentify
from model_store.scans.channels import group_cases, packed, split_name
from model_store.task import Task

TASK = Task.model_validate(
    {
        "name": "two",
        "labels": {"a": [1]},
        "geometry": {"patch": [8, 8, 8]},
        "channels": [
            {"name": "T1", "normalisation": {"method": "none"}},
            {"name": "FLAIR", "normalisation": {"method": "none"}},
        ],
    }
)


def nifti(voxels: NDArray[np.generic], shift: float = 0) -> bytes:
    affine = np.diag([1.0, 1, 2, 1])
    affine[0, 3] = shift
    image = nib.Nifti1Image(voxels, affine)
    image.header["descrip"] = b"Doe^Jane"
    return bytes(image.to_bytes())


def volume(value: int, shape: tuple[int, ...] = (9, 10, 11)) -> NDArray[np.int16]:
    return (np.arange(np.prod(shape)).reshape(shape) % 7 + value).astype(np.int16)


def zipped(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("stem", "found"),
    [
        ("BRATS_001_0000", ("BRATS_001", 0)),
        ("BRATS_001_0001", ("BRATS_001", 1)),
        ("0001", ("", 1)),
        ("case_T1", ("case", 0)),
        ("case-flair", ("case", 1)),
        ("FLAIR", ("", 1)),
        ("case_0002", None),
        ("caseT1", None),
        ("patient20001", None),
    ],
)
def test_a_channel_is_named_at_the_end_of_a_files_name(stem: str, found: tuple[str, int] | None) -> None:
    assert split_name(stem, ("T1", "FLAIR")) == found


def test_the_longer_name_is_meant() -> None:
    assert split_name("a_post-T1", ("T1", "post-T1")) == ("a", 1)


def test_files_are_grouped_by_case() -> None:
    stems = ["a_0001", "a_0000", "b_T1", "b_FLAIR", "readme", "a_T1"]
    cases, others = group_cases(stems, ("T1", "FLAIR"))
    assert cases == {"a": {0: "a_0000", 1: "a_0001"}, "b": {0: "b_T1", 1: "b_FLAIR"}}
    assert others == ["readme", "a_T1"]


@pytest.mark.parametrize(
    "names",
    [
        ("T1.nii", "FLAIR.nii"),
        ("case7_t1.nii", "case7-flair.nii"),
        ("x_0000.nii", "x_0001.nii"),
        ("channels/T1.nii", "channels/FLAIR.nii"),
        ("channels/T1/00000", "channels/FLAIR/00000"),
    ],
)
def test_a_zip_of_channels_is_one_scan(names: tuple[str, str]) -> None:
    first, second = volume(1), volume(100)
    content = zipped({"__MACOSX/._T1.nii": b"x", names[1]: nifti(second), names[0]: nifti(first)})
    scan = decode(content)
    assert (scan.format, scan.grid, scan.channels) == ("channels", (9, 10, 11), 2)
    prepared = prepare_volume(scan, TASK).volume
    np.testing.assert_array_equal(prepared[0], first)
    np.testing.assert_array_equal(prepared[1], second)


def test_a_packed_zip_has_the_same_bytes_in_any_order() -> None:
    one, other = nifti(volume(1)), nifti(volume(2))
    content = packed({"T1": [one], "FLAIR": [other]})
    assert content == packed({"FLAIR": [other], "T1": [one]})
    assert decode(content).channel_names == ("FLAIR", "T1")


def test_the_patient_is_removed_from_every_channel() -> None:
    content = packed({"T1": [nifti(volume(1))], "FLAIR": [nifti(volume(2))]})
    assert b"Doe" in content
    cleaned = deidentify(content, Limits(), b"k" * 32)
    assert b"Doe" not in cleaned
    assert deidentify(cleaned, Limits(), b"k" * 32) == cleaned
    before, after = decode(content), decode(cleaned)
    np.testing.assert_array_equal(before.voxels, after.voxels)
    assert before.channel_names == after.channel_names


def test_an_error_names_the_channel() -> None:
    with pytest.raises(ScanError, match=r"channel FLAIR: .*empty"):
        decode(packed({"T1": [nifti(volume(1))], "FLAIR": [b""]}))
    with pytest.raises(ScanMismatch, match=r"channel T1 is not on the grid of channel FLAIR: .*0.5 mm apart"):
        decode(packed({"T1": [nifti(volume(1), 0.5)], "FLAIR": [nifti(volume(1))]}))
    with pytest.raises(ScanMismatch, match="channels T1, FLAIR, and FLAIR is missing"):
        prepare_volume(decode(packed({"T1": [nifti(volume(1))], "T2": [nifti(volume(1))]})), TASK)


def test_channels_together_are_bounded_as_one_scan() -> None:
    content = packed({"T1": [nifti(volume(1))], "FLAIR": [nifti(volume(2))]})
    decode(content, Limits(max_voxels=2 * 990))
    with pytest.raises(ScanTooLarge, match=r"channel T1: .*at most 989 voxels"):
        decode(content, Limits(max_voxels=2 * 990 - 1))
    with pytest.raises(ScanTooLarge, match="at most 4000 bytes of channels"):
        decode(content, Limits(max_decompressed=4000))
    many = {f"c{index}": [nifti(volume(index))] for index in range(17)}
    with pytest.raises(UnsupportedScan, match="at most 16 channels in the zip, found 17"):
        decode(packed(many))


def test_a_4d_file_is_channels_only_where_the_task_says_so() -> None:
    both = np.stack([volume(1), volume(100)], axis=-1)
    stacked = TASK.model_copy(update={"stacked": True})
    with pytest.raises(UnsupportedScan, match="one volume of up to 3 dimensions, found 9 x 10 x 11 x 2"):
        decode(nifti(both))
    with pytest.raises(UnsupportedScan, match="up to 2 channels along the fourth axis, found 9"):
        decode(nifti(np.zeros((9, 10, 11, 3), np.int16)), Limits(max_channels=2))
    scan = decode(nifti(both), Limits(max_channels=2))
    prepared = prepare_volume(scan, stacked).volume
    np.testing.assert_array_equal(prepared, np.moveaxis(both, -1, 0))
    with pytest.raises(ScanMismatch, match="found one file with 2; send one file for each"):
        prepare_volume(scan, TASK)


def test_a_zip_of_other_files_is_no_scan() -> None:
    with pytest.raises(UnsupportedScan, match="ZIP archive without DICOM files"):
        decode(zipped({"a.txt": b"none", "b.txt": b"none"}))
