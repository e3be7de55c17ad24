"""RTSTRUCT of a segmentation: the mask is in it voxel for voxel, and so is what made it."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray

from model_store.errors import ScanTooLarge, UnsupportedScan
from model_store.preprocessing import classes_on
from model_store.scan import Limits, decode, decode_mask, encode_nifti, open_series
from model_store.task import Task
from service.prediction import dicom_rtstruct
from service.prediction.dicom_instance import device_uid
from service.prediction.dicom_rtstruct import encode_rtstruct
from service.prediction.overlay import COLOURS
from tests.helpers.model_store.dicom_files import enhanced, series, turned, zipped
from tests.helpers.service.coded import CODED, RECEIPT

READERS = Path(__file__).parents[4] / ".rtstruct-readers/bin/python"
"""An interpreter with dcmrtstruct2nii and rt-utils, which need another pydicom than Locum does."""
SCRIPT = Path(__file__).parents[3] / "helpers/model_store/rtstruct_readers.py"
TASK = Task(name="eye", labels={"disc": (1, 2), "cup": (2,), "scar": (3,)}, size=(16, 16))


def shapes() -> NDArray[np.uint8]:
    """Classes [slices, rows, columns] of `TASK`: holes, islands in them, single pixels, parts at the edge."""
    z, y, x = np.mgrid[:7, :34, :34]
    inside = (y - 16) ** 2 + (x - 14) ** 2 < (14 - z) ** 2
    inside &= ~((y - 14) ** 2 + (x - 11) ** 2 < 16) & ~((y - 20) ** 2 + (x - 18) ** 2 < 9)
    inside |= (y == 14) & (x == 11)
    classes = inside.astype(np.uint8)
    classes[inside & (x > 16)] = 2
    classes[:, 1, 1] = classes[:, 31, 28] = classes[:, 30, 27] = 3
    classes[2:5, 33, 4:9] = 3
    classes[6] = 0
    return classes


def noise() -> NDArray[np.uint8]:
    return np.random.default_rng(4).integers(0, 4, (3, 11, 13)).astype(np.uint8)


# Row and column cosines along the patient's axes, each way, and obliquely: the 24 right-handed orders and
# directions of axes. A series of slices cannot have the left-handed ones.
PLANES = [
    tuple(float(x) for x in (*(s * np.eye(3)[i]), *(t * np.eye(3)[j])))
    for i, j in itertools.permutations(range(3), 2)
    for s, t in itertools.product((1, -1), repeat=2)
] + [turned(8), turned(33), turned(61)]


def encoded(
    classes: NDArray[np.uint8], content: Any, task: Task = TASK, tolerance: float = 0.0
) -> pydicom.Dataset:
    made = encode_rtstruct(
        open_series(content, Limits()), classes.transpose(2, 1, 0), task, RECEIPT, tolerance
    )
    return pydicom.dcmread(io.BytesIO(made))


def bytes_of(dataset: pydicom.Dataset) -> bytes:
    content = io.BytesIO()
    dataset.save_as(content)
    return content.getvalue()


def read_back(content: Any, made: bytes, task: Task = TASK) -> Any:
    scan = decode(content)
    return classes_on(scan, decode_mask(made, Limits(), scan), task).transpose(2, 1, 0)


@pytest.mark.parametrize(("plane", "gap"), [*zip(PLANES, itertools.cycle((1.0, 2.5, 8.0)), strict=False)])
def test_mask_is_read_back_voxel_for_voxel(plane: Any, gap: float) -> None:
    for classes in (shapes(), noise()):
        content = zipped(series(classes.astype(np.int16), plane, (0.37, 1.9), gap=gap))
        made = encode_rtstruct(open_series(content, Limits()), classes.transpose(2, 1, 0), TASK, RECEIPT)
        np.testing.assert_array_equal(read_back(content, made), classes)
        # A NIfTI of the series with its rows turned over: the 24 left-handed orders and directions.
        scan, flip = decode(content), np.array([[0, 1], [1, -1], [2, 1]])
        assert scan.affine is not None
        affine = scan.affine @ nib.orientations.inv_ornt_aff(flip, scan.grid)
        flipped = decode(encode_nifti(scan.voxels[:, ::-1, :, 0], affine, 1.0, None))
        found = classes_on(flipped, decode_mask(made, Limits(), flipped), TASK)
        np.testing.assert_array_equal(found[:, ::-1], classes.transpose(2, 1, 0))


def test_enhanced_file_is_referred_to_frame_by_frame() -> None:
    classes = shapes()
    content = enhanced(classes.astype(np.int16))
    made = encoded(classes, content)
    np.testing.assert_array_equal(read_back(content, bytes_of(made)), classes)
    source = pydicom.dcmread(io.BytesIO(content))
    for contour in made.ROIContourSequence[0].ContourSequence:
        (image,) = contour.ContourImageSequence
        assert image.ReferencedSOPInstanceUID == source.SOPInstanceUID
        frame = source.PerFrameFunctionalGroupsSequence[image.ReferencedFrameNumber - 1]
        z = frame.PlanePositionSequence[0].ImagePositionPatient[2]
        assert {float(value) for value in contour.ContourData[2::3]} == {float(z)}


def test_it_says_what_it_is_of_and_what_made_it() -> None:
    classes = np.minimum(shapes(), 1)
    files = series(classes.astype(np.int16), turned(8))
    made = encoded(classes, zipped(files), CODED)
    sources = {each.SOPInstanceUID: each for each in map(pydicom.dcmread, map(io.BytesIO, files.values()))}
    one = next(iter(sources.values()))
    for keyword in ("StudyInstanceUID", "FrameOfReferenceUID", "PatientID", "PatientName", "StudyDate"):
        assert made[keyword].value == one[keyword].value
    (frame,) = made.ReferencedFrameOfReferenceSequence
    (study,) = frame.RTReferencedStudySequence
    (referenced,) = study.RTReferencedSeriesSequence
    assert referenced.SeriesInstanceUID == one.SeriesInstanceUID
    assert {each.ReferencedSOPInstanceUID for each in referenced.ContourImageSequence} == {*sources}
    (roi,), (drawn,), (seen,) = (
        made[name] for name in ("StructureSetROISequence", "ROIContourSequence", "RTROIObservationsSequence")
    )
    assert (roi.ROIName, roi.ROIGenerationAlgorithm) == ("bright", "AUTOMATIC")
    assert roi.ReferencedFrameOfReferenceUID == frame.FrameOfReferenceUID == one.FrameOfReferenceUID
    assert drawn.ROIDisplayColor == [*COLOURS[0]]
    assert seen.RTROIIdentificationCodeSequence[0].CodeValue == "10200004"
    for contour in drawn.ContourSequence:
        source = sources[contour.ContourImageSequence[0].ReferencedSOPInstanceUID]
        points = np.array(contour.ContourData, float).reshape(-1, 3) - source.ImagePositionPatient
        normal = np.cross(source.ImageOrientationPatient[:3], source.ImageOrientationPatient[3:])
        assert np.abs(points @ normal).max() < 1e-4
        assert contour.NumberOfContourPoints == len(points)
    (device,) = made.ContributingEquipmentSequence
    assert device.DeviceUID == device_uid(RECEIPT.network.digest)
    assert "research use only" in made.SeriesDescription
    assert (made.StructureSetDate, made.StructureSetTime) == (one.StudyDate, one.StudyTime)


def test_label_that_is_nowhere_has_no_contour_and_one_without_a_code_no_code() -> None:
    classes = np.minimum(shapes(), 2)
    made = encoded(classes, zipped(series(classes.astype(np.int16))))
    names = [roi.ROIName for roi in made.StructureSetROISequence]
    assert names == ["disc", "cup", "scar"]
    assert ["ContourSequence" in roi for roi in made.ROIContourSequence] == [True, True, False]
    assert not any("RTROIIdentificationCodeSequence" in roi for roi in made.RTROIObservationsSequence)


@pytest.mark.parametrize("charset", ["ISO_IR 100", "ISO_IR 192"])
def test_names_of_labels_are_written_whatever_the_characters_of_the_source(charset: str) -> None:
    task = Task(name="organs", labels={"肝臓": (1,), "Läsion": (2,)}, size=(16, 16))
    classes = np.minimum(noise(), 2)
    content = zipped(
        series(classes.astype(np.int16), SpecificCharacterSet=charset, PatientName="Müller^Jürgen")
    )
    made = encoded(classes, content, task)
    assert [roi.ROIName for roi in made.StructureSetROISequence] == ["肝臓", "Läsion"]
    assert str(made.PatientName) == "Müller^Jürgen"
    np.testing.assert_array_equal(read_back(content, bytes_of(made), task), classes)


def test_same_answer_is_the_same_instance_and_another_tolerance_another() -> None:
    classes, content = shapes(), zipped(series(shapes().astype(np.int16)))
    opened = open_series(content, Limits())
    bodies = [
        encode_rtstruct(opened, classes.transpose(2, 1, 0), TASK, receipt, tolerance)
        for receipt, tolerance in (
            (RECEIPT, 0.0),
            (RECEIPT.model_copy(update={"request": "2"}), 0.0),
            (RECEIPT.model_copy(update={"options": {**RECEIPT.options, "tolerance_mm": 1.0}}), 1.0),
        )
    ]
    assert bodies[0] == bodies[1]
    whole, thinned = (pydicom.dcmread(io.BytesIO(bodies[at])) for at in (0, 2))
    assert whole.SOPInstanceUID != thinned.SOPInstanceUID
    counts = [
        sum(
            contour.NumberOfContourPoints
            for roi in made.ROIContourSequence
            for contour in roi.ContourSequence
        )
        for made in (whole, thinned)
    ]
    assert counts[1] < 0.6 * counts[0]


def test_contours_are_as_few_as_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = noise()
    content = zipped(series(classes.astype(np.int16)))
    for name, said in (
        ("MOST_POINTS", "more than 10 points"),
        ("MOST_CONTOURS", "more than 10 or"),
        ("_MOST_TRACED", "give a larger tolerance_mm"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(dicom_rtstruct, name, 10)
            with pytest.raises(ScanTooLarge, match=said):
                encoded(classes, content)


def test_series_that_cannot_be_referred_to_has_none() -> None:
    classes = noise()
    content = zipped(series(classes.astype(np.int16), StudyInstanceUID=""))
    with pytest.raises(UnsupportedScan, match="valid StudyInstanceUID"):
        encoded(classes, content)


@pytest.mark.process
@pytest.mark.parametrize("gap", [1.0, 2.5, 8.0])
def test_independent_readers_find_the_mask(gap: float, tmp_path: Path) -> None:
    if not READERS.exists():
        pytest.skip("dcmrtstruct2nii and rt-utils are not installed: `make test-pacs` does it")
    classes, folders = shapes(), [tmp_path / str(number) for number in range(len(PLANES))]
    for folder, plane in zip(folders, PLANES, strict=True):
        # Square images of square pixels: rt-utils takes rows for columns.
        files = series(classes.astype(np.int16), plane, (0.7, 0.7), gap=gap)
        (folder / "series").mkdir(parents=True)
        for name, content in files.items():
            (folder / "series" / name).write_bytes(content)
        (folder / "rs.dcm").write_bytes(bytes_of(encoded(classes, zipped(files))))
        (folder / "series.zip").write_bytes(zipped(files))
    subprocess.run([READERS, SCRIPT, *folders], check=True, capture_output=True)
    for folder in folders:
        scan = decode((folder / "series.zip").read_bytes())
        by_name = json.loads((folder / "found.json").read_text())
        for label in TASK.labels:
            expected = np.isin(classes, TASK.label_classes(label))
            read = nib.load(by_name["dcmrtstruct2nii"][label])
            turn = nib.orientations.io_orientation(np.linalg.inv(scan.affine) @ read.affine)
            found = nib.orientations.apply_orientation(np.asarray(read.dataobj) > 0, turn)
            np.testing.assert_array_equal(found.transpose(2, 1, 0), expected)
            by_rt_utils = np.load(by_name["rt-utils"][label])
            np.testing.assert_array_equal(by_rt_utils.transpose(2, 0, 1), expected)
            assert found.any()
