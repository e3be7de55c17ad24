"""Arrays and files as uploads."""

from __future__ import annotations

import gzip
import hashlib
import io
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from locum.commands.batch import find
from locum.errors import ScanInvalid
from locum.scans import opened, split_name
from model_store.scan import decode
from model_store.scans import channels as channels_of_service
from tests.helpers.model_store.dicom_files import series


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int16, np.int64, np.float16, np.float64])
def test_volume_of_any_type_is_a_nifti_with_its_values(kind: type[np.generic]) -> None:
    voxels = np.arange(24).reshape(2, 3, 4).astype(kind)
    affine = np.diag([1.5, 2.0, 3.0, 1.0])
    with opened(voxels, affine) as upload:
        content = upload.rewound().read()
        assert upload.size == len(content)
        assert upload.sha256 == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert b"".join(upload.pieces()) == content
    image = nib.Nifti1Image.from_bytes(gzip.decompress(content))
    assert np.array_equal(np.asarray(image.dataobj), voxels.astype(np.float64))
    assert np.array_equal(image.affine, affine)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_image_is_a_png_with_its_values(kind: type[np.generic]) -> None:
    pixels = (np.arange(12).reshape(3, 4) * 20).astype(kind)
    with opened(pixels) as upload, Image.open(io.BytesIO(upload.rewound().read())) as image:
        assert np.array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize(
    ("voxels", "affine", "words"),
    [
        (np.zeros((2, 3, 4)), None, "with its `affine`"),
        (np.zeros((2, 3)), np.eye(4), "expected a volume"),
        (np.zeros((2, 3, 4)), np.eye(3), "expected a volume"),
        (np.zeros((2, 3)), None, "uint8 or uint16, found float64"),
    ],
)
def test_array_that_is_no_scan_is_rejected(
    voxels: NDArray[np.float64], affine: NDArray[np.float64] | None, words: str
) -> None:
    with pytest.raises(ScanInvalid, match=words), opened(voxels, affine):
        pass


@pytest.mark.parametrize("names", [("a.hdr", "a.img"), ("A.HDR", "A.IMG"), ("a.hdr.gz", "a.img.gz")])
def test_header_is_sent_with_its_voxels_and_found_once(tmp_path: Path, names: tuple[str, str]) -> None:
    header, voxels = (tmp_path / name for name in names)
    image = nib.Nifti1Pair(np.arange(8 * 9 * 4, dtype=np.int16).reshape(8, 9, 4), np.diag([2.0, 3.0, 4.0, 1]))
    nib.save(image, tmp_path / "b.img")
    for made, wanted in ((tmp_path / "b.hdr", header), (tmp_path / "b.img", voxels)):
        content = made.read_bytes()
        wanted.write_bytes(gzip.compress(content) if wanted.name.endswith(".gz") else content)
        made.unlink()
    assert [(each.path, each.stem) for each in find([str(tmp_path)])] == [(header, names[0][0])]
    with opened(header) as upload:
        found = decode(upload.rewound().read())
    np.testing.assert_array_equal(found.voxels[..., 0], image.get_fdata())
    np.testing.assert_array_equal(found.affine, image.affine)
    voxels.unlink()
    with opened(header) as upload:
        assert upload.name == names[0]


def test_folder_without_dicom_and_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no scan")
    with pytest.raises(ScanInvalid, match="one DICOM series, found none"), opened(tmp_path):
        pass
    with pytest.raises(ScanInvalid, match=r"gone\.nii: .*No such file"), opened(tmp_path / "gone.nii"):
        pass


class TestChannels:
    AFFINE = np.diag([1.5, 2.0, 3.0, 1.0])

    def voxels(self, seed: int) -> NDArray[np.int16]:
        return np.random.default_rng(seed).integers(0, 100, (9, 10, 8)).astype(np.int16)

    def sent(self, channels: dict[str, Any], affine: NDArray[Any] | None = None) -> tuple[Any, str]:
        with opened(channels, affine) as upload:
            return decode(upload.rewound().read()), upload.sha256

    def test_files_images_arrays_and_series_are_channels_of_one_scan(self, tmp_path: Path) -> None:
        image = nib.Nifti1Image(self.voxels(1), self.AFFINE)
        image.to_filename(tmp_path / "t1.nii.gz")
        ways = [
            {"T1": tmp_path / "t1.nii.gz", "FLAIR": self.voxels(2)},
            {"FLAIR": self.voxels(2), "T1": image},
        ]
        for way in ways:
            scan, _ = self.sent(way, self.AFFINE)
            assert scan.channel_names == ("FLAIR", "T1")
            np.testing.assert_array_equal(scan.voxels, np.stack([self.voxels(2), self.voxels(1)], axis=-1))
            np.testing.assert_allclose(scan.affine, self.AFFINE)

    def test_the_digest_depends_on_the_channels_alone(self) -> None:
        one, two = (nib.Nifti1Image(self.voxels(seed), self.AFFINE) for seed in (1, 2))
        assert self.sent({"T1": one, "FLAIR": two})[1] == self.sent({"FLAIR": two, "T1": one})[1]
        assert self.sent({"T1": one, "FLAIR": two})[1] != self.sent({"T1": two, "FLAIR": one})[1]

    def test_folders_of_dicom_are_channels(self, tmp_path: Path) -> None:
        cubes = {name: self.voxels(seed).transpose(2, 1, 0) for name, seed in (("T1", 1), ("FLAIR", 2))}
        for number, (name, cube) in enumerate(cubes.items()):
            (tmp_path / name).mkdir()
            files = series(cube, SeriesInstanceUID=f"1.2.{number}")
            for place, content in enumerate(files.values()):
                (tmp_path / name / str(place)).write_bytes(content)
        scan, _ = self.sent({name: tmp_path / name for name in cubes})
        assert (scan.channel_names, scan.grid) == (("FLAIR", "T1"), (9, 10, 8))

    @pytest.mark.parametrize(
        ("channels", "words"),
        [
            ({}, "found none"),
            ({"T 1": np.zeros((2, 3, 4))}, "channel 'T 1': expected a name of letters"),
            ({"T1": "gone.nii"}, "channel T1: gone.nii: expected a scan"),
            ({"T1": np.zeros((2, 3, 4))}, "channel T1: .*with its `affine`"),
        ],
    )
    def test_what_is_no_channel_is_named(self, channels: dict[str, Any], words: str) -> None:
        with pytest.raises(ScanInvalid, match=words), opened(channels):
            pass

    def test_names_are_read_as_the_service_reads_them(self) -> None:
        names = [
            "T1",
            "t1_flair",
            "x_FLAIR",
            "FLAIR",
            "a_0000",
            "a_0001",
            "a0001",
            "0001",
            "a_0002",
            "a-T1",
            "",
        ]
        for channels in (("T1", "FLAIR"), ("T1",), ("FLAIR", "T1", "T1-FLAIR")):
            assert [split_name(each, channels) for each in names] == [
                channels_of_service.split_name(each, channels) for each in names
            ]
