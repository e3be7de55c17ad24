"""Read an RTSTRUCT as a mask on the grid of its scan: a voxel is in an ROI where its centre is in a contour.

A voxel may be in several ROIs, so voxel values are numbers of sets of ROIs, 0 is none.
`model_store.preprocessing.by_labels` gives them the values of a task. An ROI that cannot be read is refused
there: most of the ROIs of a plan are of no interest to a task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset

from model_store.errors import DamagedScan, MaskMismatch, ScanTooLarge, UnsupportedScan
from model_store.scans.dicom.contours import Points, crossings, filled, window_of
from model_store.scans.dicom.deidentify import mapped
from model_store.scans.dicom.files import read_dataset, reported
from model_store.scans.types import Limits, Roi, Scan, Segment, Structures, printed

# RT Structure Set Storage.
RTSTRUCT_CLASS: Final = "1.2.840.10008.5.1.4.1.1.481.3"
MOST_ROIS, MOST_CONTOURS, MOST_POINTS = 1000, 20_000, 2_000_000
# Sets of ROIs that voxels are in: far more than of organs and targets.
_MOST_SETS = 10_000
# What filling costs: pixels of all contours per voxel of the limit, where a row that an edge crosses counts
# as some pixels; and such rows of one contour, which are in memory at once.
_MOST_FILLED, _CROSSING, _MOST_CROSSINGS = 4, 16, 2**22
# Share of the gap between planes by which a contour may be off its plane, and by which it may not be flat.
_OFF_PLANE = 0.2
# Pixels by which a contour may reach beyond its image.
_BEYOND = 1.0
_CONTOUR_DATA = 0x30060050
_CLOSED, _XOR = "CLOSED_PLANAR", "CLOSEDPLANAR_XOR"
_OTHER_TYPES = ("POINT", "OPEN_PLANAR", "OPEN_NONPLANAR", "INTERPOLATED_PLANAR")
_TO_RAS = np.array([-1.0, -1.0, 1.0])


class _Unusable(Exception):
    """Why an ROI is no part of the mask: what was expected and found, without its name."""


@dataclass(frozen=True)
class _Contour:
    """A contour [N, 3] in mm, LPS, or why it is none that can be filled."""

    points: Points
    xor: bool = False
    problem: str = ""


def is_rtstruct(data: bytes) -> bool:
    """Whether it is an RTSTRUCT, by the class in its file header."""
    return data[128:132] == b"DICM" and f"{RTSTRUCT_CLASS}\0".encode() in data[:1024]


def read_rtstruct(data: bytes, limits: Limits, scan: Scan, key: bytes | None = None) -> Scan:
    """Read the contours on the planes of their scan. `key`: that by which the UIDs of the scan were mapped.

    Raises UnsupportedScan for an image without a position, MaskMismatch for contours of another series,
    DamagedScan, ScanTooLarge.
    """
    dataset = read_dataset(data, limits, "the RTSTRUCT", pixels=False)
    if scan.affine is None or not scan.is_volume or scan.film:
        raise UnsupportedScan(
            "RTSTRUCT: contours have places in the patient, and this scan has none; send the mask as PNG"
        )
    with reported("the RTSTRUCT"):
        _check_series(dataset, scan, key)
        named = list(dataset.get("StructureSetROISequence") or ())
        contours = _contours_of(dataset)
        codes = _codes_of(dataset)
        if not named:
            raise MaskMismatch("RTSTRUCT: expected an ROI, found none; export it with the structures")
        if len(named) > MOST_ROIS:
            raise ScanTooLarge(f"RTSTRUCT: expected at most {MOST_ROIS} ROIs, found {len(named)}")
        numbers = [int(item.ROINumber) for item in named]
        if len({*numbers}) < len(numbers):
            raise DamagedScan("RTSTRUCT: two ROIs have one number; export it again")
        axis = _axis(scan, contours.values())
        grid = _Grid(scan, axis, limits)
        rois: list[Roi] = []
        for item, number in zip(named, numbers, strict=True):
            segment = Segment.of(item.get("ROIName"), *codes.get(number, ("", "")))
            try:
                _check_frame(item, scan, key)
                gaps = grid.add(len(rois), contours.get(number, []))
                rois.append(Roi(segment, number, gaps=gaps))
            except _Unusable as error:
                rois.append(Roi(segment, number, problem=str(error)))
    structures = Structures(tuple(rois), tuple(grid.sets))
    return Scan(grid.voxels(), scan.affine, "dicom-rtstruct", scan.mm_per_unit, structures=structures)


def _names(uid: object, key: bytes | None) -> set[str]:
    """A UID as it is, after de-identification, and after another: a cohort's scan may be kept again."""
    if key is None:
        return {str(uid)}
    once = mapped(str(uid), key)
    return {str(uid), once, mapped(once, key)}


def _check_series(dataset: Dataset, scan: Scan, key: bytes | None) -> None:
    """Raise MaskMismatch unless the contours are of the scan's series, where both say which it is."""
    # The channels of a scan are several series on one grid.
    if scan.acquisition is None or not scan.acquisition.series or scan.channel_names:
        return
    found = [
        series.get("SeriesInstanceUID")
        for frame in dataset.get("ReferencedFrameOfReferenceSequence") or ()
        for study in frame.get("RTReferencedStudySequence") or ()
        for series in study.get("RTReferencedSeriesSequence") or ()
    ]
    if found and not any(scan.acquisition.series in _names(uid, key) for uid in found):
        raise MaskMismatch(
            f"RTSTRUCT: expected contours on the images of this scan, found those of {len(found)} other "
            "series; send the RTSTRUCT of the scan's series, or the series that it was drawn on"
        )


def _check_frame(item: Dataset, scan: Scan, key: bytes | None) -> None:
    own = item.get("ReferencedFrameOfReferenceUID")
    if own and scan.frame_of_reference and scan.frame_of_reference not in _names(own, key):
        raise _Unusable("expected contours in the scan's frame of reference, found another")


def _contours_of(dataset: Dataset) -> dict[int, list[_Contour]]:
    """The contours of each ROI, by its number."""
    found: dict[int, list[_Contour]] = {}
    items = [
        (int(roi.ReferencedROINumber), contour)
        for roi in dataset.get("ROIContourSequence") or ()
        for contour in roi.get("ContourSequence") or ()
    ]
    if len(items) > MOST_CONTOURS:
        raise ScanTooLarge(f"RTSTRUCT: expected at most {MOST_CONTOURS} contours, found {len(items)}")
    points = 0
    for number, item in items:
        raw = item.get_item(_CONTOUR_DATA) if _CONTOUR_DATA in item else None
        value: Any = b"" if raw is None or raw.value is None else raw.value
        points += (value.count(b"\\") if isinstance(value, bytes) else len(value)) // 3 + 1
        if points > MOST_POINTS:
            raise ScanTooLarge(f"RTSTRUCT: expected at most {MOST_POINTS} points of contours, found more")
        found.setdefault(number, []).append(_contour(item, value))
    return found


def _contour(item: Dataset, value: Any) -> _Contour:
    kind = str(item.get("ContourGeometricType") or "").strip()
    nothing = np.empty((0, 3))
    if kind not in (_CLOSED, _XOR):
        said = kind if kind in _OTHER_TYPES else "one of another type"
        return _Contour(nothing, problem=f"expected closed contours ({_CLOSED} or {_XOR}), found {said}")
    try:
        numbers = np.array(value.split(b"\\") if isinstance(value, bytes) else [*value], np.float64)
    except ValueError:
        numbers = np.array([np.nan])
    if len(numbers) % 3 or not np.isfinite(numbers).all():
        return _Contour(nothing, problem="expected three numbers for each point of a contour, found others")
    points = numbers.reshape(-1, 3)
    announced = item.get("NumberOfContourPoints")
    if announced is not None and int(announced) != len(points):
        return _Contour(nothing, problem=f"a contour announces {int(announced)} points and has {len(points)}")
    return _Contour(points, kind == _XOR)


def _codes_of(dataset: Dataset) -> dict[int, tuple[str, str]]:
    """The code and coding scheme of each ROI that has one, by its number."""
    found: dict[int, tuple[str, str]] = {}
    for item in dataset.get("RTROIObservationsSequence") or ():
        for code in (item.get("RTROIIdentificationCodeSequence") or ())[:1]:
            value = printed(code.get("CodeValue") or code.get("LongCodeValue"))
            found[int(item.ReferencedROINumber)] = value, printed(code.get("CodingSchemeDesignator"))
    return found


def _indices(points: Points, scan: Scan) -> Points:
    """Points in mm, LPS, as indices of the scan's voxels."""
    assert scan.affine is not None
    back = np.linalg.inv(scan.affine)
    return np.asarray((points * _TO_RAS / scan.mm_per_unit) @ back[:3, :3].T + back[:3, 3])


def _axis(scan: Scan, contours: Iterable[Sequence[_Contour]]) -> int:
    """The axis of the scan across the planes of the contours. The slices of DICOM are along the last."""
    if scan.format == "dicom" or scan.from_dicom:
        return 2
    votes = [
        int(np.ptp(_indices(each.points, scan), axis=0).argmin())
        for own in contours
        for each in own
        if len(each.points) > 2
    ]
    return int(np.bincount(votes).argmax()) if votes else 2


class _Grid:
    """The voxels of a scan, to which ROIs are added: an array [planes, rows, columns] across `axis`."""

    def __init__(self, scan: Scan, axis: int, limits: Limits) -> None:
        self._scan = scan
        self._across, self._columns, self._rows = axis, *(each for each in range(3) if each != axis)
        self._axes = (self._across, self._rows, self._columns)
        self._values = np.zeros([scan.grid[each] for each in self._axes], np.uint16)
        self._left = _MOST_FILLED * limits.max_voxels
        self.sets: list[tuple[int, ...]] = [()]
        self._known: dict[tuple[int, ...], int] = {(): 0}

    def add(self, roi: int, contours: Sequence[_Contour]) -> int:
        """Add an ROI; return how many planes between its first and its last have none of it.

        Raises _Unusable, before anything is added; ScanTooLarge.
        """
        planes: dict[int, list[tuple[Points, bool]]] = {}
        for contour in contours:
            if contour.problem:
                raise _Unusable(contour.problem)
            if len(contour.points):
                place, points = self._placed(contour.points)
                planes.setdefault(place, []).append((points, contour.xor))
        drawn = {place: self._filled(place, own) for place, own in planes.items()}
        for place, inside in drawn.items():
            self._put(roi, place, inside)
        return max(planes) - min(planes) + 1 - len(planes) if planes else 0

    def voxels(self) -> NDArray[np.uint16]:
        """The numbers of the sets, [I, J, K, 1]."""
        voxels = self._values.transpose([self._axes.index(each) for each in range(3)])[..., None]
        voxels.flags.writeable = False
        return voxels

    def _placed(self, points: Points) -> tuple[int, Points]:
        """The plane of a contour, and its points there (column, row)."""
        scan = self._scan
        assert scan.affine is not None
        indices = _indices(points, scan)
        sides = np.linalg.norm(scan.affine[:3, :3], axis=0) * scan.mm_per_unit
        along, gap = indices[:, self._across], float(sides[self._across])
        planes = self._values.shape[0]
        if np.ptp(along) > _OFF_PLANE:
            raise _Unusable(
                f"expected contours in the planes of the scan's slices, found one that spans "
                f"{np.ptp(along) * gap:.2f} mm across them"
            )
        place = round(float(along.mean()))
        off = float(np.abs(along - place).max())
        if off > _OFF_PLANE:
            raise _Unusable(
                f"expected contours in the planes of the scan's slices, which are {gap:.2f} mm apart, found "
                f"one {off * gap:.2f} mm off the nearest"
            )
        if not 0 <= place < planes:
            beyond = (-place if place < 0 else place - planes + 1) * gap
            raise _Unusable(f"expected contours inside the scan, found one {beyond:.2f} mm beyond its slices")
        flat = indices[:, [self._columns, self._rows]]
        last = np.array(self._values.shape[:0:-1]) - 1
        out = np.maximum(-0.5 - flat, flat - last - 0.5).max(axis=0)
        if out.max() > _BEYOND:
            axis = int(out.argmax())
            mm = out[axis] * sides[(self._columns, self._rows)[axis]]
            raise _Unusable(
                f"expected contours inside the scan, found one that reaches {mm:.2f} mm beyond it"
            )
        return place, flat

    def _filled(self, place: int, contours: Sequence[tuple[Points, bool]]) -> NDArray[np.bool_]:
        """The pixels of an ROI in a plane [rows, columns]: of contours in each other the inner is a hole."""
        shape = self._values.shape[1:]
        for points, _ in contours:
            _, _, height, width = window_of(points, shape)
            crossed = crossings(points)
            self._left -= height * width + _CROSSING * crossed
            if self._left < 0 or crossed > _MOST_CROSSINGS:
                raise ScanTooLarge("RTSTRUCT: its contours are too long or too many; send fewer structures")
        by_parity = any(xor for _, xor in contours)
        if not by_parity and len({_plain(points) for points, _ in contours}) < len(contours):
            raise _Unusable(f"a contour in slice {place + 1} is there twice; expected each once")
        parts = [filled(points, shape) for points, _ in contours]
        inside, on = np.zeros(shape, bool), np.zeros(shape, bool)
        for part in sorted(parts, key=lambda each: -np.count_nonzero(each.inside)):
            height, width = part.inside.shape
            window = np.s_[part.top : part.top + height, part.left : part.left + width]
            both = np.count_nonzero(inside[window] & part.inside)
            if not by_parity and both not in (0, np.count_nonzero(part.inside)):
                raise _Unusable(
                    f"two contours in slice {place + 1} overlap in part; expected contours that are apart, "
                    "or one inside the other as its hole"
                )
            inside[window] ^= part.inside
            on[window] |= part.on
        return inside | on

    def _put(self, roi: int, place: int, inside: NDArray[np.bool_]) -> None:
        values = self._values[place]
        there = values[inside]
        for old in np.unique(there).tolist():
            members = (*self.sets[old], roi)
            if members not in self._known:
                if len(self.sets) >= _MOST_SETS:
                    raise ScanTooLarge(
                        f"RTSTRUCT: expected at most {_MOST_SETS} ways in which ROIs overlap, found more"
                    )
                self._known[members] = len(self.sets)
                self.sets.append(members)
            there[values[inside] == old] = self._known[members]
        values[inside] = there


def _plain(points: Points) -> bytes:
    """The same for the same contour, wherever it begins and whichever way it goes."""
    rounded = np.round(points, 3) + 0.0
    return rounded[np.lexsort(rounded.T)].tobytes()
