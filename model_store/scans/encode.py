"""Encode masks and volumes as NIfTI, NRRD and PNG, deterministically: equal voxels give equal bytes."""

from __future__ import annotations

import gzip
import io
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model_store.scans.nifti_forms import NiftiForms

# The lowest level already shrinks a mask about a hundredfold; higher levels take longer than the network.
_COMPRESSION = 1
_NIFTI1_LONGEST = 32767
# Largest cosine between two axes: beyond it ITK takes an affine for one with a shear.
_PERPENDICULAR = 1e-4
_UNIT_CODES = {1000.0: 1, 1.0: 2, 0.001: 3}


def encode_nifti(
    voxels: NDArray[Any],
    affine: NDArray[np.float64],
    mm_per_unit: float = 1.0,
    forms: NiftiForms | None = None,
) -> bytes:
    """Encode a label map or a grey volume [I, J, K], or a colour one uint8 [I, J, K, 3], as .nii.gz.

    Both forms are `forms`, those of the scan, so that every reader puts both in one place. Without them the
    affine is in sform and, unless it has a shear, in qform. No time and no name are written, so equal voxels
    give equal bytes (with one version of zlib).
    """
    kind: Any = nib.Nifti1Header if max(voxels.shape) <= _NIFTI1_LONGEST else nib.Nifti2Header
    header = kind()
    header.set_data_dtype("RGB" if voxels.ndim == 4 else voxels.dtype)
    header.set_data_shape(voxels.shape[:3])
    if forms is None:
        # A qform cannot hold the shear of a tilted gantry, and some readers would prefer it to the sform.
        header.set_qform(affine, code=int(_is_perpendicular(affine)), strip_shears=True)
        header.set_sform(affine, code=1)
    else:
        forms.write(header)
    header["xyzt_units"] = _UNIT_CODES[mm_per_unit]
    header["cal_max"] = 0
    header["vox_offset"] = header.sizeof_hdr + 4
    header["magic"] = header.single_magic
    # The samples of one voxel are adjacent; after them the first axis varies fastest.
    samples_first = np.moveaxis(voxels, 3, 0) if voxels.ndim == 4 else voxels
    data = samples_first.astype(voxels.dtype.newbyteorder("<"), copy=False).tobytes(order="F")
    return gzip.compress(header.binaryblock + bytes(4) + data, _COMPRESSION, mtime=0)


def _is_perpendicular(affine: NDArray[np.float64]) -> bool:
    axes = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    return bool(np.abs(axes.T @ axes - np.eye(3)).max() <= _PERPENDICULAR)


def encode_nrrd(
    labels: NDArray[np.uint8], affine: NDArray[np.float64], mm_per_unit: float = 1.0, *, compress: bool = True
) -> bytes:
    """Encode a label map [I, J, K] as NRRD in millimetres, the first axis fastest.

    The voxels are in the order of the scan's own grid: the rows of a DICOM series slice by slice, as viewers
    hold them. Some viewers read the voxels alone, and only without compression. Written without a library,
    since those put the time into the header.
    """
    # NRRD has no code for RAS; LPS is what ITK reads and writes.
    lps = np.diag([-1.0, -1.0, 1.0]) @ affine[:3] * mm_per_unit
    origin, directions = _vector(lps[:, 3]), " ".join(_vector(axis) for axis in lps[:, :3].T)
    header = "\n".join(
        (
            "NRRD0004",
            "type: uint8",
            "dimension: 3",
            "space: left-posterior-superior",
            f"sizes: {' '.join(map(str, labels.shape))}",
            f"space directions: {directions}",
            "kinds: domain domain domain",
            f"encoding: {'gzip' if compress else 'raw'}",
            f"space origin: {origin}",
        )
    )
    data = np.asarray(labels, np.uint8).tobytes(order="F")
    return f"{header}\n\n".encode("ascii") + (
        gzip.compress(data, _COMPRESSION, mtime=0) if compress else data
    )


def _vector(values: NDArray[np.float64]) -> str:
    # Zero has no sign here, so that equal masks give equal bytes.
    return f"({','.join(repr(float(value) + 0.0) for value in values)})"


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode a label map or a grey image [H, W], or a colour one [H, W, 3], as an 8-bit PNG."""
    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels, np.uint8)).save(content, "PNG", compress_level=3)
    return content.getvalue()
