"""Registry of scan formats, and decoding of a registered format with several files."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model_store.errors import DamagedScan, ScanTooLarge, UnsupportedScan
from model_store.preprocessing import prepare, restore
from model_store.scan import Limits, decode, encode_nifti, encode_nrrd, encode_png, list_formats, strip_suffix
from model_store.scans import channels, formats
from model_store.scans.channels import packed
from model_store.scans.dicom.files import zip_of
from model_store.task import Normalisation, Task
from tests.helpers.model_store import dicom_files
from tests.helpers.model_store.png_stack import PNG_STACK, slices, zipped
from tests.helpers.model_store.scan_files import metaimage, nifti1, tiff

DOCS = Path(__file__).parents[4] / "docs"
TASK = Task(name="t", labels={"x": (1,)}, size=(16, 16), normalisation=Normalisation(method="none"))


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the test format; change nothing else."""
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, PNG_STACK))


@pytest.fixture
def volume() -> NDArray[np.uint8]:
    """[16, 16, 9] with bright and dark voxels."""
    drawn = np.random.default_rng(5).integers(0, 2, (16, 16, 9))
    return np.where(drawn == 1, 200, 20).astype(np.uint8)


GREY = np.arange(400, dtype=np.uint8).reshape(20, 20)
CUBE = np.arange(8 * 9 * 4, dtype=np.int16).reshape(8, 9, 4)


def pillow(kind: str) -> bytes:
    content = io.BytesIO()
    Image.fromarray(GREY).save(content, kind)
    return content.getvalue()


FILES = {
    "png": (pillow("PNG"), encode_png(GREY)),
    "tiff": (pillow("TIFF"), tiff(GREY, "<"), tiff(GREY, ">")),
    "dicom": (dicom_files.image(GREY), dicom_files.zipped(dicom_files.series(CUBE.transpose(2, 0, 1)))),
    "nrrd": (
        encode_nrrd(CUBE.astype(np.uint8), np.eye(4)),
        encode_nrrd(CUBE.astype(np.uint8), np.eye(4), compress=False),
    ),
    "analyze": (zip_of((nifti1(CUBE, magic=b"ni1\0", vox_offset=0.0)[:348], CUBE.tobytes(order="F"))),),
    "metaimage": (metaimage(CUBE), metaimage(CUBE)[len("ObjectType = Image\n") :]),
    "nifti": (nifti1(CUBE, "<"), nifti1(CUBE, ">"), encode_nifti(CUBE.astype(np.uint8), np.eye(4))),
}


class TestRegistry:
    def test_format_names_labels_and_suffixes_are_unique(self) -> None:
        names = [known.name for known in formats.FORMATS]
        suffixes = [suffix for known in formats.FORMATS for suffix in known.suffixes]
        labels = [label for known in formats.FORMATS for label in known.labels]
        for values in (names, suffixes, labels):
            assert len(set(values)) == len(values)
        # The database column that stores the name has 16 characters.
        assert all(0 < len(name) <= 16 for name in names)
        assert all(suffix.startswith(".") and suffix == suffix.lower() for suffix in suffixes)

    @pytest.mark.parametrize("name", FILES)
    def test_each_sample_file_is_accepted_by_exactly_one_format(self, name: str) -> None:
        for content in FILES[name]:
            assert [known.name for known in formats.FORMATS if known.sniff(content)] == [name]
            assert not channels.sniff(content)
            assert decode(content).format == name

    def test_a_zip_of_channels_is_of_no_format(self) -> None:
        content = packed({"a": [nifti1(CUBE, "<")], "b": [nifti1(CUBE, ">")]})
        assert formats.format_of(content) is None
        assert decode(content).format == "channels"

    def test_every_registered_format_has_sample_files_here(self) -> None:
        assert set(FILES) == {known.name for known in formats.FORMATS}

    @pytest.mark.parametrize("content", [files[0] for files in FILES.values()])
    def test_dicom_with_another_signature_in_its_preamble_is_dicom(self, content: bytes) -> None:
        dicom = content[:128].ljust(128, b"\0") + FILES["dicom"][0][128:]
        assert [known.name for known in formats.FORMATS if known.sniff(dicom)] == ["dicom"]
        np.testing.assert_array_equal(decode(dicom).voxels[..., 0], GREY)

    @pytest.mark.parametrize("content", [b"", b"\x89", b"II", b"PK\x03\x04", bytes(1000), b"\x5c\x01\0"])
    def test_sniffing_short_or_foreign_bytes_accepts_nothing(self, content: bytes, stack: None) -> None:
        assert formats.format_of(content) is None
        assert formats.series_of([content]) is None

    @pytest.mark.parametrize(
        ("name", "stem"),
        [
            ("a.nii.gz", "a"),
            ("a.b.NII", "a.b"),
            ("A.Png", "A"),
            ("a.tif", "a"),
            ("a.tiff", "a"),
            ("a.png.nii", "a.png"),
            ("a.gz", "a.gz"),
            ("a.seg.nrrd", "a"),
            ("a.MHA", "a"),
            ("a.hdr.gz", "a"),
            ("a.zip", "a"),
            ("a.DCM", "a"),
            ("png", "png"),
            (".nii.gz", ""),
        ],
    )
    def test_strip_suffix_removes_the_longest_known_suffix(self, name: str, stem: str) -> None:
        assert strip_suffix(name) == stem

    def test_first_registered_format_that_accepts_the_bytes_reads_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (png, *_) = formats.FORMATS
        other = replace(
            png, name="other", read=lambda data, limits: replace(png.read(data, limits), format="other")
        )
        for order, expected in (((png, other), "png"), ((other, png), "other")):
            monkeypatch.setattr(formats, "FORMATS", order)
            assert decode(FILES["png"][0]).format == expected

    def test_list_formats_joins_labels_in_registration_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert (
            list_formats("or")
            == "PNG, TIFF, .nii, .nii.gz, .nrrd, .mha, ANALYZE (.hdr with its .img) or DICOM (.dcm, or a "
            ".zip of a series)"
        )
        monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, PNG_STACK))
        assert list_formats("and") == (
            "PNG, TIFF, .nii, .nii.gz, .nrrd, .mha, ANALYZE (.hdr with its .img), DICOM (.dcm, or a .zip "
            "of a series) and a zip of PNG slices"
        )

    @pytest.mark.parametrize("page", ["reference/http-api.md", "reference/task.md"])
    def test_documentation_page_lists_every_format(self, page: str) -> None:
        assert list_formats("or") in (DOCS / page).read_text(encoding="utf-8").replace("`", "")


class TestFormatOfSeveralFiles:
    def test_unregistered_format_is_rejected(self, volume: NDArray[np.uint8]) -> None:
        files = slices(volume)
        with pytest.raises(UnsupportedScan, match="ZIP"):
            decode(zipped(files))
        with pytest.raises(UnsupportedScan):
            decode(files)

    @pytest.mark.usefixtures("stack")
    def test_zip_and_loose_files_decode_to_one_volume_and_restore_its_mask(
        self, volume: NDArray[np.uint8]
    ) -> None:
        files = slices(volume)
        for content in (zipped(files), files, dict(reversed(files.items()))):
            scan = decode(content)
            assert (scan.format, scan.is_volume, scan.grid) == ("png-stack", True, volume.shape)
            np.testing.assert_array_equal(scan.voxels[..., 0], volume)
            prepared = prepare(scan, TASK)
            assert prepared.slices.shape == (9, 1, 16, 16)
            bright = (prepared.slices[:, 0] > 100).astype(np.float32)
            mask = restore(np.stack([1 - bright, bright], axis=1), prepared.geometry)
            np.testing.assert_array_equal(mask, volume == 200)

    @pytest.mark.usefixtures("stack")
    def test_png_stack_prepares_to_the_same_slices_as_nifti(self, volume: NDArray[np.uint8]) -> None:
        stacked = prepare(decode(zipped(slices(volume))), TASK)
        single = prepare(decode(encode_nifti(volume, np.eye(4))), TASK)
        np.testing.assert_array_equal(stacked.slices, single.slices)

    @pytest.mark.usefixtures("stack")
    @pytest.mark.parametrize(
        ("pack", "limits"),
        [
            *((pack, Limits(max_bytes=500)) for pack in (zipped, dict)),
            *((pack, Limits(max_pixels=16 * 16 - 1)) for pack in (zipped, dict)),
            *((pack, Limits(max_voxels=16 * 16 * 9 - 1)) for pack in (zipped, dict)),
            (zipped, Limits(max_decompressed=500)),
        ],
    )
    def test_reader_enforces_every_limit(
        self,
        pack: Callable[[dict[str, bytes]], bytes | dict[str, bytes]],
        limits: Limits,
        volume: NDArray[np.uint8],
    ) -> None:
        content = pack(slices(volume))
        assert decode(content, Limits()).grid == volume.shape
        with pytest.raises(ScanTooLarge):
            decode(content, limits)

    @pytest.mark.usefixtures("stack")
    def test_a_damaged_zip_is_rejected(self, volume: NDArray[np.uint8]) -> None:
        content = bytearray(zipped(slices(volume)))
        content[60] ^= 0xFF
        with pytest.raises(DamagedScan, match="unpacked"):
            decode(bytes(content))

    @pytest.mark.usefixtures("stack")
    def test_a_stray_file_is_rejected_by_name(self, volume: NDArray[np.uint8]) -> None:
        with pytest.raises(DamagedScan, match=r"notes\.txt"):
            decode({**slices(volume), "notes.txt": b"slices of the left hip"})

    @pytest.mark.usefixtures("stack")
    def test_unknown_or_empty_files_are_rejected(self) -> None:
        with pytest.raises(UnsupportedScan, match="JPEG"):
            decode({"a.png": b"\xff\xd8\xff\xe0" + bytes(100)})
        for empty in ({}, {"a.png": b""}):
            with pytest.raises(DamagedScan, match="0 bytes"):
                decode(empty)
