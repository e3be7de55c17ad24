"""Segments of a DICOM SEG are matched with a task's labels by code, then by name, then by number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model_store.errors import TaskError
from model_store.preprocessing import by_labels, class_map
from model_store.scan import Scan, decode_mask
from model_store.scans.types import Segment
from model_store.task import Task

LIVER, SPLEEN, KIDNEY = "10200004", "78961009", "64033007"


def coded(value: str, meaning: str = "x") -> dict[str, Any]:
    return {
        "category": {"value": "91723000", "meaning": "Anatomical Structure"},
        "type": {"value": value, "meaning": meaning},
    }


ONE = Task(name="one", labels={"liver": (1,)}, size=(16, 16), codes={"liver": coded(LIVER, "Leber (Organ)")})
TWO = Task(
    name="two",
    labels={"liver": (4,), "Spleen": (7, 9)},
    size=(16, 16),
    codes={"liver": coded(LIVER), "Spleen": coded(SPLEEN)},
)
SIDES = Task(
    name="sides",
    labels={"left kidney": (1,), "right kidney": (2,)},
    size=(16, 16),
    codes={name: coded(KIDNEY) for name in ("left kidney", "right kidney")},
)
PLAIN = Task(name="plain", labels={"disc": (1, 2), "cup": (2,)}, size=(16, 16))


def mask(**segments: tuple[str, str] | tuple[str, str, str]) -> Scan:
    """A mask with a voxel of each of these segments (`s3` is number 3): name, code, and scheme if not SCT."""
    said = {
        int(number[1:]): Segment(*own, *(("SCT",) if len(own) == 2 else ()))
        for number, own in segments.items()
    }
    voxels = np.array([0, *said], np.uint16).reshape(1, -1, 1, 1)
    return Scan(voxels, np.eye(4), "dicom-seg", segments=said)


@pytest.mark.parametrize(
    ("task", "drawn", "values"),
    [
        (ONE, mask(s1=("", LIVER)), [0, 1]),
        (ONE, mask(s3=("whatever", LIVER)), [0, 1]),
        (ONE, mask(s3=("whatever", "T-62000", "SRT")), [0, 1]),
        (ONE, mask(s3=("LIVER", "")), [0, 1]),
        (ONE, mask(s2=("Liver", "85756007")), [0, 1]),
        (TWO, mask(s1=("a", SPLEEN), s2=("b", LIVER)), [0, 7, 4]),
        (TWO, mask(s9=("a", SPLEEN)), [0, 9]),
        (TWO, mask(s4=("spleen", "")), [0, 7]),
        (SIDES, mask(s1=("Right_Kidney", KIDNEY), s2=("Left kidney", KIDNEY)), [0, 2, 1]),
        (SIDES, mask(s2=("", KIDNEY)), [0, 2]),
        (ONE, mask(s3=("x", LIVER, "2.16.840.1.113883.6.96")), [0, 1]),
        (ONE, mask(s3=("x", "T-62000", "SNM3")), [0, 1]),
        (ONE, mask(s3=("Liver", "7197", "FMA")), [0, 1]),
        (ONE, mask(s3=("Leber (Organ)", "LEB", "99LOCAL")), [0, 1]),
        (TWO, mask(s1=("spleen", "C1", "99LOCAL"), s2=("liver", "C2", "99LOCAL")), [0, 7, 4]),
        (PLAIN, mask(s1=("cup", ""), s2=("disc", "")), [0, 2, 1]),
        (PLAIN, mask(s5=("cup", "")), [0, 2]),
        (PLAIN, mask(s6=("disc", "")), [0, 1]),
    ],
)
def test_segment_is_taken_for_the_label_that_it_names(task: Task, drawn: Scan, values: list[int]) -> None:
    found, notes = by_labels(drawn, task)
    assert found.voxels.ravel().tolist() == values
    assert notes == ()
    expected = task.lookup()[values].tolist()
    assert class_map(drawn, task).ravel().tolist() == expected


@pytest.mark.parametrize(
    ("task", "drawn", "said"),
    [
        (
            ONE,
            mask(s1=("Spleen", SPLEEN)),
            r"segment 1 \('Spleen', code 78961009\) is none of .*liver \(10200004\)",
        ),
        (ONE, mask(s1=("liver", SPLEEN)), "liver has the code 10200004"),
        (ONE, mask(s1=("liver", "T-C3000", "SRT")), r"code T-C3000 of SRT\) is none of"),
        (ONE, mask(s1=("Spleen", "7196", "FMA")), r"\('Spleen', code 7196 of FMA\) is none of"),
        (ONE, mask(s3=("Spleen", "")), r"segment 3 \('Spleen'\) is none of"),
        (TWO, mask(s4=("Spleen", LIVER)), "its name is Spleen, its code that of liver"),
        (SIDES, mask(s3=("", KIDNEY)), "its code is that of left kidney and of right kidney"),
    ],
)
def test_segment_of_another_organ_is_refused_by_name(task: Task, drawn: Scan, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        by_labels(drawn, task)


@pytest.mark.parametrize(
    "drawn", [mask(s1=("Segment_1", "")), mask(s1=("", "85756007")), mask(s1=("hepar", ""))]
)
def test_segment_that_says_nothing_is_taken_by_its_number_with_a_note(drawn: Scan) -> None:
    found, (note,) = by_labels(drawn, ONE)
    assert found is drawn
    assert note.name == "segment-by-number"
    assert "is taken for liver by its number alone" in note.text


def test_a_mask_without_named_segments_is_as_it_was() -> None:
    drawn = mask()
    assert by_labels(drawn, ONE) == (drawn, ())


def test_segments_of_a_seg_nrrd_are_matched_as_those_of_a_seg() -> None:
    """As 3D Slicer writes them."""
    entry = f"TerminologyEntry:General~SCT^123037004^Anatomical Structure~SCT^{LIVER}^Liver~^^~Anatomic~^^~^^"
    header = (
        "NRRD0004",
        "type: unsigned char",
        "dimension: 3",
        "space: left-posterior-superior",
        "sizes: 8 8 8",
        "space directions: (1,0,0) (0,1,0) (0,0,1)",
        "encoding: raw",
        "space origin: (0,0,0)",
        "Segment0_ID:=Segment_1",
        "Segment0_LabelValue:=3",
        "Segment0_Name:=Leber",
        f"Segment0_Tags:=Segmentation.Status:inprogress|{entry}|",
    )
    voxels = np.zeros(512, np.uint8)
    voxels[5] = 3
    drawn = decode_mask("\n".join(header).encode() + b"\n\n" + voxels.tobytes())
    assert drawn.segments == {3: Segment("Leber", LIVER, "SCT")}
    found, notes = by_labels(drawn, ONE)
    assert (sorted({*found.voxels.ravel().tolist()}), notes) == ([0, 1], ())
