"""A scan format for tests: a grey volume as a zip of PNG slices, or as a folder of them.

Voxels are 1 mm wide, slice k is `voxels[:, :, k]`, and the affine is the identity.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model_store.errors import DamagedScan, ScanTooLarge
from model_store.scan import Limits, Parts, Scan, encode_png
from model_store.scans.formats import Format, Series
from model_store.scans.png import SIGNATURE, read_png


def slices(volume: NDArray[np.uint8]) -> dict[str, bytes]:
    """[I, J, K] to the files of a stack, by name."""
    return {f"{k:03d}.png": encode_png(volume[:, :, k]) for k in range(volume.shape[2])}


def zipped(files: Parts) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def _is_slice(data: bytes) -> bool:
    return data.startswith(SIGNATURE)


def _names(data: bytes) -> Sequence[str]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.namelist()
    except zipfile.BadZipFile:
        return ()


def _is_stack(data: bytes) -> bool:
    names = _names(data) if data.startswith(b"PK\x03\x04") else ()
    return bool(names) and all(name.endswith(".png") for name in names)


def _read(data: bytes, limits: Limits) -> Scan:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        if size > limits.max_decompressed:
            raise ScanTooLarge(f"stack: expected at most {limits.max_decompressed} bytes, found {size}")
        try:
            return _read_slices({name: archive.read(name) for name in archive.namelist()}, limits)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DamagedScan(f"stack: cannot be unpacked ({error}); send it again") from error


def _read_slices(files: Parts, limits: Limits) -> Scan:
    images: list[NDArray[np.uint8]] = []
    voxels = 0
    for name, data in sorted(files.items()):
        if not _is_slice(data):
            raise DamagedScan(f"stack: expected PNG slices, found {name}; remove it")
        image = read_png(data, limits).voxels
        voxels += image.size
        if voxels > limits.max_voxels:
            raise ScanTooLarge(f"stack: expected at most {limits.max_voxels} voxels, found more")
        images.append(image[..., 0])
    if len({image.shape for image in images}) != 1:
        raise DamagedScan("stack: expected slices of one size")
    volume = np.stack(images, axis=-1)[..., None]
    volume.flags.writeable = False
    return Scan(volume, np.eye(4), "png-stack")


PNG_STACK = Format(
    "png-stack",
    ("a zip of PNG slices",),
    (".zip",),
    _is_stack,
    _read,
    lambda data, _limits, _key: data,
    Series(_is_slice, _read_slices),
)
