"""RTSTRUCT as a mask of its scan: contours by hand, of which the pixels can be counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from pydicom import Dataset
from pydicom.sequence import Sequence as Items

from model_store.errors import DamagedScan, MaskMismatch, ScanError, ScanTooLarge, TaskError, UnsupportedScan
from model_store.preprocessing import by_labels, by_numbers, classes_on
from model_store.scan import Limits, Scan, decode, decode_mask, deidentify, encode_nifti, open_series
from model_store.scans.dicom import structures
from model_store.task import Task
from tests.helpers.model_store.dicom_files import image, rtstruct, series, turned, uid, zipped

CLOSED, XOR = "CLOSED_PLANAR", "CLOSEDPLANAR_XOR"
VOXELS = np.random.default_rng(2).integers(0, 900, (6, 14, 12)).astype(np.int16)
FILES = series(VOXELS, turned(20))
SCAN = decode(zipped(FILES))
TASK = Task(
    name="organs",
    labels={"Liver": (1,), "spleen": (2,)},
    size=(16, 16),
    codes={
        "Liver": {
            "category": {"value": "91723000", "meaning": "Anatomical Structure"},
            "type": {"value": "10200004", "meaning": "Liver structure"},
        }
    },
)
Contour = tuple[str, Sequence[Sequence[float]]]


def at(points: Sequence[tuple[float, float]], plane: float, kind: str = CLOSED) -> Contour:
    """A contour with points (column, row) in a plane of the scan."""
    assert SCAN.affine is not None
    indices = np.array([(*point, plane, 1.0) for point in points])
    return kind, ((indices @ SCAN.affine.T)[:, :3] * [-1, -1, 1]).tolist()


def box(left: float, top: float, right: float, bottom: float, plane: float, kind: str = CLOSED) -> Contour:
    return at([(left, top), (right, top), (right, bottom), (left, bottom)], plane, kind)


def read(content: bytes, scan: Scan = SCAN, task: Task = TASK, **how: Any) -> Any:
    """The classes [planes, rows, columns]."""
    return classes_on(scan, decode_mask(content, Limits(), scan, **how), task).transpose(2, 1, 0)


def boxes(*at: tuple[slice, slice, slice, int]) -> Any:
    expected = np.zeros(VOXELS.shape, np.uint8)
    for planes, rows, columns, value in at:
        expected[planes, rows, columns] = value
    return expected


LIVER = {"Liver": [box(1.5, 2.5, 5.5, 7.5, 2), box(1.5, 2.5, 6.5, 7.5, 3)]}
EXPECTED = boxes((slice(2, 3), slice(3, 8), slice(2, 6), 1), (slice(3, 4), slice(3, 8), slice(2, 7), 1))


def test_pixels_with_their_centres_inside_are_the_mask() -> None:
    np.testing.assert_array_equal(read(rtstruct(FILES, LIVER)), EXPECTED)


def test_hole_is_read_by_keyhole_by_nesting_and_by_xor() -> None:
    expected = boxes((slice(1, 2), slice(1, 10), slice(1, 10), 1), (slice(1, 2), slice(4, 7), slice(4, 7), 0))
    expected[1, 5, 5] = 1
    outer, inner = (0.5, 0.5, 9.5, 9.5), (3.5, 3.5, 6.5, 6.5)
    island = box(4.5, 4.5, 5.5, 5.5, 1)
    keyhole = [(0.5, 0.5), (9.5, 0.5), (9.5, 9.5), (0.5, 9.5), (0.5, 4.2), (3.5, 4.2), (3.5, 6.5)]
    keyhole += [(6.5, 6.5), (6.5, 3.5), (3.5, 3.5), (3.5, 4.2), (0.5, 4.2)]
    for contours in (
        [at(keyhole, 1), island],
        [box(*outer, 1), box(*inner, 1), island],
        [island, box(*inner, 1), box(*outer, 1)],
        [box(*outer, 1, XOR), box(*inner, 1, XOR), box(4.5, 4.5, 5.5, 5.5, 1, XOR)],
    ):
        np.testing.assert_array_equal(read(rtstruct(FILES, {"Liver": contours})), expected)


def test_contours_through_the_centres_of_the_outermost_pixels_have_these_pixels() -> None:
    """As OpenCV outlines a mask, a hole by the pixels around it, and a single pixel by one point."""
    contours = [box(2, 2, 8, 9, 4), box(4, 4, 6, 7, 4), at([(10, 10)], 4)]
    expected = boxes((slice(4, 5), slice(2, 10), slice(2, 9), 1), (slice(4, 5), slice(5, 7), slice(5, 6), 0))
    expected[4, 10, 10] = 1
    np.testing.assert_array_equal(read(rtstruct(FILES, {"Liver": contours})), expected)


def test_rois_are_matched_by_code_and_name_and_others_are_left_out() -> None:
    """A plan has its target, a marker and the body around all of it, and no ROI's number is a value."""
    content = rtstruct(
        FILES,
        {
            "BODY": [box(0, 0, 11, 13, plane) for plane in range(6)],
            "organ A": LIVER["Liver"],
            "SPLEEN": [box(8.5, 2.5, 10.5, 7.5, 2)],
            "isocentre": [("POINT", at([(3, 3)], 2)[1])],
            "empty": [],
        },
        codes={"organ A": ("10200004", "SCT"), "BODY": ("123", "FMA")},
    )
    expected = EXPECTED.copy()
    expected[2, 3:8, 9:11] = 2
    np.testing.assert_array_equal(read(content), expected)
    _, (note,) = by_labels(decode_mask(content, Limits(), SCAN), TASK)
    assert note.name == "roi-left-out"
    assert "'BODY'" in note.text
    assert "'isocentre'" in note.text
    assert "organ A" not in note.text


def test_slices_without_a_contour_between_others_are_named() -> None:
    content = rtstruct(FILES, {"Liver": [box(1.5, 2.5, 5.5, 7.5, plane) for plane in (0, 2, 4)]})
    _, (note,) = by_labels(decode_mask(content, Limits(), SCAN), TASK)
    assert (note.name, "('Liver') has no contour in 2 slices" in note.text) == ("contours-missing", True)


def test_overlapping_rois_are_labels_that_overlap_by_the_task() -> None:
    nested = Task(name="eye", labels={"disc": (1, 2), "cup": (2,)}, size=(16, 16))
    content = rtstruct(FILES, {"cup": [box(3.5, 3.5, 5.5, 5.5, 2)], "Disc": [box(1.5, 1.5, 8.5, 8.5, 2)]})
    expected = boxes((slice(2, 3), slice(2, 9), slice(2, 9), 1), (slice(2, 3), slice(4, 6), slice(4, 6), 2))
    np.testing.assert_array_equal(read(content, task=nested), expected)


def test_overlap_that_the_task_excludes_is_the_last_labels_with_a_note() -> None:
    """As contours of neighbours overlap a little, and a target is inside its organ."""
    both = rtstruct(FILES, {"spleen": [box(3.5, 3.5, 5.5, 5.5, 2)], "Liver": [box(1.5, 1.5, 8.5, 8.5, 2)]})
    expected = boxes((slice(2, 3), slice(2, 9), slice(2, 9), 1), (slice(2, 3), slice(4, 6), slice(4, 6), 2))
    np.testing.assert_array_equal(read(both), expected)
    _, (note,) = by_labels(decode_mask(both, Limits(), SCAN), TASK)
    assert note.name == "rois-overlap"
    assert note.text.startswith(
        "4 voxels are in ROIs of Liver and spleen, which do not overlap by the task; "
    )
    assert note.text.endswith("taken for spleen, the last of its labels")


def test_without_a_task_rois_are_kept_by_their_numbers() -> None:
    rois = {**LIVER, "spleen": [box(8.5, 2.5, 10.5, 7.5, 2)]}
    mask, (note,) = by_numbers(decode_mask(rtstruct(FILES, rois, first=7), Limits(), SCAN))
    assert np.unique(mask.voxels).tolist() == [0, 7, 8]
    assert "ROIs are kept by their numbers" in note.text
    assert "7 ('Liver'), 8 ('spleen')" in note.text
    with pytest.raises(MaskMismatch, match=r"\('Liver'\): expected a number from 1 to 255 .* found 301"):
        by_numbers(decode_mask(rtstruct(FILES, rois), Limits(), SCAN))
    rois["spleen"] = [box(2.5, 2.5, 10.5, 7.5, 2)]
    with pytest.raises(MaskMismatch, match=r"ROIs \('Liver'\) and \('spleen'\) overlap"):
        by_numbers(decode_mask(rtstruct(FILES, rois, first=7), Limits(), SCAN))


@pytest.mark.parametrize(
    ("contours", "said"),
    [
        ([("POINT", at([(3, 3)], 2)[1])], r"expected closed contours \(CLOSED_PLANAR or .*found POINT"),
        ([box(1, 1, 5, 5, 2, "OPEN_PLANAR")], "found OPEN_PLANAR"),
        ([box(1, 1, 5, 5, 2, "PLANTED^NAME")], "found one of another type"),
        ([box(1.5, 2.5, 5.5, 7.5, 2.5)], r"which are 2\.50 mm apart, found one 1\.25 mm off the nearest"),
        ([(CLOSED, [*at([(1, 1)], 1)[1], *at([(5, 1), (5, 8)], 4)[1]])], r"spans 7\.50 mm across them"),
        ([box(1.5, 2.5, 5.5, 7.5, 8)], r"found one 7\.50 mm beyond its slices"),
        ([box(1.5, 2.5, 5.5, 7.5, -1)], r"found one 2\.50 mm beyond its slices"),
        ([box(1.5, 2.5, 15.5, 7.5, 2)], r"reaches 2\.80 mm beyond it"),
        ([box(1.5, 2.5, 5.5, 7.5, 2), box(3.5, 2.5, 8.5, 7.5, 2)], "two contours in slice 3 overlap in part"),
        ([box(1.5, 2.5, 5.5, 7.5, 2)] * 2, "a contour in slice 3 is there twice"),
        ([(CLOSED, [(1.0, 2.0)])], "three numbers for each point"),
    ],
)
def test_roi_that_cannot_be_read_is_refused_by_its_name(contours: list[Contour], said: str) -> None:
    with pytest.raises(MaskMismatch, match=rf"^RTSTRUCT: ROI \('Liver'\): .*{said}") as caught:
        read(rtstruct(FILES, {"Liver": contours}))
    assert "PLANTED" not in str(caught.value)
    # Nothing hinders the other ROIs of the file.
    others = {"spleen": LIVER["Liver"], "target": contours}
    np.testing.assert_array_equal(read(rtstruct(FILES, others)), 2 * EXPECTED)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            lambda made: setattr(_series_of(made), "SeriesInstanceUID", uid("another")),
            MaskMismatch,
            "on the images of this scan, found those of 1 other series",
        ),
        (
            lambda made: setattr(
                made.StructureSetROISequence[0], "ReferencedFrameOfReferenceUID", uid("another")
            ),
            MaskMismatch,
            r"ROI \('Liver'\): expected contours in the scan's frame of reference, found another",
        ),
        (
            lambda made: setattr(made, "StructureSetROISequence", Items([])),
            MaskMismatch,
            "an ROI, found none",
        ),
        (
            lambda made: setattr(_contour_of(made), "NumberOfContourPoints", 5),
            MaskMismatch,
            "announces 5 points and has 4",
        ),
        (
            lambda made: made.StructureSetROISequence.append(made.StructureSetROISequence[0]),
            DamagedScan,
            "number",
        ),
    ],
)
def test_file_that_does_not_belong_to_the_scan_is_refused(
    change: Callable[[Dataset], None], error: type[ScanError], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        read(rtstruct(FILES, LIVER, change=change))
    assert uid("another") not in str(caught.value)


def _series_of(made: Dataset) -> Dataset:
    frame = made.ReferencedFrameOfReferenceSequence[0]
    return frame.RTReferencedStudySequence[0].RTReferencedSeriesSequence[0]  # type: ignore[no-any-return]


def _contour_of(made: Dataset) -> Dataset:
    return made.ROIContourSequence[0].ContourSequence[0]  # type: ignore[no-any-return]


def test_no_label_among_the_rois_is_refused_with_their_names() -> None:
    with pytest.raises(TaskError, match=r"none of the ROIs \('BODY'\), \('GTV'\) is a label of "):
        read(rtstruct(FILES, {"BODY": LIVER["Liver"], "GTV": []}))


def test_code_that_contradicts_the_name_is_refused() -> None:
    content = rtstruct(FILES, LIVER, codes={"Liver": ("78961009", "SCT")})
    with pytest.raises(TaskError, match=r"^ROI \('Liver', code 78961009\) is none of the labels"):
        read(content)


def test_scan_that_was_deidentified_afterwards_is_known_by_the_key() -> None:
    kept = decode(deidentify(zipped(FILES), Limits(), b"k" * 32))
    content = rtstruct(FILES, LIVER)
    with pytest.raises(MaskMismatch, match="other series"):
        read(content, kept)
    np.testing.assert_array_equal(read(content, kept, key=b"k" * 32), EXPECTED)
    # A correction of a cohort's scan is kept again.
    again = decode(deidentify(deidentify(zipped(FILES), Limits(), b"k" * 32), Limits(), b"k" * 32))
    np.testing.assert_array_equal(read(content, again, key=b"k" * 32), EXPECTED)
    with pytest.raises(MaskMismatch, match="other series"):
        read(content, kept, key=b"x" * 32)


@pytest.mark.parametrize(
    "order", [((0, 1), (1, 1), (2, 1)), ((2, -1), (0, 1), (1, -1)), ((1, 1), (2, 1), (0, -1))]
)
def test_nifti_of_the_series_on_any_axes_is_the_scan_too(order: Any) -> None:
    import nibabel as nib

    turn = np.array(order)
    voxels = nib.orientations.apply_orientation(SCAN.voxels[..., 0], turn)
    affine = SCAN.affine @ nib.orientations.inv_ornt_aff(turn, SCAN.grid)
    scan = decode(encode_nifti(voxels, affine, 1.0, None))
    found = classes_on(scan, decode_mask(rtstruct(FILES, LIVER), Limits(), scan), TASK)
    expected = nib.orientations.apply_orientation(EXPECTED.transpose(2, 1, 0), turn)
    np.testing.assert_array_equal(found, expected)


def test_it_needs_its_scan_and_a_scan_with_a_position() -> None:
    content = rtstruct(FILES, LIVER)
    with pytest.raises(UnsupportedScan, match="send it with the scan"):
        decode_mask(content)
    with pytest.raises(UnsupportedScan, match="this scan has none"):
        read(content, decode(image(VOXELS[0].astype(np.uint16))))
    with pytest.raises(UnsupportedScan, match=r"an RTSTRUCT .* send the images as the scan"):
        decode(content)
    # Beside its images it is left out.
    (note,) = open_series(zipped({**FILES, "rs.dcm": content}), Limits()).notes
    assert note.name == "files-ignored"


def test_contours_and_points_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = rtstruct(FILES, {**LIVER, "b": []})
    for name, bound, said in (
        ("MOST_CONTOURS", 1, "at most 1 contours, found 2"),
        ("MOST_POINTS", 7, "at most 7 points"),
        ("MOST_ROIS", 1, "at most 1 ROIs, found 2"),
        ("_MOST_SETS", 1, "at most 1 ways"),
        ("_MOST_CROSSINGS", 3, "too long or too many"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(structures, name, bound)
            with pytest.raises(ScanTooLarge, match=said):
                decode_mask(content, Limits(), SCAN)
    with pytest.raises(ScanTooLarge, match="too long or too many"):
        decode_mask(content, Limits(max_voxels=4), SCAN)


def test_damaged_file_is_a_scan_error() -> None:
    content, rng = rtstruct(FILES, LIVER, codes={"Liver": ("10200004", "SCT")}), np.random.default_rng(11)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for place in rng.integers(400, len(content), int(rng.integers(1, 8))):
            damaged[place] = int(rng.choice([0, 0x20, 0x5C, 0xFF, int(rng.integers(256))]))
        try:
            read(bytes(damaged))
        except (ScanError, TaskError):
            refused += 1
    assert 50 < refused < 300
