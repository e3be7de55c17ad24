"""The order of a series' slices and its affine, from positions and orientations alone.

Slice spacing of the header is not used: it is often wrong. A series that is no regular stack of parallel
slices is refused with the measured numbers. Slices of a tilted gantry are a regular stack: each is shifted
along itself, and the affine leads from one to the next as they lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset

from model_store.errors import DamagedScan, ScanTooLarge, UnsupportedScan
from model_store.scans.types import Note

# A position is written in decimal, often with one digit: a slice may be this far from its place on the line
# through the stack, in mm, or this fraction of the gap.
_ROUNDING_MM = 0.11
_ROUNDING_GAP = 0.02
# Planes that a SEG may leave out between any two that it has, if no two of its planes are adjacent.
_MOST_LEFT_OUT = 9
# Cosines are written with about six digits; scanners of the same protocol repeat them exactly.
_COSINE = 1e-3
_TILT_DEGREES = 0.5
# Gantries tilt up to 30 degrees. Slices that are shifted by more than their gap are no stack.
_MOST_TILT_DEGREES = 45.0
_SAME_PLACE_MM = 0.01
# Ultrasound Multi-frame Image Storage, and a minute of it and more.
_ULTRASOUND = "1.2.840.10008.5.1.4.1.1.3.1"
_MOST_FRAMES = 4096
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])

# What distinguishes several images at one position, with its unit.
_DISTINCTIONS = (
    ("EchoTime", "echo times", " ms"),
    ("EffectiveEchoTime", "echo times", " ms"),
    ("DiffusionBValue", "b-values", " s/mm²"),
    ("InversionTime", "inversion times", " ms"),
    ("TemporalPositionIdentifier", "time points", ""),
    ("TemporalPositionIndex", "time points", ""),
    ("TriggerTime", "trigger times", " ms"),
    ("FrameReferenceTime", "reference times", " ms"),
    ("AcquisitionNumber", "acquisitions", ""),
)


@dataclass(frozen=True)
class Frame:
    """One slice: frame `index` of file `file`, with what its header or functional groups say.

    `position` [3] and `orientation` [6] in LPS, `spacing` (between rows, between columns) in mm; each None
    where the file has none. `groups` are the data sets in which its attributes are looked up.
    """

    file: int
    index: int
    position: NDArray[np.float64] | None
    orientation: NDArray[np.float64] | None
    spacing: tuple[float, float] | None
    slope: float
    intercept: float
    groups: tuple[Dataset, ...]

    def find(self, keyword: str) -> Any:
        """Return the frame's own value of an attribute, else the file's; None without one."""
        for group in self.groups:
            if (value := group.get(keyword)) is not None:
                return value
        return None


def frames_of(file: int, header: Dataset) -> list[Frame]:
    """List the frames of a file, in its own order.

    Raises DamagedScan, and UnsupportedScan for several frames without groups of their own. It does so before
    any is built, since a small file can announce any number of them.
    """
    shared = _groups(header.get("SharedFunctionalGroupsSequence"))
    per_frame = header.get("PerFrameFunctionalGroupsSequence") or ()
    count = int(header.get("NumberOfFrames") or 1)
    if per_frame and len(per_frame) != count:
        raise DamagedScan(
            f"DICOM: the header announces {count} frames and describes {len(per_frame)}; export it again"
        )
    detected: tuple[Dataset, ...] = () if per_frame else _detected(header, count)
    film = is_film(header)
    if film and count > _MOST_FRAMES:
        raise ScanTooLarge(f"DICOM: expected at most {_MOST_FRAMES} frames of a film, found {count}; cut it")
    if count > 1 and not per_frame and not detected and not film:
        raise UnsupportedScan(
            f"DICOM: {count} frames without any position of their own in the patient"
            + (", a film over time" if "FrameTime" in header or "CineRate" in header else "")
            + (", projections or phases of nuclear medicine" if "DetectorVector" in header else "")
            + "; send one frame as a single image, or a series as the scanner stored it"
        )
    frames = []
    for index in range(count):
        own = detected[index : index + 1] or _groups(per_frame[index : index + 1])
        groups = (*own, *shared, header)
        position = _numbers(groups, "ImagePositionPatient", 3)
        # Frames without groups of their own share the header's position, which places only the first.
        placed = not film and (index == 0 or own)
        spacing = _numbers(groups, "PixelSpacing", 2)
        # A Modality LUT takes the place of both (PS3.3 C.11.1), and is applied when pixels are decoded.
        rescaled = () if header.get("ModalityLUTSequence") else groups
        slope, intercept = _numbers(rescaled, "RescaleSlope", 1), _numbers(rescaled, "RescaleIntercept", 1)
        frames.append(
            Frame(
                file,
                index,
                position if placed else None,
                _numbers(groups, "ImageOrientationPatient", 6),
                None if spacing is None else (float(spacing[0]), float(spacing[1])),
                1.0 if slope is None else float(slope[0]),
                0.0 if intercept is None else float(intercept[0]),
                groups,
            )
        )
    return frames


def is_film(header: Dataset) -> bool:
    """Whether it is ultrasound of several frames, which are images one after the other in time."""
    return str(header.get("SOPClassUID")) == _ULTRASOUND and int(header.get("NumberOfFrames") or 1) > 1


def film(frames: Sequence[Frame]) -> tuple[list[int], NDArray[np.float64], tuple[Note, ...]]:
    """Arrange the frames of a film as they follow each other: returns as `stack`.

    The affine shows them as they were taken, in the pixels' spacing where there is one, and 1 mm apart.
    """
    down, right = frames[0].spacing or (1.0, 1.0)
    if not min(down, right) > 0:
        raise DamagedScan("DICOM: expected a PixelSpacing above 0, found another; export it again")
    text = f"{len(frames)} frames of a film are read one by one: the third axis is time"
    return [*range(len(frames))], _LPS_TO_RAS @ np.diag([right, down, 1.0, 1.0]), (Note("film", text),)


def is_reconstructed(header: Dataset) -> bool:
    """Whether it has slices of nuclear medicine that were reconstructed for one detector (PS3.3 C.8.4.15)."""
    image_type: Any = header.get("ImageType") or ()
    return (
        len(image_type) > 2
        and image_type[2] == "RECON TOMO"
        and len(header.get("DetectorInformationSequence") or ()) == 1
    )


def _detected(header: Dataset, count: int) -> tuple[Dataset, ...]:
    """The place of each slice of a reconstruction, from that of the first; empty where there is none.

    A positive spacing between slices leads along the normal of the first, a negative one against it.
    """
    if not is_reconstructed(header):
        return ()
    detector = (header.DetectorInformationSequence[0],)
    position = _numbers(detector, "ImagePositionPatient", 3)
    orientation = _numbers(detector, "ImageOrientationPatient", 6)
    gap = _numbers((header,), "SpacingBetweenSlices", 1)
    vector = _numbers((header,), "SliceVector", count)
    # The number of a slice is repeated where frames differ by more, such as their energy or time.
    if position is None or orientation is None or gap is None or vector is None:
        return ()
    if sorted(vector) != [*range(1, count + 1)]:
        return ()
    normal = np.cross(orientation[:3], orientation[3:])
    places = []
    for number in vector:
        place = Dataset()
        place.ImagePositionPatient = [*(position + (number - 1) * gap[0] * normal)]
        place.ImageOrientationPatient = [*orientation]
        places.append(place)
    return tuple(places)


def _groups(items: Any) -> tuple[Dataset, ...]:
    """The macros in the first item of a functional groups sequence."""
    return (
        tuple(macro for element in items[0] if element.VR == "SQ" for macro in element.value[:1])
        if items
        else ()
    )


def _numbers(groups: Sequence[Dataset], keyword: str, count: int) -> NDArray[np.float64] | None:
    for group in groups:
        try:
            value = group.get(keyword)
            if value is None or value == "":
                continue
            numbers = np.atleast_1d(np.array(value, np.float64))
        except ValueError:  # a decimal comma, say
            numbers = np.array([])
        if numbers.shape != (count,) or not np.isfinite(numbers).all():
            raise DamagedScan(f"DICOM: expected {count} numbers as {keyword}, found others; export it again")
        return numbers
    return None


def is_placed(frames: Sequence[Frame]) -> bool:
    """Whether any frame has a position and an orientation in the patient."""
    return any(frame.position is not None and frame.orientation is not None for frame in frames)


def stack(frames: Sequence[Frame]) -> tuple[list[int], NDArray[np.float64], tuple[Note, ...]]:
    """Sort frames to a stack.

    Returns:
        The indices of the frames in slice order, the affine [4, 4] (column, row, slice) -> RAS in mm,
        and notes.

    Raises:
        UnsupportedScan: the frames are no regular stack of parallel slices. DamagedScan: unusable numbers.
    """
    _check_placed(frames)
    orientation, spacing = _common_plane(frames)
    row, column = orientation[:3], orientation[3:]
    normal = np.cross(row, column)
    positions = np.array([frame.position for frame in frames])
    along = positions @ normal
    order = [int(i) for i in np.argsort(along, kind="stable")]
    notes: tuple[Note, ...] = ()
    if len(frames) == 1:
        step, notes = _thickness(frames[0], normal)
    else:
        step, notes = _step([frames[i] for i in order], positions[order], along[order], normal)
    affine = np.eye(4)
    # Rows of the image are apart by the first spacing and run along the second cosines.
    affine[:3, 0], affine[:3, 1] = row * spacing[1], column * spacing[0]
    affine[:3, 2], affine[:3, 3] = step, positions[order[0]]
    return order, _LPS_TO_RAS @ affine, notes


def place(frames: Sequence[Frame]) -> tuple[list[int], int, NDArray[np.float64]]:
    """Place frames that may share planes and leave planes out, as those of a SEG.

    Returns the plane of each frame, the number of planes, and the affine as `stack` does. Raises as `stack`.
    """
    _check_placed(frames)
    along = np.array([_along(frame) for frame in frames])
    first = {round(value, 2): i for i, value in reversed(list(enumerate(along.tolist())))}
    kept = [frames[i] for _, i in sorted(first.items())]
    levels = np.array(sorted(first))
    gaps = np.diff(levels)
    if gaps.size and gaps.max() > 1.1 * gaps.min():
        # Some planes are left out.
        steps = _steps(gaps)
        _, affine, _ = stack(kept[:1])
        step = (_position(kept[-1]) - _position(kept[0])) / steps.sum()
        affine[:3, 2] = _LPS_TO_RAS[:3, :3] @ step
        count = int(steps.sum()) + 1
        gap = float((levels[-1] - levels[0]) / steps.sum())
    else:
        _, affine, _ = stack(kept)
        count, gap = len(kept), float(gaps.mean()) if gaps.size else 1.0
    return [round((value - float(levels[0])) / gap) for value in along.tolist()], count, affine


def _steps(gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many planes each gap goes on. The smallest is of one plane, or of more where the others say so."""
    for planes in range(1, _MOST_LEFT_OUT + 2):
        usual = float(gaps.min()) / planes
        tolerance = 2 * _ROUNDING_MM + _ROUNDING_GAP * usual
        if planes > 1 and tolerance > usual / 4:
            break  # nearly every gap would be a multiple
        steps = np.rint(gaps / usual)
        if np.abs(gaps - steps * usual).max() <= tolerance:
            return steps
    raise UnsupportedScan("SEG: its planes are unevenly spaced; send the mask as NIfTI")


def _check_placed(frames: Sequence[Frame]) -> None:
    unplaced = sum(frame.position is None or frame.orientation is None for frame in frames)
    if unplaced:
        raise UnsupportedScan(
            f"DICOM: {unplaced} of {len(frames)} slices have no position or orientation in the patient; send "
            "a series as the scanner stored it"
        )


def _position(frame: Frame) -> NDArray[np.float64]:
    assert frame.position is not None
    return frame.position


def _along(frame: Frame) -> float:
    assert frame.orientation is not None
    return float(_position(frame) @ np.cross(frame.orientation[:3], frame.orientation[3:]))


def _common_plane(frames: Sequence[Frame]) -> tuple[NDArray[np.float64], tuple[float, float]]:
    orientation, spacing = frames[0].orientation, frames[0].spacing
    assert orientation is not None
    others = [
        f for f in frames if f.orientation is not None and np.abs(f.orientation - orientation).max() > _COSINE
    ]
    if others:
        localisers = sum("LOCALIZER" in (frame.find("ImageType") or ()) for frame in frames)
        angle = max(_angle(orientation, frame.orientation) for frame in others)
        what = (
            f"{localisers} of them localisers (scout images); leave those out"
            if localisers
            else ("so they are no stack; send one parallel series")
        )
        raise UnsupportedScan(
            f"DICOM: expected parallel slices, found {len(others)} of {len(frames)} turned against the first "
            f"by up to {angle:.1f}°, {what}"
        )
    row, column = orientation[:3], orientation[3:]
    lengths = np.linalg.norm(row), np.linalg.norm(column)
    if min(lengths) < 0.99 or max(lengths) > 1.01 or abs(float(row @ column)) > 0.01:
        raise DamagedScan(
            f"DICOM: expected an orientation of two perpendicular unit vectors, found lengths "
            f"{lengths[0]:.3f} and {lengths[1]:.3f} with product {float(row @ column):.3f}; export it again"
        )
    if spacing is None or min(spacing) <= 0:
        raise UnsupportedScan("DICOM: the slices have no valid PixelSpacing; export the series again")
    unlike = sum(f.spacing is None or not np.allclose(f.spacing, spacing, rtol=1e-3) for f in frames)
    if unlike:
        raise UnsupportedScan(
            f"DICOM: {unlike} of {len(frames)} slices have another pixel spacing than {spacing[0]:g} x "
            f"{spacing[1]:g} mm; send one series"
        )
    return orientation / np.repeat(lengths, 3), spacing


def _angle(one: Any, other: Any) -> float:
    normals = [np.cross(o[:3], o[3:]) for o in (one, other)]
    lengths = np.linalg.norm(normals[0]) * np.linalg.norm(normals[1])
    cosine = float(normals[0] @ normals[1]) / max(float(lengths), 1e-9)
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def _thickness(frame: Frame, normal: NDArray[np.float64]) -> tuple[NDArray[np.float64], tuple[Note, ...]]:
    thickness = _numbers(frame.groups, "SliceThickness", 1)
    if thickness is not None and thickness[0] > 0:
        text = "the series is one slice; its thickness stands for the spacing"
        return normal * thickness[0], (Note("one-slice", text),)
    return normal, (
        Note("thickness-assumed", "the series is one slice without a thickness; 1 mm is assumed"),
    )


def _step(
    frames: Sequence[Frame],
    positions: NDArray[np.float64],
    along: NDArray[np.float64],
    normal: NDArray[np.float64],
) -> tuple[NDArray[np.float64], tuple[Note, ...]]:
    """The vector from slice to slice of sorted slices, in mm LPS, and notes.

    Refuses what is no regular stack.
    """
    count, gaps = len(positions), np.diff(along)
    places = 1 + int((gaps > _SAME_PLACE_MM).sum())
    if places < count:
        raise UnsupportedScan(_repeated(frames, places, count))
    _check_gaps(gaps, along)
    step: NDArray[np.float64] = (positions[-1] - positions[0]) / (count - 1)
    gap = float(step @ normal)
    sideways = float(np.linalg.norm(step - gap * normal))
    angle = float(np.degrees(np.arctan2(sideways, gap)))
    if angle > _MOST_TILT_DEGREES:
        raise UnsupportedScan(
            f"DICOM: each slice is shifted sideways by {sideways:.2f} mm for {gap:.2f} mm along the stack "
            f"({angle:.1f}°, more than a gantry tilts); send a series with regular positions"
        )
    tolerance = max(2 * _ROUNDING_MM, _ROUNDING_GAP * gap)
    line = positions[0] + np.arange(count)[:, None] * step
    off = np.linalg.norm(positions - line, axis=1)
    if off.max() > tolerance:
        worst = int(off.argmax())
        raise UnsupportedScan(
            f"DICOM: slice {worst + 1} of {count} is {off[worst]:.2f} mm away from the regular stack of gap "
            f"{gap:.2f} mm; send a series with regular positions, or resample it first"
        )
    if angle <= _TILT_DEGREES or sideways * (count - 1) <= 2 * _ROUNDING_MM:
        return step, ()
    text = f"the gantry was tilted by {angle:.1f}°: slices and mask are where they were acquired"
    return step, (Note("gantry-tilt", text),)


def _check_gaps(gaps: NDArray[np.float64], along: NDArray[np.float64]) -> None:
    usual = float(np.median(gaps))
    tolerance = max(2 * _ROUNDING_MM, _ROUNDING_GAP * usual)
    # Rounding may not hide a gap that is wrong by half itself.
    wrong = np.flatnonzero(np.abs(gaps - usual) > min(tolerance, usual / 2))
    if not wrong.size:
        return
    first, widest = int(wrong[0]), float(gaps[wrong].max())
    missing = np.rint(gaps[wrong] / usual) - 1
    if (missing >= 1).all() and (np.abs(gaps[wrong] - (missing + 1) * usual) <= 2 * tolerance).all():
        raise UnsupportedScan(
            f"DICOM: {int(missing.sum())} slices are missing: slices are {usual:.2f} mm apart, and "
            f"{widest:.2f} mm between slices {first + 1} and {first + 2} of {len(along)}; "
            "send the whole series"
        )
    raise UnsupportedScan(
        f"DICOM: expected evenly spaced slices, found gaps of {gaps.min():.2f} to {gaps.max():.2f} mm "
        f"(usually {usual:.2f}); send an evenly spaced series, or resample it first"
    )


def _repeated(frames: Sequence[Frame], places: int, count: int) -> str:
    counts = Counter(str(f.groups[-1].get("SOPInstanceUID")) for f in frames if f.index == 0)
    if any(number > 1 for number in counts.values()):
        twice = sum(number - 1 for number in counts.values())
        return f"DICOM: {twice} files are there more than once; send each slice once"
    for keyword, name, unit in _DISTINCTIONS:
        values = {str(value) for f in frames if (value := f.find(keyword)) is not None}
        if 1 < len(values) <= count // 2 + 1:
            shown = ", ".join(sorted(values, key=_as_number)[:5])
            return (
                f"DICOM: {count} images at {places} positions: {len(values)} {name} ({shown}{unit}); send "
                "one of them at a time"
            )
    return (
        f"DICOM: {count} images at {places} positions: {count - places} slices are there twice or belong to "
        "another time point; send one image per position"
    )


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
