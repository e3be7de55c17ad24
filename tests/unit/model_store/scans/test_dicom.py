"""DICOM series, enhanced files and single images, against SimpleITK and by hand."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
import zlib
from base64 import b85decode
from pathlib import Path
from typing import Any

import gdcm
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.data import get_testdata_file
from pydicom.dataelem import RawDataElement
from pydicom.encaps import encapsulate
from pydicom.pixels import apply_modality_lut, compress
from pydicom.tag import Tag
from pydicom.uid import (
    HTJ2K,
    MPEG2MPML,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    HTJ2KLossless,
    HTJ2KLosslessRPCL,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLSLossless,
    RLELossless,
    SecondaryCaptureImageStorage,
)

from model_store.errors import (
    DamagedScan,
    MaskMismatch,
    ScanError,
    ScanMismatch,
    ScanTooLarge,
    UnsupportedScan,
)
from model_store.preprocessing import align, prepare
from model_store.scan import (
    Limits,
    Note,
    choose_series,
    decode,
    decode_mask,
    deidentify,
    encode_nifti,
    encode_nrrd,
)
from model_store.scans.channels import packed
from model_store.scans.dicom import files as dicom_files
from model_store.task import Task
from tests.helpers.model_store.dicom_files import (
    PLANES,
    enhanced,
    header,
    image,
    reconstruction,
    rtstruct,
    seg,
    series,
    squares,
    tilted,
    turned,
    uid,
    written,
    zipped,
)

RNG = np.random.default_rng(7)
VOLUME = RNG.integers(-900, 1900, (6, 12, 10)).astype(np.int16)
UNCOMPRESSED = (
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    ExplicitVRBigEndian,
    DeflatedExplicitVRLittleEndian,
)


# (7 row² + 13 column) mod 4096 of 16 x 12 pixels, reversibly, by OpenJPH: no decoder here can write HTJ2K.
CODED_BY_OPENJPH = (
    "|4;u>04YEK0000C0000G00000000000000C0000G0000000000009pH0sl|{2mk^A000XAQUDA90ssL31q1{@0sm"
    "Y86Cj9?kdTm&kdTm&kdTmwh=~7W02crOPjF>!N>E53R%LP^FfKASE;BCwkN^q*00000o&W*=lfVEbpZx^~bN~Rr0"
    "206e69C)+2Xp`i{Q`${0KfneKmZj$?JIKt-|+Mep8f$wv;e>W6%YUgrZ~p<m*5L^0QbJ{y*GT`@Oi`M003tkkomX"
    "(zyK=X02fw>h=_>Zr>CdFcL42f+qP}H+qP}n?zU~)Hc&QDHc&QDHc&QD{sI9AKn6cwtiNBZx*IXD0sq+"
)


def by_simpleitk(files: dict[str, bytes], folder: Path) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """[columns, rows, slices] and the affine to RAS, as ITK reads the folder."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder)))
    found = reader.Execute()
    affine = np.eye(4)
    affine[:3, :3] = np.array(found.GetDirection()).reshape(3, 3) * np.array(found.GetSpacing())
    affine[:3, 3] = found.GetOrigin()
    return sitk.GetArrayFromImage(found).transpose(2, 1, 0), np.diag([-1, -1, 1, 1]) @ affine


class TestSeries:
    @pytest.mark.parametrize("plane", [*PLANES.values(), turned()], ids=[*PLANES, "oblique"])
    def test_voxels_and_affine_match_simpleitk(self, plane: tuple[float, ...], tmp_path: Path) -> None:
        files = series(VOLUME, plane, RescaleSlope=2, RescaleIntercept=-1024)
        scan = decode(files)
        expected, affine = by_simpleitk(files, tmp_path)
        np.testing.assert_array_equal(scan.voxels[..., 0], expected)
        np.testing.assert_array_equal(scan.voxels[..., 0], VOLUME.transpose(2, 1, 0).astype(int) * 2 - 1024)
        assert scan.affine is not None
        np.testing.assert_allclose(scan.affine, affine, atol=1e-5)
        assert scan.format == "dicom"
        assert not scan.voxels.flags.writeable

    @pytest.mark.parametrize("plane", ["axial", "sagittal", "coronal"])
    def test_network_gets_the_same_slices_as_from_nifti(self, plane: str, tmp_path: Path) -> None:
        files = series(RNG.integers(0, 99, (11, 12, 10)).astype(np.int16), PLANES[plane])
        (tmp_path / "in").mkdir()
        by_simpleitk(files, tmp_path / "in")
        reader = sitk.ImageSeriesReader()
        reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(tmp_path / "in")))
        sitk.WriteImage(reader.Execute(), str(tmp_path / "scan.nii"))
        task = Task(name="t", labels={"x": (1,)}, size=(16, 16))
        ours = prepare(decode(files), task)
        theirs = prepare(decode((tmp_path / "scan.nii").read_bytes()), task)
        np.testing.assert_array_equal(ours.slices, theirs.slices)

    def test_zip_with_other_files_and_loose_parts_give_the_same_scan(self) -> None:
        files = series(VOLUME)
        packed = zipped({"README.txt": b"viewer", "a/b/autorun.exe": b"MZ", **files})
        for content in (packed, {**files, "notes.txt": b"left hip"}):
            scan = decode(content)
            np.testing.assert_array_equal(scan.voxels, decode(files).voxels)
            assert any("left out" in note.text for note in scan.notes)

    @pytest.mark.parametrize("others", [80, 500])
    def test_images_of_a_patient_cd_follow_its_viewer(self, others: int) -> None:
        directory = pydicom.dcmread(io.BytesIO(image(VOLUME[0].astype(np.uint16))))
        directory.file_meta.MediaStorageSOPClassUID = pydicom.uid.MediaStorageDirectoryStorage
        del directory.Rows, directory.Columns, directory.PixelData
        viewer = {f"VIEWER/{n}.dll": b"MZ" + bytes(200) for n in range(others)}
        files = {"AUTORUN.INF": b"[autorun]", **viewer, "DICOMDIR": written(directory), **series(VOLUME)}
        scan = decode(zipped(files))
        np.testing.assert_array_equal(scan.voxels, decode(series(VOLUME)).voxels)
        assert scan.notes == (Note("files-ignored", f"{others + 2} files without an image were left out"),)

    def test_files_that_are_no_dicom_do_not_count_as_bytes_of_the_scan(self) -> None:
        files = {"VIEWER/big.dll": bytes(2**21), **series(VOLUME)}
        assert decode(zipped(files), Limits(max_decompressed=2**20)).grid == (10, 12, 6)

    @pytest.mark.parametrize("gap", [2.5, -2.5])
    def test_reconstructed_slices_of_nuclear_medicine_lie_where_simpleitk_has_them(
        self, gap: float, tmp_path: Path
    ) -> None:
        content = reconstruction(VOLUME.astype(np.uint16), gap)
        scan = decode(content)
        (tmp_path / "nm.dcm").write_bytes(content)
        read = sitk.ReadImage(str(tmp_path / "nm.dcm"))
        values = sitk.GetArrayFromImage(read)
        assert scan.affine is not None
        to_voxel = np.linalg.inv(scan.affine)
        for k in range(len(VOLUME)):
            x, y, z = read.TransformIndexToPhysicalPoint((3, 5, k))
            i, j, s = np.rint((to_voxel @ [-x, -y, z, 1])[:3]).astype(int)
            assert scan.voxels[i, j, s, 0] == values[k, 5, 3]

    def test_frames_of_a_reconstruction_in_another_order_are_sorted(self) -> None:
        shuffled = [3, 1, 2, 6, 5, 4]
        volume = VOLUME[[number - 1 for number in shuffled]].astype(np.uint16)
        scan = decode(reconstruction(volume, 2.5, SliceVector=shuffled))
        np.testing.assert_array_equal(scan.voxels[..., 0].transpose(2, 1, 0), VOLUME.astype(np.uint16))

    def test_enhanced_file_equals_the_series(self) -> None:
        single, several = decode(enhanced(VOLUME)), decode(series(VOLUME))
        np.testing.assert_array_equal(single.voxels, several.voxels)
        np.testing.assert_allclose(single.affine, several.affine)  # type: ignore[arg-type]

    def test_one_slice_takes_its_thickness_as_spacing(self) -> None:
        scan = decode(next(iter(series(VOLUME[:1], SliceThickness=4.0).values())))
        assert scan.grid == (10, 12, 1)
        assert scan.affine is not None
        np.testing.assert_allclose(scan.affine[:3, 2], [0, 0, 4])
        assert any("thickness" in note.text for note in scan.notes)

    def test_positions_rounded_to_a_tenth_are_even(self) -> None:
        def rounded(dataset: Dataset, place: int) -> None:
            dataset.ImagePositionPatient = [round(float(x), 1) for x in dataset.ImagePositionPatient]

        assert decode(series(VOLUME, turned(8), gap=1.25, change=rounded)).grid == (10, 12, 6)


def study(*numbers: int, **values: Any) -> dict[str, bytes]:
    """A series of `VOLUME` for each number, in which the voxels are that much brighter."""
    return {
        f"{number}/{name}": content
        for number in numbers
        for name, content in series(
            VOLUME + number,
            **{"SeriesNumber": number, "SeriesInstanceUID": f"1.2.3.{number}.9", **values},
        ).items()
    }


def scout(slices: int = 1, **values: Any) -> dict[str, bytes]:
    own = {"SeriesNumber": 99, "SeriesInstanceUID": "1.2.3.99", "FrameOfReferenceUID": uid("its own")}
    own |= {"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"], **values}
    files = series(VOLUME[:slices], PLANES["sagittal"], change=lambda d, _: d.update(own))
    return {f"scout/{name}": content for name, content in files.items()}


class TestTiltedGantry:
    @pytest.mark.parametrize("degrees", [-30, -12, 8, 25])
    def test_every_pixel_lies_where_its_own_slice_says(self, degrees: int) -> None:
        files = tilted(VOLUME, degrees)
        scan = decode(files)
        assert scan.affine is not None
        assert [note.name for note in scan.notes] == ["gantry-tilt"]
        assert f"tilted by {abs(degrees):.1f}°" in scan.notes[0].text
        for content in files.values():
            source = pydicom.dcmread(io.BytesIO(content))
            place = len(VOLUME) - source.InstanceNumber
            np.testing.assert_array_equal(scan.voxels[:, :, place, 0].T, source.pixel_array)
            # PS3.3 C.7.6.2.1.1, equation C.7.6.2.1-1.
            orientation = np.array(source.ImageOrientationPatient, float).reshape(2, 3)
            down, right = source.PixelSpacing
            for column, row in ((0, 0), (9, 0), (0, 11), (9, 11)):
                lps = source.ImagePositionPatient + orientation.T @ [column * right, row * down]
                ras = scan.affine @ [column, row, place, 1]
                np.testing.assert_allclose(ras[:3], lps * [-1, -1, 1], atol=1e-5)
        assert scan.voxel_volume_ml == pytest.approx(0.7 * 0.8 * 2.5 * np.cos(np.radians(degrees)) / 1000)

    def test_a_tilt_within_rounding_is_none(self) -> None:
        assert decode(tilted(VOLUME, 0.4)).notes == ()

    @pytest.mark.parametrize("coding", ["BINARY", "LABELMAP"])
    def test_seg_and_contours_on_tilted_slices_are_the_mask(self, coding: str) -> None:
        files = tilted(VOLUME, 20)
        drawn = (VOLUME > 500).astype(np.uint8)
        drawn[0] = drawn[-1] = drawn[2] = 0
        scan = decode(files)
        mask = align(decode_mask(seg(files, drawn, coding)), scan.grid, scan.affine)
        np.testing.assert_array_equal(mask.voxels[..., 0], drawn.transpose(2, 1, 0))
        contours = rtstruct(files, {"organ": squares(files, drawn == 1)})
        found = decode_mask(contours, scan=scan)
        np.testing.assert_array_equal(found.voxels[..., 0], drawn.transpose(2, 1, 0))

    def test_nifti_and_nrrd_of_the_mask_lie_on_the_slices(self, tmp_path: Path) -> None:
        scan = decode(tilted(VOLUME, 20))
        assert scan.affine is not None
        labels = (scan.voxels[..., 0] > 500).astype(np.uint8)
        content = encode_nifti(labels, scan.affine)
        found = decode(content)
        np.testing.assert_allclose(found.affine, scan.affine, atol=1e-4)
        # A reader that takes the qform would have the slices straight.
        assert found.other_affine is None
        (tmp_path / "mask.nrrd").write_bytes(encode_nrrd(labels, scan.affine))
        by_itk = sitk.ReadImage(str(tmp_path / "mask.nrrd"))
        np.testing.assert_array_equal(sitk.GetArrayFromImage(by_itk).T, labels)
        for index in ((0, 0, 0), (9, 0, 0), (0, 11, 0), (9, 11, 5)):
            ras = (scan.affine @ (*index, 1))[:3]
            lps = by_itk.TransformIndexToPhysicalPoint(index)
            np.testing.assert_allclose(lps, ras * [-1, -1, 1], atol=1e-5)

    def test_it_stays_tilted_without_its_patient(self) -> None:
        content = zipped(tilted(VOLUME, 20))
        before, after = decode(content), decode(deidentify(content, Limits(), b"key"))
        np.testing.assert_array_equal(after.affine, before.affine)
        np.testing.assert_array_equal(after.voxels, before.voxels)


class TestSeveralSeries:
    """A study with several series: the list of them, and the one that is chosen."""

    @pytest.mark.parametrize("chosen", ["4", "004", "1.2.3.4.9", ".4.9", "4.9"])
    def test_chosen_series_is_the_scan_that_it_is_alone(self, chosen: str) -> None:
        upload = zipped({"viewer.exe": b"MZ", **study(3, 4, 14), **scout()})
        found = decode(choose_series(upload, chosen, Limits()))
        alone = decode(zipped(study(4)))
        np.testing.assert_array_equal(found.voxels, alone.voxels)
        np.testing.assert_array_equal(found.affine, alone.affine)  # type: ignore[arg-type]
        assert found.notes == alone.notes == ()

    @pytest.mark.parametrize(
        ("chosen", "message"),
        [
            ("5", r"with number 5 by the option `series`, found 0 among 2: number 3 \(.*\), number 4 \("),
            ("9", "found 0 among 2"),
            (".9", "with this UID by the option `series`, found 2 among 2"),
            ("3.4", "with this UID by the option `series`, found 0"),
            ("2.3.4.9.1", "found 0 among 2: .*; name one by its number, or by its Series Instance UID"),
        ],
    )
    def test_choice_of_none_or_of_several_names_what_is_there(self, chosen: str, message: str) -> None:
        with pytest.raises(UnsupportedScan, match=message) as caught:
            choose_series(zipped(study(3, 4)), chosen, Limits())
        assert "1.2.3" not in str(caught.value)

    def test_number_that_two_series_have_chooses_none(self) -> None:
        other = {f"other/{n}": c for n, c in series(VOLUME, SeriesNumber=3).items()}
        with pytest.raises(UnsupportedScan, match="found 2 among 2"):
            choose_series(zipped({**study(3), **other}), "3", Limits())

    def test_choice_in_an_upload_of_one_series_changes_nothing(self) -> None:
        upload = zipped({"viewer.exe": b"MZ", **study(3)})
        assert choose_series(upload, "3", Limits()) == upload
        single = next(iter(study(3).values()))
        assert choose_series(single, "3", Limits()) == single
        with pytest.raises(UnsupportedScan, match="found 0 among 1: number 3"):
            choose_series(single, "4", Limits())

    def test_series_of_one_image_is_its_file(self) -> None:
        (file,) = scout().values()
        assert choose_series(zipped({**study(3), **scout()}), "99", Limits()) == file

    def test_images_of_several_patients_are_refused_whatever_is_chosen(self) -> None:
        with pytest.raises(UnsupportedScan, match="one patient, found 2 with 6, 6 images"):
            choose_series(zipped({**study(3), **study(4, PatientID="Planted")}), "3", Limits())

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (encode_nifti(VOLUME.astype(np.uint8), np.eye(4)), "this is .nii or .nii.gz: leave it out"),
            (packed({"T1": [*study(3).values()]}), "of its channels: leave it out"),
        ],
        ids=["nifti", "channels"],
    )
    def test_choice_where_there_is_none_is_refused(self, content: bytes, message: str) -> None:
        with pytest.raises(UnsupportedScan, match=message):
            choose_series(content, "3", Limits())
        assert choose_series(content, None, Limits()) is content

    def test_list_is_bounded_in_number_and_in_length(self) -> None:
        text = f"AX T1_mprage {'post ' * 50}"
        files = study(*range(1, 26), SeriesDescription=text, Modality="MR" * 40)
        with pytest.raises(UnsupportedScan) as caught:
            decode(files)
        said = str(caught.value)
        assert (
            "found 25: number 1 (MRMRMRMRMRMRMRMR, 'AX T1 mprage post post post post post', axial, 6 " in said
        )
        assert "number 20 (" in said
        assert "number 21 (" not in said
        assert " and 5 more; choose one by the option `series`" in said

    def test_description_is_quoted_by_known_words_alone(self) -> None:
        text = "Planted^Anna 19610203 t2 tirm FLAIR\x1b[31m\u202e 3mm 1.25mm b1000 Brainard 020361 T1Planted"
        files = study(3, SeriesDescription=text) | study(4, SeriesDescription="Planted", SeriesNumber=None)
        with pytest.raises(UnsupportedScan) as caught:
            decode(files)
        assert "number 3 (CT, 't2 FLAIR 3mm 1.25mm b1000', axial, 6 images of 12 x 10)" in str(caught.value)
        assert "without a number (CT, axial, 6 images of 12 x 10)" in str(caught.value)
        assert not [each for each in ("lanted", "1961", "0203", "rain") if each in str(caught.value)]

    def test_localizers_beside_the_only_volume_are_left_out_and_named(self) -> None:
        found = decode({**scout(3, SeriesDescription="Scout Planted"), **study(4), "readme.txt": b"by hand"})
        np.testing.assert_array_equal(found.voxels, decode(study(4)).voxels)
        (note,) = found.notes
        assert note == Note(
            "files-ignored",
            "1 files without an image were left out; localizers were left out: number 99 (CT, 'Scout', "
            "localizer, sagittal, 3 images of 12 x 10)",
        )
        kept = deidentify(zipped({**scout(3), **study(4)}), Limits(), b"key")
        assert (decode(kept).notes, decode(kept).grid) == ((), found.grid)

    @pytest.mark.parametrize(
        "files",
        [
            {**scout(), **study(3, 4)},
            {**scout(), "one.dcm": next(iter(study(3).values()))},
            {**scout(), **{f"b/{n}": c for n, c in scout(SeriesInstanceUID="1.2").items()}},
        ],
        ids=["two volumes", "one image", "localizers alone"],
    )
    def test_localizers_beside_something_else_are_listed(self, files: dict[str, bytes]) -> None:
        with pytest.raises(
            UnsupportedScan, match=r"one series, found [23]: .*localizer, sagittal, 1 image of"
        ):
            decode(files)

    def test_segmentation_report_and_localizer_beside_a_series_are_left_out(self) -> None:
        files = study(3)
        mask = {"seg.dcm": seg(files, (VOLUME > 500).astype(np.uint8), "BINARY")}
        report = {"sr.dcm": Path(str(get_testdata_file("reportsi.dcm"))).read_bytes()}
        scan = decode(zipped({**scout(), **mask, **report, **files}))
        np.testing.assert_array_equal(scan.voxels, decode(files).voxels)
        (note,) = scan.notes
        assert note.text.startswith("2 files without an image were left out; localizers were left out: ")

    def test_localizer_of_another_patient_is_refused(self) -> None:
        with pytest.raises(UnsupportedScan, match="one patient, found 2"):
            decode({**study(3), **scout(PatientID="Planted")})


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"drop": (2,)}, r"1 slices are missing: .* 2\.50 mm apart, and 5\.00 mm between slices 2 and 3"),
            ({"drop": (2, 3)}, r"2 slices are missing.*7\.50 mm"),
            ({"move": {5: 1.0}}, r"evenly spaced.*2\.50 to 3\.50 mm"),
            ({"move": {1: -2.5}}, r"6 images at 5 positions: 1 slices are there twice"),
            ({"tilt": 3.0}, r"3\.00 mm for 2\.50 mm.*50\.2°, more than a gantry tilts"),
            ({"one": {"ImageOrientationPatient": [0, 1, 0, 0, 0, -1]}}, r"1 of 6 turned.*90\.0°"),
            (
                {"one": {"ImageOrientationPatient": [0, 1, 0, 0, 0, -1], "ImageType": ["A", "LOCALIZER"]}},
                "1 of them localisers",
            ),
            (
                {"one": {"SeriesInstanceUID": uid("other"), "SeriesNumber": 7, "SeriesDescription": "AX T2"}},
                r"one series, found 2: .*, 5 images of 12 x 10\), number 7 \(.*'AX T2', axial, 1 image of",
            ),
            ({"one": {"PatientID": "Planted-other"}}, "one patient, found 2 with 5, 1 images"),
            ({"one": {"StudyInstanceUID": uid("other")}}, "one study, found 2 with 5, 1 images"),
            ({"one": {"FrameOfReferenceUID": uid("other")}}, "one frame of reference, found 2"),
            ({"one": {"SOPClassUID": SecondaryCaptureImageStorage}}, "images of one kind, found 2"),
            ({"one": {"ImagePositionPatient": None}}, "1 of 6 slices have no position"),
            ({"one": {"PixelSpacing": [1.0, 1.0]}}, r"another pixel spacing than 0\.8 x 0\.7"),
            ({"one": {"PhotometricInterpretation": "MONOCHROME1"}}, "different photometric"),
            ({"all": {"ImageType": ["ORIGINAL", "PRIMARY", "M", "MOSAIC"]}}, "mosaic"),
            ({"all": {"ImagePositionPatient": None}}, "6 frames without any position"),
            ({"all": {"PixelSpacing": None}}, "no valid PixelSpacing"),
        ],
    )  # fmt: skip
    def test_series_that_is_no_regular_stack(self, change: dict[str, Any], message: str) -> None:
        def changed(dataset: Dataset, place: int) -> None:
            x, y, z = (float(v) for v in dataset.ImagePositionPatient)
            z += change.get("move", {}).get(place, 0.0)
            dataset.ImagePositionPatient = [x, y + place * change.get("tilt", 0.0), z]
            for keyword, value in {
                **change.get("all", {}),
                **(change.get("one", {}) if place == 3 else {}),
            }.items():
                setattr(dataset, keyword, value)

        files = series(VOLUME, change=changed)
        kept = {n: c for i, (n, c) in enumerate(files.items()) if i not in change.get("drop", ())}
        with pytest.raises(UnsupportedScan, match=message) as caught:
            decode(kept)
        assert "Planted" not in str(caught.value)

    def test_several_echoes_are_named(self) -> None:
        def echo(dataset: Dataset, place: int) -> None:
            dataset.EchoTime = 10 + 20 * (place % 2)
            dataset.ImagePositionPatient = [0, 0, 3.0 * (place // 2)]

        with pytest.raises(UnsupportedScan, match=r"6 images at 3 positions: 2 echo times \(10.*30.* ms\)"):
            decode(series(VOLUME, change=echo))

    def test_the_same_file_twice_is_named(self) -> None:
        files = series(VOLUME)
        with pytest.raises(UnsupportedScan, match="1 files are there more than once"):
            decode({**files, "again.dcm": files["0002.dcm"]})

    def test_film_over_time(self) -> None:
        film = image(VOLUME.astype(np.uint16), NumberOfFrames=6, FrameTime="40")
        with pytest.raises(UnsupportedScan, match=r"6 frames .* film"):
            decode(film)

    def test_frames_of_one_position(self) -> None:
        stacked = enhanced(
            VOLUME, PerFrameFunctionalGroupsSequence=None, ImagePositionPatient=[0.0, 0.0, 0.0]
        )
        with pytest.raises(UnsupportedScan, match="6 frames without any position of their own"):
            decode(stacked)

    def test_sizes_differ(self) -> None:
        other = series(VOLUME[:, :9, :9])
        with pytest.raises(UnsupportedScan, match="12 x 10 and 9 x 9"):
            decode({**series(VOLUME), "x.dcm": other["0001.dcm"]})

    def test_transfer_syntax_without_decoder_is_named(self) -> None:
        content = written(header(VOLUME[0], pydicom.uid.CTImageStorage)).replace(
            b"1.2.840.10008.1.2.1\0", f"{MPEG2MPML}"[:20].encode().ljust(20, b"\0")
        )
        with pytest.raises(UnsupportedScan, match=r"transfer syntax.*gdcmconv --raw"):
            decode(content)

    @pytest.mark.parametrize("name", ["JPGExtended.dcm", "JPEG-lossy.dcm"])
    def test_jpeg_of_12_bits_is_read_and_its_damage_named(self, name: str) -> None:
        path = str(get_testdata_file(name))
        content = Path(path).read_bytes()
        scan = decode(content)
        assert "lossy-pixels" in [note.name for note in scan.notes]
        expected = np.squeeze(sitk.GetArrayFromImage(sitk.ReadImage(path)))
        stored = scan.voxels.squeeze()
        np.testing.assert_array_equal(stored if scan.affine is None else stored.T, expected)
        # A frame without its end is damaged all the same.
        with pytest.raises(DamagedScan, match=r"12 bits in transfer syntax 'JPEG Extended"):
            decode(content.replace(b"\xff\xd9\xff", b"\x01\x02\x03"))

    def test_report_is_no_image(self) -> None:
        with pytest.raises(UnsupportedScan, match=r"no image .Basic Text SR"):
            decode(Path(str(get_testdata_file("reportsi.dcm"))).read_bytes())

    @pytest.mark.parametrize("keyword", ["PixelSpacing", "ImagePositionPatient", "RescaleSlope"])
    def test_decimal_comma_is_refused_by_its_attribute(self, keyword: str) -> None:
        tag = pydicom.tag.Tag(keyword)
        value = b"1,5\\2,5\\3,5 "[: {"PixelSpacing": 7, "RescaleSlope": 3}.get(keyword, 12)]

        def comma(dataset: pydicom.Dataset, place: int) -> None:
            dataset._dict[tag] = RawDataElement(
                tag, "DS", len(value), value, 0, is_implicit_VR=False, is_little_endian=True
            )

        with pytest.raises(DamagedScan, match=f"numbers as {keyword}, found others"):
            decode(series(VOLUME, change=comma))

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (
                image(np.stack([VOLUME[0].astype(np.uint8)] * 4), NumberOfFrames=4, FrameTime=33),
                "a film over time; send one frame as a single image",
            ),
            (
                reconstruction(VOLUME, DetectorVector=[1] * 6, ImageType=["ORIGINAL", "PRIMARY", "TOMO"]),
                "projections or phases of nuclear medicine",
            ),
            (
                reconstruction(VOLUME, SliceVector=[1, 1, 2, 2, 3, 3], DetectorVector=[1] * 6),
                "projections or phases",
            ),
        ],
        ids=["film", "projections", "phases"],
    )
    def test_frames_that_are_no_volume_are_refused_in_words(self, content: bytes, words: str) -> None:
        with pytest.raises(UnsupportedScan, match=words):
            decode(content)


class TestPixels:
    @pytest.mark.parametrize("syntax", [RLELossless, JPEGLSLossless, JPEG2000Lossless])
    def test_lossless_compression_changes_nothing(self, syntax: str) -> None:
        def packed(dataset: Dataset, _place: int) -> None:
            compress(dataset, syntax, generate_instance_uid=False)

        volume = RNG.integers(0, 4000, (3, 64, 72)).astype(np.uint16)
        np.testing.assert_array_equal(
            decode(series(volume, change=packed)).voxels, decode(series(volume)).voxels
        )

    @pytest.mark.parametrize("syntax", ["JPEGLosslessProcess14", "JPEGLosslessProcess14_1"])
    def test_lossless_jpeg_of_gdcm_changes_nothing(self, syntax: str, tmp_path: Path) -> None:
        pixels = RNG.integers(0, 4000, (40, 52)).astype(np.uint16)
        plain = image(pixels, BitsStored=12)
        (tmp_path / "plain.dcm").write_bytes(plain)
        reader, change, writer = gdcm.ImageReader(), gdcm.ImageChangeTransferSyntax(), gdcm.ImageWriter()
        reader.SetFileName(str(tmp_path / "plain.dcm"))
        assert reader.Read()
        change.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, syntax)))
        change.SetInput(reader.GetImage())
        assert change.Change()
        writer.SetFile(reader.GetFile())
        writer.SetImage(change.GetOutput())
        writer.SetFileName(str(tmp_path / "packed.dcm"))
        assert writer.Write()
        packed = (tmp_path / "packed.dcm").read_bytes()
        assert pydicom.dcmread(io.BytesIO(packed)).file_meta.TransferSyntaxUID.is_compressed
        np.testing.assert_array_equal(decode(packed).voxels[..., 0], pixels)

    @pytest.mark.parametrize("syntax", [HTJ2K, HTJ2KLossless, HTJ2KLosslessRPCL])
    def test_htj2k_of_openjph_is_decoded(self, syntax: str) -> None:
        def packed(dataset: Dataset, _place: int) -> None:
            dataset.file_meta.TransferSyntaxUID = syntax
            dataset.PixelData = encapsulate([b85decode(CODED_BY_OPENJPH)])
            dataset["PixelData"].is_undefined_length = True

        row, column = np.mgrid[:16, :12]
        volume = np.stack([(7 * row**2 + 13 * column) % 4096] * 3).astype(np.uint16)
        scan = decode(series(volume, change=packed))
        np.testing.assert_array_equal(scan.voxels[..., 0], volume.transpose(2, 1, 0))

    def test_signed_12_bit_with_an_overlay_in_the_upper_bits(self) -> None:
        stored = (VOLUME[:, :, :] & 0x0FFF).astype(np.uint16) | 0xA000
        scan = decode(series(stored, BitsStored=12, HighBit=11, PixelRepresentation=1))
        expected = ((VOLUME.astype(int) & 0xFFF) ^ 0x800) - 0x800
        np.testing.assert_array_equal(scan.voxels[..., 0], expected.transpose(2, 1, 0))

    def test_fractional_slope_per_slice(self) -> None:
        def own(dataset: Dataset, place: int) -> None:
            dataset.RescaleSlope, dataset.RescaleIntercept = 0.25 + place, -3.5

        scan = decode(series(VOLUME, change=own))
        slopes = 0.25 + np.arange(6)
        expected = VOLUME * slopes[:, None, None] - 3.5
        np.testing.assert_allclose(scan.voxels[..., 0], expected.transpose(2, 1, 0), rtol=1e-6)

    @pytest.mark.parametrize("syntax", UNCOMPRESSED)
    @pytest.mark.parametrize(
        ("pixels", "first", "table"),
        [
            (np.int16, -500, RNG.integers(0, 2**16, 1000)),
            (np.uint16, 300, RNG.integers(0, 2**8, 200)),
            (np.int16, -(2**15), RNG.integers(0, 2**16, 2**16)),
            (np.int16, -(2**14), RNG.integers(0, 2**16, 40_000)),
            (np.uint8, 10, RNG.integers(0, 2**16, 100)),
        ],
    )
    def test_modality_lut_is_applied_in_place_of_the_slope(
        self, pixels: type, first: int, table: NDArray[np.int64], syntax: str
    ) -> None:
        stored = RNG.integers(np.iinfo(pixels).min, np.iinfo(pixels).max, (12, 10), endpoint=True)
        dataset = looked_up(stored.astype(pixels), first, table, syntax, RescaleSlope=2, RescaleIntercept=9)
        expected = table[np.clip(stored - first, 0, len(table) - 1)]
        for content in (dataset, deidentify(dataset, Limits(), b"key")):
            np.testing.assert_array_equal(decode(content).voxels[..., 0], expected)
        if len(table) < 2**15:  # above that, pydicom's own subtraction overflows
            read = pydicom.dcmread(io.BytesIO(dataset))
            by_pydicom = apply_modality_lut(read.pixel_array.astype(np.int32), read)
            np.testing.assert_array_equal(by_pydicom, expected)

    def test_text_of_a_modality_lut_is_removed(self) -> None:
        content = looked_up(VOLUME[0], 0, np.arange(256))
        assert b"Planted table" in content
        assert b"Planted table" not in deidentify(content, Limits(), b"key")

    def test_monochrome1_is_turned_over_behind_the_modality_lut(self) -> None:
        table = RNG.integers(0, 2**16, 256)
        stored = RNG.integers(0, 256, (12, 10)).astype(np.uint8)
        content = looked_up(stored, 0, table, PhotometricInterpretation="MONOCHROME1")
        np.testing.assert_array_equal(decode(content).voxels[..., 0], 65535 - table[stored])

    def test_modality_lut_of_odd_bits_is_rejected(self) -> None:
        content = looked_up(VOLUME[0], 0, np.arange(256), bits=12)
        with pytest.raises(UnsupportedScan, match="Modality LUT of 8 or 16 bits, found 12"):
            decode(content)

    def test_ct_on_16_bits_stays_16_bits(self) -> None:
        volume = (VOLUME + 1024).astype(np.uint16)
        scan = decode(series(volume, RescaleIntercept=-1024))
        assert scan.voxels.dtype == np.int16
        np.testing.assert_array_equal(scan.voxels[..., 0], VOLUME.transpose(2, 1, 0))

    def test_monochrome1_image_is_turned_over_and_a_volume_keeps_its_values(self) -> None:
        pixels = RNG.integers(0, 4000, (14, 11)).astype(np.uint16)
        plain = decode(image(pixels, BitsStored=12)).voxels
        turned_over = decode(image(pixels, BitsStored=12, PhotometricInterpretation="MONOCHROME1")).voxels
        np.testing.assert_array_equal(plain[..., 0], pixels)
        np.testing.assert_array_equal(turned_over[..., 0], 4095 - pixels)
        kept = decode(series(VOLUME, PhotometricInterpretation="MONOCHROME1")).voxels
        np.testing.assert_array_equal(kept, decode(series(VOLUME)).voxels)

    def test_palette_is_read_as_colours(self) -> None:
        pixels = RNG.integers(0, 4, (9, 9)).astype(np.uint8)
        table = RNG.integers(0, 256, (3, 4)).astype(np.uint16)
        values = {"PhotometricInterpretation": "PALETTE COLOR"}
        for colour, entries in zip(("Red", "Green", "Blue"), table, strict=True):
            values[f"{colour}PaletteColorLookupTableDescriptor"] = [4, 0, 16]  # type: ignore[assignment]
            values[f"{colour}PaletteColorLookupTableData"] = (entries << 8).tobytes()  # type: ignore[assignment]
        np.testing.assert_array_equal(decode(image(pixels, **values)).voxels, table.T[pixels])

    def test_palette_gives_a_dark_frame_the_scale_of_its_other_frames(self) -> None:
        values = {"PhotometricInterpretation": "PALETTE COLOR"}
        for colour in ("Red", "Green", "Blue"):
            values[f"{colour}PaletteColorLookupTableDescriptor"] = [2, 0, 16]  # type: ignore[assignment]
            table = np.array([100, 65535], np.uint16).tobytes()
            values[f"{colour}PaletteColorLookupTableData"] = table  # type: ignore[assignment]
        bright = np.zeros((9, 9), np.uint8)
        bright[0, 0] = 1
        assert decode(image(bright, **values)).voxels[5, 5].tolist() == [0, 0, 0]
        assert decode(image(np.zeros((9, 9), np.uint8), **values)).voxels[5, 5].tolist() == [0, 0, 0]

    def test_ybr_is_converted(self) -> None:
        ybr = np.full((8, 8, 3), (76, 85, 255), np.uint8)  # pure red
        values = {"SamplesPerPixel": 3, "PhotometricInterpretation": "YBR_FULL", "PlanarConfiguration": 0}
        assert np.abs(decode(image(ybr, **values)).voxels.astype(int) - (255, 0, 0)).max() <= 2

    @pytest.mark.parametrize(
        "name",
        ["CT_small.dcm", "693_J2KI.dcm", "J2K_pixelrep_mismatch.dcm", "MR_small_RLE.dcm", "MR_small_expb.dcm",
         "SC_rgb_jpeg_dcmtk.dcm", "SC_rgb_dcmtk_+eb+cy+np.dcm", "SC_ybr_full_422_uncompressed.dcm",
         "examples_palette.dcm", "JPEGLSNearLossless_16.dcm", "MR_small_bigendian.dcm"],
    )  # fmt: skip
    def test_sample_of_another_writer_matches_simpleitk(self, name: str) -> None:
        path = Path(str(get_testdata_file(name)))
        scan = decode(path.read_bytes())
        found = sitk.GetArrayFromImage(sitk.ReadImage(str(path)))
        ours = scan.voxels.transpose(2, 1, 0, 3) if scan.is_volume else scan.voxels
        np.testing.assert_array_equal(ours.ravel(), found.ravel())

    def test_burnt_in_text_is_a_warning(self) -> None:
        assert [n.name for n in decode(image(VOLUME[0], BurnedInAnnotation="YES")).notes] == ["burnt-in-text"]


class TestFilm:
    """Ultrasound of several frames: each is answered as the image that it is."""

    FRAMES = RNG.integers(0, 255, (5, 20, 24)).astype(np.uint8)

    def clip(self, **values: Any) -> bytes:
        own = {"NumberOfFrames": len(self.FRAMES), "FrameTime": 33, "Modality": "US", **values}
        return written(header(self.FRAMES, pydicom.uid.UltrasoundMultiFrameImageStorage, **own))

    @pytest.mark.parametrize("values", [{}, {"PixelSpacing": [0.3, 0.2]}])
    def test_each_frame_is_prepared_as_that_image(self, values: dict[str, Any]) -> None:
        content = self.clip(**values)
        scan = decode(content)
        assert (scan.film, scan.voxel_volume_ml) == (True, None)
        assert [note.name for note in scan.notes] == ["film"]
        task = Task(name="t", labels={"x": (1,)}, size=(16, 16))
        prepared = prepare(scan, task)
        assert prepared.geometry.spacing is None
        for pixels, found in zip(self.FRAMES, prepared.slices, strict=True):
            single = prepare(decode(image(pixels)), task)
            np.testing.assert_array_equal(found, single.slices[0])
        cleaned = decode(deidentify(content, Limits(), b"key"))
        np.testing.assert_array_equal(cleaned.voxels, scan.voxels)
        assert cleaned.film

    def test_a_task_of_another_plane_or_of_volumes_refuses_it(self) -> None:
        scan = decode(self.clip())
        with pytest.raises(ScanMismatch, match="is of coronal slices, and the scan is a film"):
            prepare(scan, Task(name="t", labels={"x": (1,)}, size=(16, 16), plane="coronal"))

    def test_more_frames_than_a_film_has_are_refused_before_they_are_read(self) -> None:
        with pytest.raises(ScanTooLarge, match="at most 4096 frames"):
            decode(self.clip(NumberOfFrames=5000))


class TestPadding:
    """-2000 outside of what was measured, in a signed CT; in HU -3024."""

    @pytest.mark.parametrize(
        ("given", "limit", "outside"),
        [
            (-2000, None, [-2000]),
            # As some writers give it: unsigned beside signed pixels.
            (63536, None, [-2000]),
            (-2000, -1500, [-2000, -1700, -1500]),
            (-1500, -2000, [-2000, -1700, -1500]),
        ],
    )
    def test_padding_has_the_darkest_measurement(
        self, given: int, limit: int | None, outside: list[int]
    ) -> None:
        pixels = VOLUME.copy()
        pixels[:, :2] = np.resize(outside, pixels[:, :2].shape)

        def padded(dataset: Dataset, _: int) -> None:
            vr = "SS" if given < 0 else "US"
            dataset.add_new("PixelPaddingValue", vr, given)
            if limit is not None:
                dataset.add_new("PixelPaddingRangeLimit", "SS", limit)

        content = zipped(series(pixels, change=padded, RescaleIntercept=-1024))
        scan = decode(content)
        expected = pixels.transpose(2, 1, 0).astype(int) - 1024
        expected[:, :2] = expected[:, 2:].min()
        np.testing.assert_array_equal(scan.voxels[..., 0], expected)
        assert [note.name for note in scan.notes] == ["padding-replaced"]
        cleaned = decode(deidentify(content, Limits(), b"key"))
        np.testing.assert_array_equal(cleaned.voxels, scan.voxels)

    def test_padding_of_an_inverted_picture_is_dark_too(self) -> None:
        pixels = RNG.integers(10, 200, (12, 10)).astype(np.uint16)
        pixels[0] = 4095
        scan = decode(
            image(
                pixels,
                PhotometricInterpretation="MONOCHROME1",
                BitsStored=12,
                PixelPaddingValue=4095,
            )
        )
        np.testing.assert_array_equal(scan.voxels[1:, :, 0], 4095 - pixels[1:])
        assert (scan.voxels[0] == scan.voxels[1:].min()).all()

    @pytest.mark.parametrize("value", [None, 5000, int(VOLUME[0, 0, 0])])
    def test_a_value_of_no_pixel_or_among_the_others_changes_nothing(self, value: int | None) -> None:
        scan = decode(series(VOLUME, PixelPaddingValue=value))
        np.testing.assert_array_equal(scan.voxels[..., 0], VOLUME.transpose(2, 1, 0))
        assert scan.notes == ()

    def test_what_is_padding_alone_is_left(self) -> None:
        assert decode(series(np.full_like(VOLUME, 7), PixelPaddingValue=7)).voxels.max() == 7


class TestLimits:
    @pytest.mark.parametrize(
        "limits",
        [
            Limits(max_voxels=719),
            Limits(max_pixels=119),
            Limits(max_decompressed=1439),
            Limits(max_bytes=2000),
        ],
    )
    @pytest.mark.parametrize("pack", [dict, zipped, lambda files: enhanced(VOLUME)])
    def test_beyond_a_limit(self, limits: Limits, pack: Any) -> None:
        with pytest.raises(ScanTooLarge):
            decode(pack(series(VOLUME)), limits)

    def test_zip_bomb_is_not_unpacked(self) -> None:
        files = series(VOLUME)
        bomb = zipped({**files, "zeros": files[min(files)] + bytes(2**24)})
        with pytest.raises(ScanTooLarge, match="in the zip"):
            decode(bomb, Limits(max_decompressed=2**20))

    @pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_zip_of_a_method_without_bounded_output_is_rejected_unopened(
        self, method: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        packed = zipped(series(VOLUME), method)
        monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_, **__: pytest.fail("an entry was opened"))
        with pytest.raises(UnsupportedScan, match=f"stored or deflated, found compression method {method}"):
            decode(packed)

    def test_zip_of_too_many_entries_is_rejected_unopened(self, monkeypatch: pytest.MonkeyPatch) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for index in range(9):
                archive.writestr(f"{index}/", b"")
        monkeypatch.setattr(dicom_files, "MOST_FILES", 4)
        monkeypatch.setattr(dicom_files, "_MOST_ENTRIES", 8)
        monkeypatch.setattr(zipfile, "ZipFile", None)
        with pytest.raises(ScanTooLarge, match="expected at most 4 files, found 9"):
            decode(buffer.getvalue())

    def test_zip_entry_is_unpacked_only_as_far_as_announced(self) -> None:
        announced, real = 2**16, 2**26
        packed = bytearray(zipped({"0.dcm": bytes(128) + b"DICM" + bytes(real)}))
        central = packed.index(b"PK\x01\x02")
        packed[central + 24 : central + 28] = announced.to_bytes(4, "little")
        tracemalloc.start()
        try:
            with pytest.raises(DamagedScan, match="cannot be unpacked"):
                decode(bytes(packed))
            assert tracemalloc.get_traced_memory()[1] < real // 8
        finally:
            tracemalloc.stop()

    def test_lack_of_memory_is_not_taken_for_a_zip_without_dicom(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(*_: object, **__: object) -> None:
            raise MemoryError

        packed = zipped(series(VOLUME))
        monkeypatch.setattr(zipfile.ZipExtFile, "read", failing)
        with pytest.raises(MemoryError):
            decode(packed)

    def test_deflated_bomb_is_not_inflated(self) -> None:
        dataset = header(VOLUME[0], pydicom.uid.CTImageStorage)
        dataset.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
        content = written(dataset)
        assert decode(content).grid == (12, 10)
        bomb = content[: end_of_meta(content)] + deflated(bytes(2**24))
        with pytest.raises(ScanTooLarge, match="inflates"):
            decode(bomb, Limits(max_decompressed=2**20))

    @pytest.mark.parametrize("syntax", UNCOMPRESSED)
    @pytest.mark.parametrize(
        "kind", ["items", "items at once", "zeros", "nested", "private", "texts", "tags"]
    )
    def test_header_of_too_many_elements_is_rejected(
        self, kind: str, syntax: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("model_store.scans.dicom.files.MOST_ELEMENTS", 2000)
        assert decode(stuffed(syntax, kind, 1000)).grid == (12, 10)
        with pytest.raises(ScanTooLarge, match="at most 2000 elements"):
            decode(stuffed(syntax, kind, 2001))

    def test_too_many_elements_behind_the_pixels_are_rejected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model_store.scans.dicom.files.MOST_ELEMENTS", 2000)
        behind = stuffing("items at once", 2001, "<", implicit=False)
        with pytest.raises(ScanTooLarge, match="at most 2000 elements"):
            decode(image(VOLUME[0].astype(np.uint16)) + behind)

    def test_elements_of_all_headers_are_counted_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model_store.scans.dicom.files.MOST_ELEMENTS", 300)
        files = series(VOLUME)
        assert decode(files[min(files)]).grid == (10, 12, 1)
        with pytest.raises(ScanTooLarge, match="in all headers"):
            decode(files)

    @pytest.mark.parametrize("syntax", UNCOMPRESSED)
    @pytest.mark.parametrize("kind", ["items", "items at once", "zeros", "nested"])
    def test_file_of_too_many_empty_items_is_rejected(
        self, kind: str, syntax: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("model_store.scans.dicom.files.MOST_ITEMS", 500)
        assert decode(stuffed(syntax, kind, 490)).grid == (12, 10)
        with pytest.raises(ScanTooLarge, match="at most 500 sequence items in a file"):
            decode(stuffed(syntax, kind, 501))

    def test_file_of_more_elements_than_one_may_have_is_rejected(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("model_store.scans.dicom.files.MOST_ELEMENTS_OF_FILE", 2000)
        assert decode(stuffed(UNCOMPRESSED[0], "private", 1000)).grid == (12, 10)
        with pytest.raises(ScanTooLarge, match="2000 in a file"):
            decode(stuffed(UNCOMPRESSED[0], "private", 2001))

    def test_items_of_all_headers_are_counted_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model_store.scans.dicom.files.MOST_ITEMS", 500)
        files = {str(number): stuffed(UNCOMPRESSED[0], "items", 400) for number in range(3)}
        with pytest.raises(ScanTooLarge, match="1000 in all headers"):
            decode(files)

    def test_enhanced_file_of_two_thousand_frames_with_full_headers_is_read(self) -> None:
        dataset = pydicom.dcmread(io.BytesIO(enhanced(np.zeros((2000, 8, 8), np.int16))))
        # With the frame itself and its position, twenty items a frame.
        items = struct.pack("<HHL", 0xFFFE, 0xE000, 0) * 18
        for frame in dataset.PerFrameFunctionalGroupsSequence:
            frame[0x00189114] = RawDataElement(
                Tag(0x00189114), "SQ", len(items), items, 0, is_implicit_VR=False, is_little_endian=True
            )
        assert decode(written(dataset)).grid == (8, 8, 2000)

    def test_contours_of_a_structure_set_do_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model_store.scans.dicom.files.MOST_ELEMENTS", 2000)
        structures = pydicom.dcmread(io.BytesIO(image(VOLUME[0].astype(np.uint16))))
        del structures.Rows, structures.PixelData
        structures.ContourData = [1.5] * 3000
        files = {**series(VOLUME), "structures": written(structures)}
        assert decode(files).notes == (Note("files-ignored", "1 files without an image were left out"),)

    @pytest.mark.parametrize("syntax", [JPEGLSLossless, JPEG2000Lossless])
    def test_frame_larger_than_its_header_is_not_decoded(self, syntax: str) -> None:
        dataset = header(np.zeros((64, 72), np.uint16), pydicom.uid.CTImageStorage)
        compress(dataset, syntax, generate_instance_uid=False)
        dataset.Rows = 63
        with pytest.raises(DamagedScan, match="63 x 72 pixels of 1 samples, its compressed frame 64 x 72"):
            decode(written(dataset))

    def test_header_that_announces_more_than_there_is(self) -> None:
        with pytest.raises(DamagedScan, match=r"6 x 12 x 10 pixels \(1440 bytes\), found 240 bytes"):
            decode(enhanced(VOLUME, PixelData=VOLUME[0].tobytes()))

    @pytest.mark.parametrize("syntax", [RLELossless, JPEGLSLossless])
    def test_more_compressed_frames_than_announced(self, syntax: str) -> None:
        dataset = header(VOLUME[:2], pydicom.uid.CTImageStorage, NumberOfFrames=2)
        compress(dataset, syntax, generate_instance_uid=False)
        dataset.NumberOfFrames = 1
        with pytest.raises(DamagedScan, match="announces 1 frames and has more; send it again"):
            decode(written(dataset))

    def test_damaged_zip_is_rejected(self) -> None:
        content = bytearray(zipped(series(VOLUME), zipfile.ZIP_STORED))
        content[500] ^= 0xFF
        with pytest.raises(DamagedScan, match="cannot be unpacked"):
            decode(bytes(content))


def end_of_meta(content: bytes) -> int:
    stream = io.BytesIO(content)
    stream.seek(132)
    pydicom.filereader.read_dataset(stream, False, True, stop_when=lambda tag, vr, n: tag.group != 2)
    return stream.tell()


def looked_up(
    pixels: NDArray[Any],
    first: int,
    table: NDArray[Any],
    syntax: str = ExplicitVRLittleEndian,
    bits: int = 0,
    **values: Any,
) -> bytes:
    """A single image with a Modality LUT, of 8 bits if its values fit."""
    item = Dataset()
    signed = pixels.dtype.kind == "i"
    # Of 65536 entries, 0 is written.
    count = len(table) % 2**16
    item.add_new(
        "LUTDescriptor", "SS" if signed else "US", [count, first, bits or (8 if table.max() < 256 else 16)]
    )
    item.add_new("LUTData", "OW", table.astype(">u2" if syntax == ExplicitVRBigEndian else "<u2").tobytes())
    item.LUTExplanation = "Planted table"
    dataset = header(pixels, pydicom.uid.CTImageStorage, ModalityLUTSequence=[item], **values)
    dataset.file_meta.TransferSyntaxUID = syntax
    if syntax == ExplicitVRBigEndian and pixels.dtype.itemsize == 2:
        dataset.PixelData = pixels.byteswap().tobytes()
    return written(dataset)


def stuffing(kind: str, count: int, order: str, *, implicit: bool) -> bytes:
    """Elements, items or values that are many and almost empty; `order` as struct has it."""

    def element(group: int, number: int, vr: bytes, value: bytes, length: int | None = None) -> bytes:
        length = len(value) if length is None else length
        tag = struct.pack(f"{order}HH", group, number)
        if implicit:
            return tag + struct.pack(f"{order}L", length) + value
        form = "2sHL" if vr == b"SQ" else "2sH"
        return tag + struct.pack(f"{order}{form}", *((vr, 0) if vr == b"SQ" else (vr,)), length) + value

    def ended(items: bytes) -> bytes:
        return element(0x0008, 0x1140, b"SQ", items, 2**32 - 1) + struct.pack(
            f"{order}HHL", 0xFFFE, 0xE0DD, 0
        )

    items = struct.pack(f"{order}HHL", 0xFFFE, 0xE000, 0) * count
    inner = element(0x0008, 0x1199, b"SQ", items)
    nested = struct.pack(f"{order}HHL", 0xFFFE, 0xE000, len(inner)) + inner
    made = {
        "items": lambda: ended(items),
        "items at once": lambda: element(0x0008, 0x1140, b"SQ", items),
        # pydicom takes them for items without a tag.
        "zeros": lambda: ended(bytes(8 * count)),
        "nested": lambda: element(0x0008, 0x1140, b"SQ", nested),
        "private": lambda: b"".join(element(0x0009, 0x1000 + n, b"LO", b"") for n in range(count)),
        "texts": lambda: element(0x0008, 0x0008, b"CS", b"A" + b"\\A" * count + b" "),
        "tags": lambda: element(0x0028, 0x0009, b"AT", bytes(8 * count)),
    }
    return made[kind]()


def stuffed(syntax: str, kind: str, count: int) -> bytes:
    """A single image with `stuffing` before its pixels."""
    dataset = header(VOLUME[0], pydicom.uid.CTImageStorage)
    dataset.file_meta.TransferSyntaxUID = syntax
    implicit, order = syntax == ImplicitVRLittleEndian, ">" if syntax == ExplicitVRBigEndian else "<"
    pixels = dataset.PixelData
    del dataset.PixelData
    content = written(dataset)
    start = end_of_meta(content)
    body = content[start:]
    if syntax == DeflatedExplicitVRLittleEndian:
        body = zlib.decompress(body, -zlib.MAX_WBITS)
    form, vr = ("L", ()) if implicit else ("2sHL", (b"OW", 0))
    body += stuffing(kind, count, order, implicit=implicit)
    body += struct.pack(f"{order}HH{form}", 0x7FE0, 0x0010, *vr, len(pixels)) + pixels
    return content[:start] + (deflated(body) if syntax == DeflatedExplicitVRLittleEndian else body)


def deflated(body: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


def decode_error(content: bytes) -> type[ScanError] | None:
    try:
        decode(content)
    except ScanError as error:
        return type(error)
    return None


class TestRealFiles:
    def test_mr_series_matches_simpleitk(self, real_data: Path, tmp_path: Path) -> None:
        folder = real_data / "io_samples" / "dicom" / "mr_series"
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        scan = decode(files)
        expected, affine = by_simpleitk(files, tmp_path)
        np.testing.assert_array_equal(scan.voxels[..., 0], expected)
        assert scan.affine is not None
        np.testing.assert_allclose(scan.affine, affine, atol=0.02)

    def test_odd_files_are_read_or_refused_by_name(self, real_data: Path) -> None:
        folder = real_data / "io_samples" / "dicom"
        found = {path.name: decode_error(path.read_bytes()) for path in folder.glob("*.dcm")}
        assert found == {
            "CT_small.dcm": None,
            "JPEG-lossy.dcm": None,
            "MR_small_bigendian.dcm": None,
            "MR_small_jp2klossless.dcm": None,
            "MR_truncated.dcm": DamagedScan,
            "emri_small.dcm": UnsupportedScan,
            "examples_rgb_color.dcm": None,
            "image_dfl.dcm": None,
            "no_meta.dcm": UnsupportedScan,
            "rtstruct.dcm": UnsupportedScan,
        }


class TestMasks:
    @pytest.mark.parametrize("kept", [range(8), (1, 2, 5), (3,), (2, 4), (1, 7), (0, 2, 5), (0, 2, 4, 6)])
    @pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
    def test_seg_with_planes_left_out_is_the_mask_on_the_scan(self, kept: Any, kind: str) -> None:
        files = series(RNG.integers(-900, 1900, (8, 12, 10)).astype(np.int16), turned(8), SliceThickness=2.5)
        scan = decode(files)
        drawn = np.zeros((8, 12, 10), np.uint8)
        drawn[list(kept)] = RNG.integers(0, 3, (len(kept), 12, 10))
        mask = decode_mask(seg(files, drawn, kind))
        found = align(mask, scan.grid, scan.affine)
        np.testing.assert_array_equal(found.voxels[..., 0], drawn.transpose(2, 1, 0))

    @pytest.mark.parametrize("palette", [False, True])
    @pytest.mark.parametrize("syntax", [RLELossless, JPEGLSLossless, JPEG2000Lossless])
    def test_compressed_label_map_is_the_mask_on_the_scan(self, syntax: str, palette: bool) -> None:
        files = series(np.zeros((3, 64, 72), np.int16))
        scan, drawn = decode(files), RNG.integers(0, 3, (3, 64, 72)).astype(np.uint8)
        dataset = pydicom.dcmread(io.BytesIO(seg(files, drawn, "LABELMAP")))
        compress(dataset, syntax, generate_instance_uid=False)
        if palette:
            dataset.PhotometricInterpretation = "PALETTE COLOR"
        found = align(decode_mask(written(dataset)), scan.grid, scan.affine)
        np.testing.assert_array_equal(found.voxels[..., 0], drawn.transpose(2, 1, 0))

    @pytest.mark.parametrize("syntax", [JPEGLSLossless, JPEG2000Lossless])
    def test_frame_of_a_seg_larger_than_its_header_is_not_decoded(self, syntax: str) -> None:
        files = series(np.zeros((3, 64, 72), np.int16))
        dataset = pydicom.dcmread(io.BytesIO(seg(files, np.ones((3, 64, 72), np.uint8), "LABELMAP")))
        compress(dataset, syntax, generate_instance_uid=False)
        dataset.Rows, dataset.Columns = 16, 16
        with pytest.raises(DamagedScan, match="16 x 16 pixels of 1 samples, its compressed frame 64 x 72"):
            decode_mask(written(dataset))

    def test_compressed_bits_of_a_seg_are_rejected(self) -> None:
        dataset = pydicom.dcmread(io.BytesIO(seg(series(VOLUME), np.ones((6, 12, 10), np.uint8), "BINARY")))
        dataset.file_meta.TransferSyntaxUID = JPEG2000Lossless
        dataset.PixelData = encapsulate([dataset.PixelData[:8]] * 6)
        dataset["PixelData"].is_undefined_length = True
        with pytest.raises(UnsupportedScan, match="bits are compressed"):
            decode_mask(written(dataset))

    def test_seg_without_positions_of_its_frames_is_rejected(self) -> None:
        dataset = pydicom.dcmread(io.BytesIO(seg(series(VOLUME), np.ones((6, 12, 10), np.uint8), "LABELMAP")))
        dataset.PerFrameFunctionalGroupsSequence = None
        dataset.ImagePositionPatient = [0.0, 0.0, 0.0]
        with pytest.raises(UnsupportedScan, match="6 frames without any position of their own"):
            decode_mask(written(dataset))

    def test_seg_with_a_frame_without_position_is_rejected(self) -> None:
        files = series(VOLUME, origin=(0.0, 0.0, -12.5))  # the first frame is at 0
        dataset = pydicom.dcmread(io.BytesIO(seg(files, np.ones((6, 12, 10), np.uint8), "LABELMAP")))
        del dataset.PerFrameFunctionalGroupsSequence[5].PlanePositionSequence
        with pytest.raises(UnsupportedScan, match="1 of 6 slices have no position"):
            decode_mask(written(dataset))

    def test_size_that_a_seg_announces_is_checked_before_its_frames(self) -> None:
        dataset = pydicom.dcmread(io.BytesIO(seg(series(VOLUME), np.ones((6, 12, 10), np.uint8), "BINARY")))
        dataset.NumberOfFrames = 10**6
        with pytest.raises(ScanTooLarge, match="1000000 frames of 12 x 10"):
            decode_mask(written(dataset), Limits(max_voxels=10**6))

    def test_seg_is_no_scan(self) -> None:
        files = series(VOLUME)
        drawn = seg(files, np.ones((6, 12, 10), np.uint8), "BINARY")
        with pytest.raises(UnsupportedScan, match="no scan"):
            decode(drawn)
        # In an export of a study, the images are read and the others counted.
        found = decode({**files, "seg.dcm": drawn})
        assert found.grid == decode(files).grid
        assert "1 files without an image" in next(n.text for n in found.notes if n.name == "files-ignored")

    def test_nifti_mask_with_axes_turned_over_is_brought_onto_the_scan(self) -> None:
        scan = decode(series(VOLUME))
        assert scan.affine is not None
        drawn = RNG.integers(0, 3, scan.grid).astype(np.uint8)
        turned_over = drawn[:, ::-1].transpose(2, 0, 1)
        affine = scan.affine @ [[0, 1, 0, 0], [0, 0, -1, 11], [1, 0, 0, 0], [0, 0, 0, 1]]
        mask = decode(encode_nifti(turned_over, affine))
        found = align(mask, scan.grid, scan.affine)
        np.testing.assert_array_equal(found.voxels[..., 0], drawn)

    def test_mask_of_another_place_is_rejected(self) -> None:
        scan = decode(series(VOLUME))
        files = series(VOLUME, origin=(-31.0, 12.5, 400.0))
        mask = decode_mask(seg(files, np.ones((6, 12, 10), np.uint8), "BINARY"))
        with pytest.raises(MaskMismatch, match="mm away"):
            align(mask, scan.grid, scan.affine)


class TestDeidentified:
    @pytest.mark.parametrize(
        "content",
        [
            zipped(series(VOLUME, turned(8), RescaleIntercept=-1000)),
            enhanced(VOLUME),
            image(VOLUME[0].astype(np.uint16), PhotometricInterpretation="MONOCHROME1"),
            reconstruction(VOLUME.astype(np.uint16)),
        ],
        ids=["zip", "enhanced", "image", "SPECT"],
    )
    def test_same_voxels_and_nothing_of_the_patient(self, content: bytes) -> None:
        cleaned = deidentify(content, Limits(), b"key")
        before, after = decode(content), decode(cleaned)
        np.testing.assert_array_equal(before.voxels, after.voxels)
        np.testing.assert_array_equal(before.affine, after.affine)  # type: ignore[arg-type]
        for planted in (b"Planted", b"PLANTED", b"19610203", b"20110405", uid("study"), uid("series")):
            assert (planted if isinstance(planted, bytes) else planted.encode()) not in cleaned
        assert cleaned == deidentify(content, Limits(), b"key")
        assert cleaned != deidentify(content, Limits(), b"another")

    @pytest.mark.parametrize("keyword", ["SOPClassUID", "SOPInstanceUID"])
    def test_file_without_a_uid_that_it_needs_is_named(self, keyword: str) -> None:
        dataset = pydicom.dcmread(io.BytesIO(image(VOLUME[0].astype(np.uint16))))
        delattr(dataset, keyword)
        content = io.BytesIO()
        dataset.save_as(content, enforce_file_format=False)
        assert decode(content.getvalue()).grid == (12, 10)
        with pytest.raises(UnsupportedScan, match=f"expected a {keyword} in every file"):
            deidentify(content.getvalue(), Limits(), b"key")

    def test_real_series(self, real_data: Path) -> None:
        folder = real_data / "io_samples" / "dicom" / "mr_series"
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        cleaned = deidentify(zipped(files), Limits(), b"key")
        np.testing.assert_array_equal(decode(files).voxels, decode(cleaned).voxels)
        names = {str(pydicom.dcmread(io.BytesIO(f)).PatientName) for f in files.values()}
        assert all(name.encode() not in cleaned for name in names if name)
