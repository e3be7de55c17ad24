"""Encode a scan or a mask as a viewer in a browser reads it: as the service reads it, on the same grid.

    a volume   .nii.gz with the scan's own voxel order and affine, in millimetres
    an image   an 8-bit PNG of its own size

Readers of NIfTI differ in which of a header's orientations they take, and browsers read neither DICOM nor
TIFF. A viewer that shows the service's own reading cannot show a mask mirrored against it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.errors import MaskMismatch
from model_store.preprocessing import display_image, label_values
from model_store.scan import Scan, encode_nifti, encode_png

# What viewers in browsers read. The others become 32-bit floats, which suffice for display.
_SHOWN = ("u1", "i1", "u2", "i2", "i4", "f4")


def encode_scan(scan: Scan) -> tuple[bytes, str]:
    """Encode the scan; return it with its media type."""
    if scan.affine is None:
        return _png(display_image(scan))
    voxels = scan.voxels
    # One channel of several is shown: three of them are no colours.
    if scan.channels not in (1, 3) or scan.channel_names:
        voxels = voxels[..., :1]
    if voxels.shape[-1] == 1:
        voxels = voxels[..., 0]
        if voxels.dtype.str[1:] not in _SHOWN:
            voxels = voxels.astype(np.float32)
    return _nifti(voxels, scan)


def encode_mask(mask: Scan, scan: Scan) -> tuple[bytes, str]:
    """Encode a mask that is on the scan's grid, with the scan's affine. Raises MaskMismatch beyond 255."""
    values = label_values(mask)
    if values[0] < 0 or values[-1] > 255:
        raise MaskMismatch(
            f"the mask has values {values[0]} to {values[-1]}, and a viewer shows 0 to 255: read the stored "
            "file instead"
        )
    labels = np.rint(mask.voxels).astype(np.uint8)
    return _png(labels) if scan.affine is None else _nifti(labels[..., 0], scan)


def _nifti(voxels: NDArray[Any], scan: Scan) -> tuple[bytes, str]:
    assert scan.affine is not None
    in_mm = np.diag([scan.mm_per_unit] * 3 + [1.0]) @ scan.affine
    return encode_nifti(voxels, in_mm), "application/gzip"


def _png(pixels: NDArray[np.uint8]) -> tuple[bytes, str]:
    return encode_png(pixels[..., 0] if pixels.shape[-1] == 1 else pixels), "image/png"
