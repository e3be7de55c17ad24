"""Match the segments of a DICOM SEG or .seg.nrrd with the labels of a task: by code, then name, then number.

A number says nothing by itself: exporters count segments from 1. So a segment that another code or name
belongs to is refused, and one that neither names is taken by its number, with a note. The ROIs of an RTSTRUCT
are matched by code and name alone. Those of no label are left out, with a note: a plan has many.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from model_store.errors import MaskMismatch, TaskError
from model_store.scans.types import Note, Roi, Scan, Segment, Structures
from model_store.task import Task

BY_NUMBER = "segment-by-number"
LEFT_OUT, GAPS, OVERLAP = "roi-left-out", "contours-missing", "rois-overlap"
_MOST_LISTED = 8
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

    Every other mask is as it was. Raises TaskError for a segment that is none of the task's labels, or where
    no ROI of an RTSTRUCT is one, and MaskMismatch for an ROI of which the contours cannot be read.
    """
    if mask.structures is not None:
        return _by_rois(mask, mask.structures, task)
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


def by_numbers(mask: Scan) -> tuple[Scan, tuple[Note, ...]]:
    """A mask with the numbers of its segments or ROIs for values, and a note on which they are.

    Raises MaskMismatch for ROIs that overlap, have a number that is no value of a mask, or cannot be read.
    """
    if mask.structures is None:
        if not mask.segments:
            return mask, ()
        named, what = dict(mask.segments), "segments"
    else:
        rois, what = mask.structures.rois, "ROIs"
        for roi in rois:
            _check_readable(roi)
            if not 1 <= roi.number <= 255:
                raise MaskMismatch(
                    f"ROI {roi.segment}: expected a number from 1 to 255 as its value in the mask, found "
                    f"{roi.number}; name the `model`, by which ROIs are matched by their names"
                )
        values = [0] * len(mask.structures.sets)
        for value in np.unique(mask.voxels).tolist():
            members = mask.structures.sets[value]
            if len(members) > 1:
                both = " and ".join(str(rois[place].segment) for place in members[:2])
                raise MaskMismatch(
                    f"ROIs {both} overlap, and a voxel has one value; name the `model`, by which ROIs are "
                    "matched by their names, or send one of them"
                )
            values[value] = rois[members[0]].number if members else 0
        mask = replace(mask, voxels=np.array(values, np.uint16)[mask.voxels], structures=None)
        named = {roi.number: roi.segment for roi in rois}
    listed = ", ".join(f"{number} {segment}" for number, segment in sorted(named.items()))
    text = f"the {what} are kept by their numbers, since no `model` is named: {listed}"
    return mask, (Note(BY_NUMBER, text),)


def _check_readable(roi: Roi) -> None:
    if roi.problem:
        raise MaskMismatch(f"RTSTRUCT: ROI {roi.segment}: {roi.problem}")


def _by_rois(mask: Scan, structures: Structures, task: Task) -> tuple[Scan, tuple[Note, ...]]:
    labels = dict[int, str]()
    for place, roi in enumerate(structures.rois):
        if (label := _label_of(None, roi.segment, task)) is not None:
            _check_readable(roi)
            labels[place] = label
    others = [str(roi.segment) for place, roi in enumerate(structures.rois) if place not in labels]
    listed = ", ".join(others[:_MOST_LISTED]) + (f", … ({len(others)} in all)" * (len(others) > _MOST_LISTED))
    if not labels:
        raise TaskError(
            f"none of the ROIs {listed} is a label of task '{task.name}' ({_listed(task)}), by its code or "
            "its name; give the ROI the label's name"
        )
    values = [0] * len(structures.sets)
    overlaps = Counter[tuple[str, ...]]()
    for value, voxels in zip(*map(list, np.unique(mask.voxels, return_counts=True)), strict=True):
        members = {labels[place] for place in structures.sets[value] if place in labels}
        own = _value_of_all(members, task)
        if own is None:
            last = max(members, key=[*task.labels].index)
            own = _value_of(last, -1, task)
            overlaps[*sorted(members), last] += int(voxels)
        values[value] = own
    table = np.array(values, np.uint16)
    notes = [Note(LEFT_OUT, f"ROIs that are no label were left out: {listed}")] * bool(others)
    notes += [
        Note(GAPS, f"ROI {roi.segment} has no contour in {roi.gaps} slices between its first and its last")
        for roi in (structures.rois[place] for place in labels)
        if roi.gaps
    ]
    notes += [
        Note(
            OVERLAP,
            f"{voxels} voxels are in ROIs of {' and '.join(both)}, which do not overlap by the task; they "
            f"are taken for {last}, the last of its labels",
        )
        for (*both, last), voxels in overlaps.items()
    ]
    return replace(mask, voxels=table[mask.voxels], structures=None), tuple(notes)


def _value_of_all(labels: set[str], task: Task) -> int | None:
    """A mask value that has these labels and the fewest others; the background's without any."""
    own = min(
        (each for each in task.classes if labels <= {*each.labels}),
        key=lambda each: len(each.labels),
        default=None,
    )
    return None if own is None else min(own.values)


def _label_of(number: int | None, segment: Segment, task: Task) -> str | None:
    """The label that a segment's code or name is; None where neither says anything, of an ROI (`number` None)
    also where they say something else.
    """
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
    if number is None:
        return named
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


def _none(number: int | None, segment: Segment, task: Task, why: str) -> TaskError:
    what = "ROI" if number is None else f"segment {number}"
    return TaskError(
        f"{what} {segment} is none of the labels of task '{task.name}' ({_listed(task)}): {why}. Send the "
        "segmentation of the label, or correct the segment's name or code"
    )


def _listed(task: Task) -> str:
    return ", ".join(
        f"{label} ({task.codes[label].type.value})" if label in task.codes else label for label in task.labels
    )


def _plain(name: str) -> str:
    return "".join(each for each in name.casefold() if each.isalnum())
