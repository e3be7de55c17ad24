"""Kinds of shift that neither training nor practice draws, each at one strength.

The protocol's third amendment (`docs/results/protocol-outside.md`) has the definitions. A slice is scaled to
0..1 by the scan's range, changed, and scaled back.

Legend: H rows, W columns, C channels or slices.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from model_store.scan import Scan
from personalization.seeds import seed_of

Slices: TypeAlias = NDArray[np.float64]
Change: TypeAlias = Callable[[Slices, np.random.Generator], Slices]

_QUALITY = 15
_WINDOW = 1 / 12  # of the local contrast: a share of the longer side
_FLOOR = 0.05
_GHOST = 0.5  # factor of every second row of k-space
_DARKENING = 0.8
_RADIUS = 0.02  # of the defocus: a share of the longer side
_SPECKLE = 0.4


def _jpeg(slices_HWC: Slices, _: np.random.Generator) -> Slices:
    def compressed(slice_HW: Slices) -> Slices:
        stream = io.BytesIO()
        Image.fromarray(np.round(255 * slice_HW).astype(np.uint8)).save(stream, "JPEG", quality=_QUALITY)
        return np.asarray(Image.open(stream), dtype=np.float64) / 255

    return _each(slices_HWC, compressed)


def _local_contrast(slices_HWC: Slices, _: np.random.Generator) -> Slices:
    sigma = _WINDOW * max(slices_HWC.shape[:2])
    over = (sigma, sigma, 0)
    centred = slices_HWC - ndimage.gaussian_filter(slices_HWC, over)
    deviation = np.sqrt(ndimage.gaussian_filter(centred**2, over))
    return _to_range(centred / (deviation + _FLOOR))


def _curve(slices_HWC: Slices, _: np.random.Generator) -> Slices:
    return (1 - np.cos(1.5 * math.pi * slices_HWC)) / 2


def _ghosting(slices_HWC: Slices, _: np.random.Generator) -> Slices:
    spectrum = np.fft.fft2(slices_HWC, axes=(0, 1))
    spectrum[1::2] *= _GHOST
    return np.abs(np.fft.ifft2(spectrum, axes=(0, 1)))


def _vignette(slices_HWC: Slices, _: np.random.Generator) -> Slices:
    rows, columns = (np.linspace(-1, 1, side) for side in slices_HWC.shape[:2])
    squared = (rows[:, None] ** 2 + columns[None, :] ** 2) / 2
    return slices_HWC * (1 - _DARKENING * squared)[..., None]


def _defocus(slices_HWC: Slices, _: np.random.Generator) -> Slices:
    radius = max(1, round(_RADIUS * max(slices_HWC.shape[:2])))
    across = np.arange(-radius, radius + 1)
    disk = (across[:, None] ** 2 + across[None, :] ** 2 <= radius**2).astype(np.float64)
    blurred: Slices = ndimage.convolve(slices_HWC, (disk / disk.sum())[..., None], mode="nearest")
    return blurred


def _speckle(slices_HWC: Slices, generator: np.random.Generator) -> Slices:
    return slices_HWC * (1 + _SPECKLE * generator.standard_normal(slices_HWC.shape))


KINDS: Mapping[str, Change] = {
    "jpeg": _jpeg,
    "local contrast": _local_contrast,
    "curve": _curve,
    "ghosting": _ghosting,
    "vignette": _vignette,
    "defocus": _defocus,
    "speckle": _speckle,
}


def shifted(kind: str, site: str, seed: int) -> Callable[[Scan], Scan]:
    """What changes a scan of the hospital; speckle is drawn from its seed, afresh for every scan."""
    generator = np.random.default_rng(seed_of(seed, "kind of shift", kind, site))

    def change(scan: Scan) -> Scan:
        voxels: NDArray[Any] = np.asarray(scan.voxels, dtype=np.float64)
        low, span = voxels.min(), max(float(np.ptp(voxels)), 1e-6)
        seen = KINDS[kind]((voxels - low) / span, generator) * span + low
        return replace(scan, voxels=seen.astype(np.float32))

    return change


def _each(slices_HWC: Slices, change: Callable[[Slices], Slices]) -> Slices:
    return np.stack([change(slices_HWC[..., number]) for number in range(slices_HWC.shape[2])], axis=2)


def _to_range(slices_HWC: Slices) -> Slices:
    low, high = slices_HWC.min(), slices_HWC.max()
    found: Slices = (slices_HWC - low) / max(float(high - low), 1e-6)
    return found
