"""Match the segments of a DICOM SEG or .seg.nrrd with the labels of a task: by code, then name, then number.

A number says nothing by itself: exporters count segments from 1. So a segment that another code or name
belongs to is refused, and one that neither names is taken by its number, with a note.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from model_store.errors import TaskError
from model_store.scans.types import Note, Scan, Segment
from model_store.task import Task

BY_NUMBER = "segment-by-number"
# Types that exporters write by default (SNOMED CT): tissue, anatomical structure, organ, mass,
# lesion, abnormal structure.
_SAY_NOTHING = ("85756007", "91723000", "113343008", "4147007", "52988006", "49755003")
# SNOMED CT and SNOMED RT by their other designators (PS3.16, 8.2).
_SNOMED = {
    "2.16.840.1.113883.6.96": "SCT",
    "2.16.840.1.113883.6.5": "SRT",
    "SNM3": "SRT",
    "99SDM": "SRT",
}


def by_labels(mask: Scan, task: Task) -> tuple[Scan, tuple[Note, ...]]:
    """A mask with the task's values in place of the numbers of named segments, and notes on how.

    Every other mask is as it was. Raises TaskError for a segment that is none of the task's labels.
    """
    if not mask.segments:
        return mask, ()
    there = [int(value) for value in np.unique(mask.voxels) if value]
    values, notes = dict[int, int](), list[Note]()
    for number in there:
        segment = mask.segments.get(number, Segment())
        label = _label_of(number, segment, task)
        values[number] = number if label is None else _value_of(label, number, task)
        if label is None:
            owner = next((name for name, own in task.labels.items() if number in own), "a value of the task")
            notes.append(
                Note(
                    BY_NUMBER,
                    f"segment {number} {segment} is taken for {owner} by its number alone: neither its code "
                    "nor its name is a label's",
                )
            )
    if all(number == value for number, value in values.items()):
        return mask, tuple(notes)
    table = np.zeros(max(there) + 1, np.uint16)
    table[there] = [values[number] for number in there]
    return replace(mask, voxels=table[mask.voxels], segments={}), tuple(notes)


def _label_of(number: int, segment: Segment, task: Task) -> str | None:
    """The label that a segment's code or name is; None where neither says anything."""
    named = _named(segment.name, task)
    numbered = [label for label, values in task.labels.items() if number in values]
    coded = [label for label, own in task.codes.items() if _is(segment, own.type.value, own.type.scheme)]
    if coded:
        if named is not None and named not in coded:
            raise _none(number, segment, task, f"its name is {named}, its code that of {coded[0]}")
        # Two sides of the body may have one code.
        if len(coded) > 1 and named is None and not {*coded} & {*numbered}:
            raise _none(number, segment, task, f"its code is that of {' and of '.join(coded)}")
        return named or next((label for label in numbered if label in coded), coded[0])
    said = segment.code and not any(_is(segment, value, "SCT") for value in _SAY_NOTHING)
    for label in [named] if named else numbered:
        if not said or label not in task.codes:
            continue
        own = task.codes[label].type
        # Codes of two schemes cannot be compared: they contradict no name, and leave nothing to a number.
        if named is None or _is_comparable(segment.scheme, own.scheme):
            raise _none(number, segment, task, f"{label} has the code {own.value}")
    if named is None and not numbered and number not in (*task.background, *task.ignore):
        raise _none(number, segment, task, "and no label has its number")
    return named


def _named(name: str, task: Task) -> str | None:
    """The label that a segment has the name of, else the only one of which the code means that."""
    plain = _plain(name)
    if not plain:
        return None
    meant = [label for label, own in task.codes.items() if _plain(own.type.meaning) == plain]
    return next(
        (label for label in task.labels if _plain(label) == plain), meant[0] if len(meant) == 1 else None
    )


def _is(segment: Segment, value: str, scheme: str) -> bool:
    """Whether the segment has this code, also by SNOMED's codes of before (SRT)."""
    theirs, ours = (_SNOMED.get(each, each) for each in (segment.scheme, scheme))
    if theirs == ours:
        return segment.code == value
    # Its table of codes takes most of a second.
    from pydicom.sr.coding import Code

    return bool(Code(segment.code, theirs, "") == Code(value, ours, ""))


def _is_comparable(scheme: str, other: str) -> bool:
    """Whether one code of each of two schemes can be compared, as one without scheme can."""
    one, two = ({_SNOMED.get(each, each)} for each in (scheme, other))
    return not scheme or one == two or one | two == {"SCT", "SRT"}


def _value_of(label: str, number: int, task: Task) -> int:
    """A mask value that has the label and the fewest others: the segment's number where it is one."""
    own = min((each for each in task.classes if label in each.labels), key=lambda each: len(each.labels))
    return number if number in own.values else min(own.values)


def _none(number: int, segment: Segment, task: Task, why: str) -> TaskError:
    labels = ", ".join(
        f"{label} ({task.codes[label].type.value})" if label in task.codes else label for label in task.labels
    )
    return TaskError(
        f"segment {number} {segment} is none of the labels of task '{task.name}' ({labels}): {why}. Send the "
        "segmentation of the label, or correct the segment's name or code"
    )


def _plain(name: str) -> str:
    return "".join(each for each in name.casefold() if each.isalnum())
