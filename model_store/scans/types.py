"""A decoded scan, and the limits on the size of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.errors import DamagedScan, ScanTooLarge
from model_store.scans.nifti_forms import NiftiForms

# A smaller side means a damaged header, an icon or an attack, not a picture of an organ.
MIN_SIDE = 8

# Far above any intensity, far below the values for which sums of squares overflow float32 in a network.
MAX_INTENSITY = 1e15

# No scan has so few values, of so many that are looked at.
_VALUES_OF_MASKS, _LOOKED_AT = 8, 2**16

# Characters of a segment's name or code.
_MOST_TEXT = 64

# The files of a scan that is stored as several: file name -> content.
Parts = Mapping[str, bytes]


@dataclass(frozen=True)
class Limits:
    """Upper bounds for a scan, checked before anything of that size is allocated.

    `max_bytes` of the file as it is sent (the sum over several files), `max_pixels` of an image (width x
    height), `max_voxels` of a volume, and `max_decompressed` bytes after decompression. `pixels_for` says in
    an error what `max_pixels` follows from, such as "for a network's input of 64 x 64". `max_channels` of a
    4-D NIfTI file, of which the fourth axis is read as channels: 1 where a task has not declared it so
    (`Task.stacked`), since it may be time, too. `max_growth` and `max_windows` are of `preprocessing.price`:
    how many times a scan's voxels a network's grid may have, and the windows that a network may take.
    """

    max_bytes: int = 512 * 2**20
    max_pixels: int = 4096 * 4096
    max_voxels: int = 512**3
    max_decompressed: int = 2**30
    pixels_for: str = ""
    max_channels: int = 1
    max_growth: int = 8
    max_windows: int = 10_000


@dataclass(frozen=True)
class Note:
    """A remark on how a file was read: on its container or header, and never on what the scan shows.

    Attributes:
        name: its code, as answers list it: lower case with hyphens.
        text: one sentence for a person, with no value of the header that names a patient.
    """

    name: str
    text: str


def printed(said: Any) -> str:
    """What a header says, without what cannot be printed, and not too long."""
    return "".join(filter(str.isprintable, str(said or ""))).strip()[:_MOST_TEXT]


@dataclass(frozen=True)
class Segment:
    """What a DICOM SEG or .seg.nrrd says of a segment: its name and the code of its type, or nothing ("")."""

    name: str = ""
    code: str = ""
    scheme: str = ""

    @classmethod
    def of(cls, name: Any, code: Any, scheme: Any) -> Segment:
        """A segment of what a file says, without what cannot be printed."""
        return cls(*map(printed, (name, code, scheme)))

    def __str__(self) -> str:
        scheme = f" of {self.scheme}" if self.scheme not in ("", "SCT") else ""
        said = [repr(self.name)] * bool(self.name) + [f"code {self.code}{scheme}"] * bool(self.code)
        return f"({', '.join(said) or 'without a name'})"


@dataclass(frozen=True)
class Roi:
    """An ROI of an RTSTRUCT: what it says of itself, and its number.

    `problem` says why its contours cannot be read, "" where they can; `gaps` is how many planes between its
    first and its last have no contour.
    """

    segment: Segment
    number: int
    problem: str = ""
    gaps: int = 0


@dataclass(frozen=True)
class Structures:
    """The ROIs of an RTSTRUCT, and by the value of a voxel the places of those that it is in."""

    rois: tuple[Roi, ...]
    sets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Acquisition:
    """What a DICOM series says of how it was acquired; "" and None where it does not.

    Attributes:
        maker, model, software, station: of the device (PS3.3 C.7.5.1).
        kernel: of a CT's reconstruction, else the name or kind of an MR's sequence.
        slice_mm: thickness of a slice.
        series: UID of the series.
    """

    maker: str = ""
    model: str = ""
    software: str = ""
    station: str = ""
    kernel: str = ""
    slice_mm: float | None = None
    series: str = ""

    @property
    def device(self) -> str:
        """The device in one line: maker, model and station."""
        return " ".join(filter(None, (self.maker, self.model, self.station)))


EIGHT_BITS = Note("colours-reduced", "16 bits per colour are read as 8; only grey images keep 16")


@dataclass(frozen=True)
class Scan:
    """A decoded scan.

    Attributes:
        voxels: image [H, W, C] or volume [I, J, K, C] in the file's own grid and order, in any integer or
            float type; intensities are scaled as the file says (scl_slope applied). Finite. Read-only.
        affine: [4, 4] float64, voxel index -> RAS in the file's units (mm unless `mm_per_unit` says
            otherwise); None for an image.
        format: name of the format that the scan was read from, as in `model_store.scans.formats`.
        mm_per_unit: millimetres per unit of the affine, by the header's xyzt_units.
        notes: remarks on how the file was read.
        forms: both forms of a NIfTI header, of which `affine` is the sform if it is set.
        modality: of the header, such as "CT" (PS3.3 C.7.3.1.1.1); None where the format has none.
        acquisition: how it was acquired; of several channels the first. None where it is not DICOM.
        channel_names: of channels that came as files of their own, in their order; empty for others.
        from_dicom: whether each of these is a DICOM series.
        segments: what a DICOM SEG or .seg.nrrd says of its segments, by their value in the voxels.
        structures: the ROIs of an RTSTRUCT, of which the voxels are in sets; None of others.
        frame_of_reference: UID of a DICOM series' frame of reference; "" where it has none.
        film: whether the third axis is time: images one after the other, without a place in the patient.
    """

    voxels: NDArray[Any]
    affine: NDArray[np.float64] | None
    format: str
    mm_per_unit: float = 1.0
    notes: tuple[Note, ...] = ()
    forms: NiftiForms | None = None
    modality: str | None = None
    acquisition: Acquisition | None = None
    channel_names: tuple[str, ...] = ()
    from_dicom: bool = False
    segments: Mapping[int, Segment] = field(default_factory=dict)
    structures: Structures | None = None
    frame_of_reference: str = ""
    film: bool = False

    @property
    def other_affine(self) -> NDArray[np.float64] | None:
        """The qform of a NIfTI that has both forms; None otherwise."""
        return None if self.forms is None or self.forms.sform is None else self.forms.qform

    @property
    def affine_by_itk(self) -> NDArray[np.float64] | None:
        """The affine by which ITK reads the file; `affine` of other formats, and where ITK refuses."""
        by_itk = None if self.forms is None else self.forms.by_itk
        return by_itk if by_itk is not None and np.isfinite(by_itk).all() else self.affine

    @property
    def is_volume(self) -> bool:
        """Whether the scan has a position in the patient and can be sliced."""
        return self.voxels.ndim == 4

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour; of a volume with several channels, their number."""
        return int(self.voxels.shape[-1])

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of a mask of this scan: [H, W] or [I, J, K]."""
        return tuple(map(int, self.voxels.shape[:-1]))

    @property
    def values_of_mask(self) -> int | None:
        """The number of different values where they are as few as a mask has, 2 to 8; None of a scan."""
        found = len(np.unique(self.voxels.ravel()[:: -(-self.voxels.size // _LOOKED_AT)]))
        return found if 1 < found <= _VALUES_OF_MASKS else None

    @property
    def voxel_volume_ml(self) -> float | None:
        """Millilitres per voxel; None for an image and for a film, which have no spacing."""
        if self.affine is None or self.film:
            return None
        return float(abs(np.linalg.det(self.affine[:3, :3]))) * self.mm_per_unit**3 / 1000


def largest_shift(one: NDArray[np.float64], other: NDArray[np.float64], grid: tuple[int, ...]) -> float:
    """Return how far two affines put a voxel of a volume from each other at most, in their unit."""
    corners = np.array(np.meshgrid(*[(0.0, side - 1.0) for side in grid], [1.0])).reshape(4, -1)
    return float(np.linalg.norm(((one - other) @ corners)[:3], axis=0).max())


def check_sides(width: int, height: int, limits: Limits, name: str) -> None:
    """Check the sides of an image. Raises DamagedScan for a tiny one, ScanTooLarge beyond `max_pixels`."""
    if min(width, height) < MIN_SIDE:
        raise DamagedScan(
            f"{name}: expected at least {MIN_SIDE} pixels a side, found {width} x {height}; send the original"
        )
    if width * height > limits.max_pixels:
        why = f" {limits.pixels_for}" if limits.pixels_for else ""
        raise ScanTooLarge(
            f"{name}: expected at most {limits.max_pixels} pixels{why}, found {width} x {height}; "
            "crop it or send a smaller version"
        )


def check_finite(voxels: NDArray[Any], name: str) -> None:
    """Raise DamagedScan for NaN, infinity or absurd intensities.

    Minimum and maximum propagate NaN and need no temporary array.
    """
    if voxels.dtype.kind != "f":
        return
    low, high = float(voxels.min()), float(voxels.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise DamagedScan(
            f"{name}: expected finite intensities, found NaN or infinity; "
            "replace them (background is often stored so) and send the scan again"
        )
    if max(-low, high) > MAX_INTENSITY:
        raise DamagedScan(
            f"{name}: expected intensities within ±{MAX_INTENSITY:g}, found {low:g} to {high:g}; "
            "the byte order or the scaling of the file is probably wrong"
        )
