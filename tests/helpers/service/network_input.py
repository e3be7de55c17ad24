"""Pictures as files, and what a network sees of them, written a second time as the documentation says it:
z-scores over the picture on its own grid, then bilinear resizing (a triangle as wide as the larger pixel).
In float64, and of Locum's own code nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def file_of(pixels: NDArray[np.uint8], kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


def nifti_of(pixels: NDArray[np.uint8], make_nifti: Callable[..., bytes]) -> bytes:
    """An axial volume of one slice. Its first axis runs to the right and its second one to the front; a
    picture's columns run to the patient's left, its rows to the back."""
    voxels = pixels[::-1, ::-1].swapaxes(0, 1)[:, :, None]
    if pixels.ndim == 3:
        voxels = np.ascontiguousarray(voxels).view([(name, "u1") for name in "RGB"])[..., 0]
    return make_nifti(voxels)


def triangle(old: int, new: int) -> NDArray[np.float64]:
    """[new, old]: each new pixel's weights of the old ones."""
    step = old / new
    reach = max(step, 1.0)
    weights = np.zeros((new, old))
    for i in range(new):
        for j in range(old):
            weights[i, j] = max(0.0, 1 - abs(j + 0.5 - (i + 0.5) * step) / reach)
    return weights / weights.sum(axis=1, keepdims=True)


def seen(pixels: NDArray[Any], size: tuple[int, int]) -> NDArray[np.float32]:
    """[R, C] or [R, C, 3] -> [1, 1 or 3, H, W]."""
    values = pixels.astype(np.float64)
    values = (values - values.mean()) / values.std()
    if values.ndim == 2:
        values = values[..., None]
    rows, columns = triangle(values.shape[0], size[0]), triangle(values.shape[1], size[1])
    return np.einsum("yr,rcn,xc->nyx", rows, values, columns)[None].astype(np.float32)
