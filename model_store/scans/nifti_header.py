"""Parse a NIfTI header and check it against the limits, before the data are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from model_store.errors import DamagedScan, ScanTooLarge, UnsupportedScan
from model_store.scans.nifti_forms import NiftiForms
from model_store.scans.types import MIN_SIDE, Limits, Note, largest_shift

HEADER_SIZES = {348: 1, 540: 2}

# datatype code -> numpy type of one sample, and samples per voxel. Complex and 128-bit floats are
# missing: no scanner writes intensities in them.
_TYPES: dict[int, tuple[str, int]] = {
    2: ("u1", 1),
    256: ("i1", 1),
    4: ("i2", 1),
    512: ("u2", 1),
    8: ("i4", 1),
    768: ("u4", 1),
    1024: ("i8", 1),
    1280: ("u8", 1),
    16: ("f4", 1),
    64: ("f8", 1),
    128: ("u1", 3),
    2304: ("u1", 4),
}
# The last of the 32-bit floats before whole numbers are left out.
_LARGEST_OFFSET = 2**24
# As a share of a voxel; what programs round is less.
_MOST_SHIFT = 0.1
_UNITS = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}


@dataclass(frozen=True)
class NiftiHeader:
    """The fields needed to read the data.

    `samples` per voxel: 1, 3 (RGB) or 4 (RGBA). `channels` along a fourth axis, of grey voxels.
    """

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    samples: int
    channels: int
    data_offset: int
    slope: float
    intercept: float
    affine: NDArray[np.float64]
    forms: NiftiForms
    mm_per_unit: float
    notes: tuple[Note, ...]

    @property
    def data_bytes(self) -> int:
        """Size of the data after decompression."""
        return math.prod(self.shape) * self.samples * self.channels * self.dtype.itemsize


def header_version(start: bytes) -> tuple[int, str] | None:
    """(NIfTI version, byte order) from the header's size field; None if it is not a NIfTI."""
    for order in "<>":
        version = (
            HEADER_SIZES.get(int(np.frombuffer(start[:4], order + "i4")[0])) if len(start) >= 4 else None
        )
        if version is not None:
            return version, order
    return None


def parse_header(block: bytes, limits: Limits) -> NiftiHeader:
    """Check the first 348 or 540 bytes. Raises DamagedScan, UnsupportedScan, ScanTooLarge."""
    found = header_version(block)
    assert found is not None, "the caller has checked header_version"
    version, order = found
    kind: Any = nib.Nifti1Header if version == 1 else nib.Nifti2Header
    size = {1: 348, 2: 540}[version]
    if len(block) < size:
        raise DamagedScan(f"NIfTI: the file ends within its header of {size} bytes; send the whole file")
    # check=False: nibabel would silently repair headers that are rejected here.
    header = kind(block[:size], endianness=order, check=False)
    _check_magic(bytes(block), version)
    shape, channels = _shape(header, limits)
    code = int(header["datatype"])
    if code not in _TYPES:
        raise UnsupportedScan(
            f"NIfTI: expected integer, float or RGB voxels, found datatype code {code}; "
            "convert it, for example to int16 or float32"
        )
    sample, samples = _TYPES[code]
    if channels > 1 and samples > 1:
        raise UnsupportedScan("NIfTI: expected channels along the fourth axis of grey voxels, found colours")
    dtype = np.dtype(order + sample)
    slope, intercept = _scaling(header)
    mm_per_unit = _UNITS.get(int(header["xyzt_units"]) & 7, 1.0)
    affine, forms, notes = _affine(header, shape, mm_per_unit)
    parsed = NiftiHeader(
        shape=shape,
        dtype=dtype,
        samples=samples,
        channels=channels,
        data_offset=_offset(header, size),
        slope=slope,
        intercept=intercept,
        affine=affine,
        forms=forms,
        mm_per_unit=mm_per_unit,
        notes=notes,
    )
    if parsed.data_offset + parsed.data_bytes > limits.max_decompressed:
        raise ScanTooLarge(
            f"NIfTI: expected at most {limits.max_decompressed} bytes decompressed, the header announces "
            f"{parsed.data_bytes}; send a cropped volume or a smaller voxel type"
        )
    return parsed


def _check_magic(block: bytes, version: int) -> None:
    magic = block[344:348] if version == 1 else block[4:12]
    single = b"n+1\0" if version == 1 else b"n+2\0\r\n\x1a\n"
    if magic == single:
        return
    if magic[:3] in (b"ni1", b"ni2"):
        raise UnsupportedScan(
            "NIfTI: this is the header of a .hdr/.img pair, without its voxels; send both, or save them as "
            "one .nii"
        )
    raise UnsupportedScan(
        f"NIfTI: expected the magic {single!r}, found {magic!r}; of a header (.hdr) of "
        "ANALYZE send the voxels (.img) too"
    )


def _shape(header: Any, limits: Limits) -> tuple[tuple[int, int, int], int]:
    """The three sides of a volume, and the number of channels along a fourth axis."""
    dim = [int(d) for d in header["dim"]]
    if not 1 <= dim[0] <= 7:
        raise DamagedScan(f"NIfTI: expected dim[0] (the number of dimensions) in 1…7, found {dim[0]}")
    sides = dim[1 : dim[0] + 1]
    if min(sides) < 1:
        raise DamagedScan(f"NIfTI: expected positive dimensions, found {sides}; the header is damaged")
    channels = sides[3] if len(sides) > 3 else 1
    if channels > limits.max_channels or any(side > 1 for side in sides[4:]):
        if limits.max_channels > 1:
            raise UnsupportedScan(
                f"NIfTI: expected a volume with up to {limits.max_channels} channels along the fourth axis, "
                f"found {' x '.join(map(str, sides))}"
            )
        raise UnsupportedScan(
            f"NIfTI: expected one volume of up to 3 dimensions, found {' x '.join(map(str, sides))}; "
            "send one volume of the series (for example with fslroi or nibabel's slicer)"
        )
    i, j, k = (*sides[:3], 1, 1)[:3]
    if sorted((i, j, k))[1] < MIN_SIDE:
        raise DamagedScan(
            f"NIfTI: expected at least {MIN_SIDE} voxels along two axes, found {i} x {j} x {k}; "
            "send the whole volume"
        )
    if i * j * k * channels > limits.max_voxels:
        raise ScanTooLarge(
            f"NIfTI: expected at most {limits.max_voxels} voxels, the header announces {i} x {j} x {k}; "
            "crop or downsample it"
        )
    return (i, j, k), channels


def _offset(header: Any, size: int) -> int:
    offset = float(header["vox_offset"])
    # Four bytes after the header say whether extensions follow, so the data cannot start earlier.
    if not (math.isfinite(offset) and offset == int(offset) and size + 4 <= offset <= _LARGEST_OFFSET):
        raise DamagedScan(
            f"NIfTI: expected data at byte {size + 4} to {_LARGEST_OFFSET}, vox_offset is {offset:g}"
        )
    return int(offset)


def _scaling(header: Any) -> tuple[float, float]:
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    # By the standard a slope of 0 means "not scaled"; nibabel writes NaN for that.
    if slope == 0 or math.isnan(slope):
        return 1.0, 0.0
    intercept = 0.0 if math.isnan(intercept) else intercept
    if not (math.isfinite(slope) and math.isfinite(intercept)):
        raise DamagedScan(f"NIfTI: expected a finite scaling, found slope {slope}, intercept {intercept}")
    return slope, intercept


# Damaged numbers may overflow before they reach the checks, which reject the result.
@np.errstate(all="ignore")
def _affine(
    header: Any, shape: tuple[int, int, int], mm_per_unit: float
) -> tuple[NDArray[np.float64], NiftiForms, tuple[Note, ...]]:
    """The affine from sform, otherwise qform, otherwise the voxel sizes alone; both forms; and notes."""
    notes: list[Note] = []
    has_sform, has_qform = int(header["sform_code"]) > 0, int(header["qform_code"]) > 0
    if not has_sform:
        for axis in range(3):
            size = float(header["pixdim"][axis + 1])
            if shape[axis] == 1 and size == 0:
                header["pixdim"][axis + 1] = 1.0
                notes.append(
                    Note("thickness-assumed", "the slice thickness is missing from the header; 1 is assumed")
                )
            elif not (math.isfinite(size) and size > 0):
                raise DamagedScan(
                    f"NIfTI: expected a positive voxel size along axis {axis}, pixdim is {size:g}; "
                    "correct the header"
                )
    if not (has_sform or has_qform):
        notes.append(
            Note(
                "orientation-unknown",
                "the header says nothing about orientation (sform_code and qform_code are 0): "
                "rows and slices are taken as stored, x from the patient's right to left, as in ANALYZE",
            )
        )
    forms = NiftiForms.of(header)
    if forms.sform is None and forms.qform is not None and not forms.is_rotation:
        raise DamagedScan(
            "NIfTI: the header's orientation cannot be read: expected a quaternion of at most length 1, "
            f"found b, c, d = {forms.quaternion}; correct the qform"
        )
    given = forms.qform if forms.sform is None else forms.sform
    affine = np.array(header.get_base_affine(), np.float64) if given is None else given
    if not np.isfinite(affine).all():
        raise DamagedScan("NIfTI: expected a finite affine, found NaN or infinity; correct sform or qform")
    sizes = np.linalg.norm(affine[:3, :3], axis=0)
    # Relative to the voxel sizes, so that small voxels are not mistaken for a degenerate affine.
    if not (sizes > 0).all() or abs(np.linalg.det(affine[:3, :3] / sizes)) < 1e-3:
        raise DamagedScan(
            "NIfTI: expected an affine with three independent axes, found "
            f"{affine[:3, :3].round(4).tolist()}; correct sform or qform"
        )
    if sizes.max() > 1e6 or sizes.min() < 1e-6 or np.abs(affine[:3, 3]).max() > 1e9:
        raise DamagedScan(f"NIfTI: expected voxel sizes in mm, found {sizes.tolist()}; correct the header")
    pixdim = np.array(header["pixdim"][1:4], np.float64)
    if has_sform and not np.allclose(pixdim, sizes, rtol=0.02):
        notes.append(
            Note(
                "voxel-sizes-differ",
                f"voxel sizes {_by(sizes)} by the affine, {_by(pixdim)} by pixdim; those of the affine are "
                "used",
            )
        )
    if forms.sform is not None and forms.qform is not None and np.isfinite(forms.qform).all():
        shift = largest_shift(forms.sform, forms.qform, shape)
        if shift > _MOST_SHIFT * sizes.min():
            notes.append(
                Note(
                    "two-positions",
                    f"qform and sform put the scan up to {shift * mm_per_unit:.3g} mm from each other; the "
                    "sform is used, and the mask has both as the scan has them",
                )
            )
    return affine, forms, tuple(notes)


def _by(sizes: NDArray[np.float64]) -> str:
    return " x ".join(f"{size:.4g}" for size in sizes)
