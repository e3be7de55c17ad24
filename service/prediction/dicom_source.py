"""Prepare the headers of a source for the DICOM answers that repeat parts of them.

Scanners and archives write values that the standard forbids. What identifies the patient and the study is
copied as it is, so that the answer is filed with its source; any other forbidden value is left out. Both are
notes that name the attribute. ACR-NEMA's dates and times (PS3.5 6.2) are written as DICOM's.
"""

from __future__ import annotations

import re
from typing import Any

from pydicom import Dataset
from pydicom.charset import convert_encodings, default_encoding
from pydicom.config import RAISE
from pydicom.datadict import dictionary_VM, keyword_for_tag
from pydicom.multival import MultiValue
from pydicom.sequence import Sequence as Items
from pydicom.tag import BaseTag
from pydicom.valuerep import DA, STR_VR, TM, DSfloat, validate_value

from model_store.scan import DicomSeries, Note

# Attributes that every instance must have, if only empty, and that some sources leave out.
_MAY_BE_EMPTY = (
    *("PatientName", "PatientID", "PatientBirthDate", "PatientSex"),
    *("StudyDate", "StudyTime", "StudyID", "AccessionNumber", "ReferringPhysicianName"),
    *("PositionReferenceIndicator", "Manufacturer"),
)
_IDENTITY = frozenset({"PatientName", "PatientID", "IssuerOfPatientID", "StudyID", "AccessionNumber"})
# What an answer repeats beside the groups of patient, clinical trial and visit.
_REPEATED_GROUPS = (0x0010, 0x0012, 0x0038)
_REPEATED = frozenset(
    {
        *("StudyDate", "StudyTime", "StudyID", "AccessionNumber", "ReferringPhysicianName"),
        *("ConsultingPhysicianName", "PhysiciansOfRecord", "NameOfPhysiciansReadingStudy"),
        *("StudyDescription", "AdmittingDiagnosesDescription", "RequestingService", "ReasonForVisit"),
        *("PositionReferenceIndicator", "Manufacturer", "SliceThickness"),
    }
)
_SEXES = ("M", "F", "O")
# Multi-byte code extensions, which cannot be the first of several character sets (PS3.3 C.12.1.1.2).
_MULTI_BYTE = frozenset({"ISO 2022 IR 87", "ISO 2022 IR 159", "ISO 2022 IR 149", "ISO 2022 IR 58"})
_UTF_8 = "ISO_IR 192"


def notes_on(series: DicomSeries) -> tuple[Note, ...]:
    """Name the attributes of the source that a DICOM answer leaves out, or copies though they are invalid."""
    return _repaired(series.headers[series.frames[0].file])[1]


def sources_of(series: DicomSeries) -> list[Dataset]:
    """The headers in slice order, the first with what the answer repeats; a file with many frames once."""
    order = list(dict.fromkeys(frame.file for frame in series.frames))
    first = _repaired(series.headers[order[0]])[0]
    if series.gap is not None and not first.get("SliceThickness"):
        first.SliceThickness = round(series.gap, 6)
    if len(order) == 1:
        _describe_frames(first, series)
    return [first, *(_turned_as(first, series.headers[file]) for file in order[1:])]


def _turned_as(first: Dataset, header: Dataset) -> Dataset:
    """A slice with the orientation of the first: they are parallel within a tolerance, and a mask has one."""
    if header.get("ImageOrientationPatient") == first.get("ImageOrientationPatient"):
        return header
    turned = _copied(header)
    turned.ImageOrientationPatient = first.ImageOrientationPatient
    return turned


def _describe_frames(source: Dataset, series: DicomSeries) -> None:
    """Write functional groups as highdicom expects them of a class that may have several frames.

    The source may have none, as NM has, or have orientation and spacing with each frame.
    """
    frame, shared, own = series.frames[0], Dataset(), []
    measures, orientation = Dataset(), Dataset()
    # highdicom needs them to write; `dicom_seg` removes those of an image that has none.
    measures.PixelSpacing = list(frame.spacing or (1.0, 1.0))
    if source.get("SliceThickness"):
        measures.SliceThickness = source.SliceThickness
    if series.affine is not None:
        orientation.ImageOrientationPatient = _decimals(frame.orientation)
        shared.PlaneOrientationSequence = Items([orientation])
        for each in sorted(series.frames, key=lambda each: each.index):
            position, group = Dataset(), Dataset()
            position.ImagePositionPatient = _decimals(each.position)
            group.PlanePositionSequence = Items([position])
            own.append(group)
    else:
        # Without a position in it, an image has no use for a frame of reference.
        for keyword in ("ImagePositionPatient", "ImageOrientationPatient", "FrameOfReferenceUID"):
            if keyword in source:
                delattr(source, keyword)
        own.append(Dataset())
    shared.PixelMeasuresSequence = Items([measures])
    source.SharedFunctionalGroupsSequence = Items([shared])
    source.PerFrameFunctionalGroupsSequence = Items(own)
    source.NumberOfFrames = len(own)


def _decimals(numbers: Any) -> list[DSfloat]:
    return [DSfloat(float(number), auto_format=True) for number in numbers]


def _copied(header: Dataset) -> Dataset:
    """A data set with the same elements, none of which is converted."""
    copied: Dataset = header[:]
    copied.file_meta = header.file_meta
    return copied


def _repaired(header: Dataset) -> tuple[Dataset, tuple[Note, ...]]:
    repaired, notes = _copied(header), []
    if not _repair_character_set(repaired):
        notes.append(_left_out("SpecificCharacterSet"))
    for tag in list(header.keys()):
        keyword = keyword_for_tag(tag)
        if not keyword or not (tag.group in _REPEATED_GROUPS or keyword in _REPEATED):
            continue
        value = valid_value(header, tag)
        if value is not None:
            if value != header[tag].value:
                setattr(repaired, keyword, value)
        elif keyword in _IDENTITY:
            text = f"{keyword} has a value that the standard forbids; the DICOM answer repeats it as it is"
            notes.append(Note(f"copied:{keyword}", text))
        else:
            del repaired[tag]
            notes.append(_left_out(keyword))
    for keyword in _MAY_BE_EMPTY:
        if keyword not in repaired or repaired.get(keyword) is None:
            setattr(repaired, keyword, "")
    # Often wrong, and so measured between positions instead.
    if "SpacingBetweenSlices" in repaired:
        del repaired.SpacingBetweenSlices
    return repaired, tuple(notes)


def _left_out(keyword: str) -> Note:
    text = f"{keyword} has a value that the standard forbids; the DICOM answer leaves it out"
    return Note(f"left-out:{keyword}", text)


def valid_value(header: Dataset, tag: BaseTag | str) -> Any:
    """The value of an attribute as the standard has it; None where it has none or a forbidden one."""
    try:
        element = header[tag]
        if element.VR == "SQ":
            return element.value
        values = element.value if isinstance(element.value, MultiValue) else [element.value]
        if len(values) > 1 and dictionary_VM(element.tag) == "1":
            return None
        written = [_as_dicom(element.VR, "" if value is None else value) for value in values]
        if element.VR in STR_VR:
            for value in written:
                validate_value(element.VR, str(value), RAISE)
        if element.VR in ("DA", "TM"):
            for value in filter(None, written):
                (DA if element.VR == "DA" else TM)(value)
        if element.keyword == "PatientSex" and written[0] not in ("", *_SEXES):
            return None
    except Exception:  # pydicom raises several kinds for a value that is none of its type
        return None
    if written == ["" if value is None else value for value in values]:
        return element.value
    return written if len(written) > 1 else written[0]


def _as_dicom(vr: str, value: Any) -> Any:
    if vr == "DA" and re.fullmatch(r"\d{4}\.\d\d\.\d\d", str(value)):
        return str(value).replace(".", "")
    if vr == "TM" and re.fullmatch(r"\d\d:\d\d(:\d\d(\.\d+)?)?", str(value)):
        value = str(value).replace(":", "")
    if vr == "TM" and re.fullmatch(r"\d{6}\.\d{7,}", str(value)):
        return str(value)[:13]
    return value


def _repair_character_set(header: Dataset) -> bool:
    """Name the header's character sets as the standard does; return False where they are unknown.

    Without a name, texts are written with the bytes that they were read from.
    """
    import highdicom as hd

    found = header.get("SpecificCharacterSet")
    names = [str(name).strip() for name in ([found] if isinstance(found, str) else found or ())]
    if not any(names):
        if "SpecificCharacterSet" in header:
            del header.SpecificCharacterSet
        return True
    names[0] = names[0] or "ISO 2022 IR 6"
    known = {each.value for each in hd.SpecificCharacterSetValues}
    extended = len(names) == 1 or (names[0] not in _MULTI_BYTE and all(" 2022 " in name for name in names))
    if known.issuperset(names) and extended:
        header.SpecificCharacterSet = names if len(names) > 1 else names[0]
    elif any(encoding != default_encoding for encoding in convert_encodings(names)):
        header.SpecificCharacterSet = _UTF_8
    else:
        del header.SpecificCharacterSet
        return False
    return True
