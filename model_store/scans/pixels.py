"""Decode the pixels of a PNG or TIFF with Pillow, after its header was checked. Channels come last."""

from __future__ import annotations

import io
import threading
import warnings
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from model_store.errors import DamagedScan, ScanError, ScanTooLarge, UnsupportedScan
from model_store.scans.types import Note, Scan, check_finite

# Pillow warns about odd but harmless metadata, which the client need not know. Warning filters are global to
# the process, so two threads must not change them at the same time.
_SILENCE = threading.Lock()


def decode_pixels(
    content: bytes,
    kind: Literal["png", "tiff"],
    notes: tuple[Note, ...] = (),
    view: type[np.generic] | None = None,
    grey_bits: int = 8,
    indexed: bool = False,
) -> Scan:
    """Decode `content`. `view` reinterprets the bits of grey samples that Pillow reads as another type.

    With `indexed`, an image with a palette of colours has its indices for values, as a mask's are. A palette
    of greys has its greys: a viewer shows them, and `task.yaml` names them.
    Grey samples of 2 and 4 bits, `grey_bits`, keep their values; Pillow spreads them over 0…255.

    Raises DamagedScan, UnsupportedScan.
    """
    try:
        spread = 255 // (2**grey_bits - 1) if grey_bits in (2, 4) else 1
        voxels = _array(content, kind, view, spread, indexed)
    except ScanError:
        raise
    except MemoryError as error:
        raise ScanTooLarge(f"{kind.upper()}: not enough memory to decode it; send a smaller image") from error
    except UnidentifiedImageError as error:
        # Its message has the address of a buffer.
        raise DamagedScan(f"{kind.upper()}: cannot be decoded; save or send it again") from error
    # Pillow raises many kinds of exceptions on hostile bytes, and the list is not documented. Each of them
    # means that the file cannot be decoded.
    except Exception as error:
        raise DamagedScan(f"{kind.upper()}: cannot be decoded ({error}); save or send it again") from error
    check_finite(voxels, kind.upper())
    voxels.flags.writeable = False
    return Scan(voxels, None, kind, notes=notes)


def _array(
    content: bytes, kind: str, view: type[np.generic] | None, spread: int, indexed: bool
) -> NDArray[Any]:
    with _SILENCE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image: Image.Image = Image.open(io.BytesIO(content), formats=(kind.upper(),))
        if kind == "tiff":  # Pillow reads the tags again while it decodes, and may warn
            image.load()
    image.load()
    if indexed and image.mode == "P" and _colours(image):
        return np.array(image)[..., None]
    if image.mode in ("P", "RGB"):
        # A transparent colour becomes an alpha channel, which is checked below. A grey value that is marked
        # transparent (often 0, in masks) keeps its value.
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    if image.mode in ("LA", "RGBA"):
        image = _opaque(image)
    if image.mode == "1":
        return np.array(image, np.uint8)[..., None]
    if image.mode in ("L", "I", "F") or image.mode.startswith("I;16"):
        grey_pixels = np.array(image)
        if not grey_pixels.dtype.isnative:
            grey_pixels = grey_pixels.astype(grey_pixels.dtype.newbyteorder("="))
        if spread > 1:
            grey_pixels = grey_pixels // spread
        return (grey_pixels if view is None else grey_pixels.view(view))[..., None]
    if image.mode == "RGB":
        return np.array(image)
    raise UnsupportedScan(
        f"{kind.upper()}: expected grey, RGB or a palette, found mode {image.mode}; save it as grey or RGB"
    )


def _colours(image: Image.Image) -> bool:
    """Whether a palette has other colours than greys. All its entries count, not those that an image uses."""
    palette = np.array(image.getpalette("RGB")).reshape(-1, 3)
    return bool((palette != palette[:, :1]).any())


def _opaque(image: Image.Image) -> Image.Image:
    alpha = image.getchannel("A")
    low, _ = alpha.getextrema()
    if float(low) < 255:  # type: ignore[arg-type]
        raise UnsupportedScan(
            "expected an opaque image, found transparent pixels, which have no defined intensity; "
            "flatten the image"
        )
    grey = image.mode == "LA"
    return image.convert("L" if grey else "RGB")
