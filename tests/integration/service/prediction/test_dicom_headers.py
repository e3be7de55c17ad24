"""SEG and report for headers as scanners write them, checked by dciodvfy where it is installed."""

from __future__ import annotations

import io
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import highdicom as hd
import numpy as np
import pydicom
import pytest
from pydicom import Dataset
from pydicom.datadict import dictionary_VR, tag_for_keyword
from pydicom.dataelem import RawDataElement
from pydicom.tag import Tag

from model_store.errors import UnsupportedScan
from model_store.scan import DicomSeries, Limits, open_series
from service.prediction.dicom_rtstruct import encode_rtstruct
from service.prediction.dicom_seg import encode_report, encode_seg
from service.prediction.dicom_source import notes_on
from tests.helpers.model_store.dicom_files import enhanced, header, reconstruction, written
from tests.helpers.service.coded import CODED, RECEIPT, VOLUME, coded_series

CLASSES = (VOLUME.transpose(2, 1, 0) > 100).astype(np.uint8)


def opened(content: Any) -> DicomSeries:
    return open_series(content, Limits())


def answers(series: DicomSeries, classes: Any = CLASSES) -> list[bytes]:
    """The SEG and, for a volume, the report and the RTSTRUCT."""
    if series.affine is None:
        return [encode_seg(series, classes, CODED, RECEIPT)]
    report, seg = encode_report(series, classes, CODED, RECEIPT, {"bright": 1.0}, {"bright": 0.04})
    return [seg, report, encode_rtstruct(series, classes, CODED, RECEIPT)]


def check_by_dciodvfy(contents: list[bytes], folder: Path) -> None:
    """Skip the rest of a test where it is not installed."""
    if shutil.which("dciodvfy") is None:
        pytest.skip("dciodvfy is not installed (apt-get install dicom3tools)")
    path = folder / "made.dcm"
    for content in contents:
        path.write_bytes(content)
        found = subprocess.run(["dciodvfy", "-new", path], capture_output=True, check=False)
        lines = found.stderr.decode(errors="replace").splitlines()
        kinds = ("Segmentation", "ComprehensiveSR", "RTStructureSet")
        assert any(word in line for line in lines for word in kinds)
        assert [line for line in lines if line.startswith("Error")] == []


def raw(keyword: str, value: bytes) -> Callable[[Dataset, int], None]:
    """Write bytes as the value, whatever the standard says of them."""
    tag = Tag(tag_for_keyword(keyword))  # type: ignore[arg-type]

    def change(dataset: Dataset, place: int) -> None:
        dataset._dict[tag] = RawDataElement(
            tag, dictionary_VR(keyword), len(value), value, 0, is_implicit_VR=False, is_little_endian=True
        )

    return change


def named(charset: Any, name: str) -> Callable[[Dataset, int], None]:
    def change(dataset: Dataset, place: int) -> None:
        dataset.SpecificCharacterSet, dataset.PatientName = charset, name

    return change


@pytest.mark.parametrize(
    ("change", "keyword", "expected", "notes"),
    [
        (raw("SpecificCharacterSet", b""), "PatientName", "Planted^Patient", []),
        (raw("SpecificCharacterSet", b"  "), "PatientName", "Planted^Patient", []),
        (named(["", "ISO 2022 IR 87"], "Yamada^Tarou=山田^太郎=やまだ^たろう"), "PatientName", None, []),
        (named(["", "ISO 2022 IR 149"], "Hong^Gildong=洪^吉洞=홍^길동"), "PatientName", None, []),
        (named("GB18030", "Wang^XiaoDong=王^小东"), "PatientName", None, []),
        (named("ISO_IR 192", "Müller^Jürgen"), "PatientName", None, []),
        (named("ISO_IR 100", "Müller^Jürgen"), "PatientName", None, []),
        (raw("SpecificCharacterSet", b"ISO-IR 100"), "SpecificCharacterSet", "ISO_IR 192", []),
        (
            raw("SpecificCharacterSet", b"ISO_IR 999"),
            "PatientName",
            "Planted^Patient",
            ["left-out:SpecificCharacterSet"],
        ),
        (raw("PatientSex", b"U "), "PatientSex", "", ["left-out:PatientSex"]),
        (raw("PatientSex", b"FEMALE"), "PatientSex", "", ["left-out:PatientSex"]),
        (raw("PatientBirthDate", b"19700000"), "PatientBirthDate", "", ["left-out:PatientBirthDate"]),
        (raw("PatientBirthDate", b"unknown "), "PatientBirthDate", "", ["left-out:PatientBirthDate"]),
        (raw("PatientBirthDate", b"1970.01.31"), "PatientBirthDate", "19700131", []),
        (raw("StudyTime", b"12:34:56"), "StudyTime", "123456", []),
        (raw("StudyTime", b"123456.1234567 "), "StudyTime", "123456.123456", []),
        (raw("StudyTime", b"250000"), "StudyTime", "", ["left-out:StudyTime"]),
        (raw("StudyDate", b"20201332"), "StudyDate", "", ["left-out:StudyDate"]),
        (raw("SliceThickness", b"2,5 "), "SliceThickness", None, ["left-out:SliceThickness"]),
        (raw("PatientWeight", b"70,5"), "PatientWeight", None, ["left-out:PatientWeight"]),
        (raw("PatientAge", b"50"), "PatientAge", None, ["left-out:PatientAge"]),
        (raw("StudyDescription", b"A\\B "), "StudyDescription", None, ["left-out:StudyDescription"]),
        (raw("SpacingBetweenSlices", b"2,5 "), "SpacingBetweenSlices", None, []),
        (raw("WindowCenter", b"1,5 "), "WindowCenter", None, []),
        (raw("ContentDate", b"20201332"), "ContentDate", "20110405", []),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_header_that_the_standard_forbids_gets_an_answer(
    change: Callable[[Dataset, int], None],
    keyword: str,
    expected: str | None,
    notes: list[str],
    tmp_path: Path,
) -> None:
    series = opened(coded_series(change=change))
    source = series.headers[0]
    name, identifier = str(source.PatientName), source.PatientID
    made = answers(series)
    for content in made:
        read = pydicom.dcmread(io.BytesIO(content))
        assert (str(read.PatientName), read.PatientID) == (name, identifier)
        if expected is not None:
            own = "StructureSetDate" if keyword not in read and keyword == "ContentDate" else keyword
            assert str(read[own].value or "") == expected
    assert [note.name for note in notes_on(series)] == notes
    # The series itself is left as it was.
    assert str(source.PatientName) == name
    check_by_dciodvfy(made, tmp_path)


@pytest.mark.parametrize("keyword", ["PatientID", "AccessionNumber", "StudyID"])
def test_what_identifies_the_patient_is_copied_as_it_is(keyword: str) -> None:
    series = opened(coded_series(**{keyword: "X" * 80}))
    for content in answers(series):
        assert pydicom.dcmread(io.BytesIO(content))[keyword].value == "X" * 80
    (note,) = notes_on(series)
    assert note.name == f"copied:{keyword}"
    assert keyword in note.text
    assert "X" * 80 not in note.text


def test_class_that_is_not_of_the_standard_is_refused_by_its_attribute() -> None:
    series = opened(coded_series(SOPClassUID="1.3.12.2.1107.5.9.1"))
    with pytest.raises(UnsupportedScan, match="expected a SOPClassUID of the standard"):
        answers(series)


def test_slices_of_slightly_different_orientation_get_an_answer(tmp_path: Path) -> None:
    def turn(dataset: Dataset, place: int) -> None:
        dataset.ImageOrientationPatient = [1, 1e-5 * place, 0, -1e-5 * place, 1, 0]

    check_by_dciodvfy(answers(opened(coded_series(change=turn))), tmp_path)


GREY = VOLUME[0].astype(np.uint16)
COLOUR = np.stack([VOLUME[0].astype(np.uint8)] * 3, axis=-1)
SPATIAL = {"FrameOfReferenceUID": None, "PositionReferenceIndicator": None}
RGB = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0}


@pytest.mark.parametrize(
    ("modality", "sop_class", "pixels", "values"),
    [
        ("CR", "ComputedRadiographyImageStorage", GREY, {**SPATIAL, "PixelSpacing": [0.2, 0.2]}),
        ("DX", "DigitalXRayImageStorageForPresentation", GREY, {}),
        ("MG", "DigitalMammographyXRayImageStorageForPresentation", GREY, SPATIAL),
        ("US", "UltrasoundImageStorage", COLOUR, {**SPATIAL, **RGB}),
        ("US", "UltrasoundMultiFrameImageStorage", GREY.astype(np.uint8), {"NumberOfFrames": 1}),
        ("NM", "NuclearMedicineImageStorage", GREY, {"NumberOfFrames": 1, "PixelSpacing": [2, 2]}),
        (
            "NM",
            "NuclearMedicineImageStorage",
            GREY,
            {"NumberOfFrames": 1, "PixelSpacing": [2, 2], "SliceThickness": 4},
        ),
        ("NM", "NuclearMedicineImageStorage", GREY, {**SPATIAL, "NumberOfFrames": 1}),
        ("XA", "XRayAngiographicImageStorage", GREY, SPATIAL),
        ("OP", "OphthalmicPhotography8BitImageStorage", COLOUR, {**SPATIAL, **RGB}),
        ("OT", "SecondaryCaptureImageStorage", GREY, SPATIAL),
    ],
)
def test_seg_of_an_image_is_one_that_dciodvfy_accepts(
    modality: str, sop_class: str, pixels: Any, values: dict[str, Any], tmp_path: Path
) -> None:
    kept = {keyword: value for keyword, value in values.items() if value is not None}
    dataset = header(pixels, getattr(pydicom.uid, sop_class), Modality=modality, **kept)
    for keyword in set(values) - set(kept):
        delattr(dataset, keyword)
    series = opened(written(dataset))
    classes = (VOLUME[0] > 100).astype(np.uint8)
    (content,) = answers(series, classes)
    seg = hd.seg.segread(io.BytesIO(content))
    np.testing.assert_array_equal(seg.pixel_array, classes)
    measures = seg.SharedFunctionalGroupsSequence[0].get("PixelMeasuresSequence")
    spacing = values.get("PixelSpacing") if "SliceThickness" in values else None
    assert (measures[0].PixelSpacing if measures else None) == spacing
    check_by_dciodvfy([content], tmp_path)


@pytest.mark.parametrize(
    "pack",
    [enhanced, lambda volume: enhanced(volume, own_groups=True), reconstruction],
    ids=["enhanced", "orientation with each frame", "SPECT"],
)
def test_seg_of_frames_in_one_file_lies_where_they_do(pack: Callable[[Any], bytes], tmp_path: Path) -> None:
    series = opened(pack(VOLUME))
    content, *others = answers(series)
    seg = hd.seg.segread(io.BytesIO(content))
    by_height = {
        round(float(group.PlanePositionSequence[0].ImagePositionPatient[2]), 3): pixels
        for group, pixels in zip(seg.PerFrameFunctionalGroupsSequence, seg.pixel_array, strict=True)
    }
    for place, pixels in enumerate(VOLUME):
        np.testing.assert_array_equal(by_height[40.0 + 2.5 * place], pixels > 100)
    check_by_dciodvfy([content, *others], tmp_path)
