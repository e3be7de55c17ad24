"""What NRRD and MetaImage share: a header in text, and behind it one array, raw or compressed.

A reader of a format makes a `Raster` of the header, which is checked before anything of its size is
allocated.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model_store.errors import DamagedScan, ScanTooLarge, UnsupportedScan
from model_store.scans.inflate import BoundedGunzip, inflated
from model_store.scans.types import MIN_SIDE, Limits, Note, Scan, check_finite

Triple = tuple[float, float, float]

ORIENTATION_UNKNOWN = Note(
    "orientation-unknown",
    "the header says nothing about orientation: the first axis is taken to the patient's left, the second "
    "to posterior, as ITK does",
)
# Millimetres per unit of length.
UNITS = {"": 1.0, "mm": 1.0, "cm": 10.0, "m": 1000.0, "um": 0.001, "µm": 0.001}
# Deflate needs at least 2 bits for 258 bytes. A header that announces more than that is wrong.
_DEFLATE_MAX_RATIO = 1032
# Some writers pad the end of the file.
_TRAILING_ALLOWED = 1024
# Headers of zlib and of gzip, which zlib tells apart.
_EITHER = 32 + zlib.MAX_WBITS
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\Z")


@dataclass(frozen=True)
class Raster:
    """The array of a file, as its header announces it.

    Attributes:
        name: of the format, for errors.
        shape: voxels along the three axes, the first fastest.
        channels: values per voxel.
        inner: whether the values of a voxel are adjacent; otherwise one volume follows the other.
        colours: whether they are red, green, blue, and perhaps transparency.
        dtype: of a value, in the file's byte order.
        columns: where each axis leads per voxel, in the file's unit: to the patient's left, posterior and
            superior (LPS).
        origin: of the first voxel's centre, the same.
        offset: of the array in the file.
        packed: how it is compressed.
        mm_per_unit: millimetres per unit of `columns` and `origin`.
        modality, notes: as of `Scan`.
    """

    name: str
    shape: tuple[int, int, int]
    channels: int
    inner: bool
    colours: bool
    dtype: np.dtype[Any]
    columns: tuple[Triple, Triple, Triple]
    origin: Triple
    offset: int
    packed: Literal["gzip", "zlib"] | None = None
    mm_per_unit: float = 1.0
    modality: str | None = None
    notes: tuple[Note, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.channels * self.dtype.itemsize

    @property
    def affine(self) -> NDArray[np.float64]:
        """[4, 4], voxel index -> RAS in the file's unit."""
        made = np.eye(4)
        made[:3, :3] = np.array(self.columns).T
        made[:3, 3] = self.origin
        return np.diag([-1.0, -1.0, 1.0, 1.0]) @ made

    def check(self, limits: Limits) -> None:
        """Compare the header with the limits. Raises DamagedScan, UnsupportedScan, ScanTooLarge."""
        by = " x ".join(map(str, self.shape))
        if min(self.shape) < 1 or sorted(self.shape)[1] < MIN_SIDE:
            raise DamagedScan(
                f"{self.name}: expected at least {MIN_SIDE} voxels along two axes, found {by}; send the "
                "whole volume"
            )
        if not self.colours and self.channels > limits.max_channels:
            raise UnsupportedScan(
                f"{self.name}: expected one volume of 3 dimensions, found {self.channels} values for each of "
                f"{by} voxels; send one of them. A segmentation of 3D Slicer of which segments overlap has "
                "several layers: export it as a labelmap"
            )
        if math.prod(self.shape) * (1 if self.colours else self.channels) > limits.max_voxels:
            raise ScanTooLarge(
                f"{self.name}: expected at most {limits.max_voxels} voxels, the header announces {by}; crop "
                "or downsample it"
            )
        if self.offset + self.size > limits.max_decompressed:
            raise ScanTooLarge(
                f"{self.name}: expected at most {limits.max_decompressed} bytes decompressed, the header "
                f"announces {self.size}; send a cropped volume or a smaller voxel type"
            )
        _check_affine(self.name, self.affine)

    def array(self, data: bytes) -> memoryview:
        """The array's bytes, decompressed. Raises DamagedScan where there are fewer or more."""
        packed = memoryview(data)[self.offset :]
        if self.packed is not None and self.size > _DEFLATE_MAX_RATIO * len(packed):
            raise DamagedScan(
                f"{self.name}: the header announces {self.size} bytes, more than {len(packed)} compressed "
                "bytes can hold; send the whole file"
            )
        if self.packed == "gzip":
            content = np.empty(self.size + _TRAILING_ALLOWED + 1, np.uint8).data
            content = content[: BoundedGunzip(bytes(packed)).read_into(content)]
        elif self.packed == "zlib":
            content = memoryview(self._inflated(packed))
        else:
            content = packed
        if not self.size <= len(content) <= self.size + _TRAILING_ALLOWED:
            raise DamagedScan(
                f"{self.name}: the header announces {self.size} bytes of voxels, found "
                f"{'more' if len(content) > self.size else len(content)}; send the whole file"
            )
        return content[: self.size]

    def _inflated(self, packed: memoryview) -> bytearray:
        content = bytearray()
        try:
            for part in inflated(zlib.decompressobj(_EITHER), [packed]):
                content += part
                if len(content) > self.size + _TRAILING_ALLOWED:
                    break
        except zlib.error as error:
            raise DamagedScan(
                f"{self.name}: the compressed data are damaged ({error}); send the file again, unchanged"
            ) from error
        return content

    def scan(self, data: bytes, limits: Limits, name: str) -> Scan:
        """Read the file's scan, of the format `name`. Raises as `check` and `array`."""
        self.check(limits)
        stored = np.frombuffer(self.array(data), self.dtype)
        voxels: NDArray[Any]
        if self.inner:
            voxels = np.moveaxis(stored.reshape((self.channels, *self.shape), order="F"), 0, -1)
        else:
            voxels = stored.reshape((*self.shape, self.channels), order="F")
        notes = list(self.notes)
        if self.colours and self.channels == 4:
            if int(voxels[..., 3].min()) < 255:
                notes.append(Note("alpha-ignored", "the transparency (alpha) of the volume is ignored"))
            voxels = voxels[..., :3]
        check_finite(voxels, self.name)
        if not voxels.dtype.isnative:
            voxels = voxels.astype(voxels.dtype.newbyteorder("="), order="K")
        voxels.flags.writeable = False
        return Scan(voxels, self.affine, name, self.mm_per_unit, tuple(notes), modality=self.modality)


def _check_affine(name: str, affine: NDArray[np.float64]) -> None:
    sizes = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.isfinite(affine).all() or not (sizes > 0).all():
        raise DamagedScan(
            f"{name}: expected directions of positive length, found {sizes.tolist()}; correct them"
        )
    # Relative to the voxel sizes, so that small voxels are not mistaken for a degenerate affine.
    if abs(np.linalg.det(affine[:3, :3] / sizes)) < 1e-3:
        raise DamagedScan(
            f"{name}: expected three independent axes, found {affine[:3, :3].round(4).tolist()}; correct the "
            "header"
        )
    if sizes.max() > 1e6 or sizes.min() < 1e-6 or np.abs(affine[:3, 3]).max() > 1e9:
        raise DamagedScan(f"{name}: expected voxel sizes in mm, found {sizes.tolist()}; correct the header")


def numbers(name: str, field: str, text: str, count: int) -> tuple[float, ...]:
    """Exactly `count` numbers of a field, separated by spaces or commas. Raises DamagedScan."""
    parts = text.replace(",", " ").split()
    if len(parts) != count or not all(map(_NUMBER.match, parts)):
        raise DamagedScan(
            f"{name}: {field}: expected {count} numbers, found {text[:64]!r}; correct the header"
        )
    return tuple(map(float, parts))


def wholes(name: str, field: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """`least` to `most` whole numbers of a field, of at most nine digits each. Raises DamagedScan."""
    parts = text.split()
    if not least <= len(parts) <= most or not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        count = str(least) if least == most else f"{least} to {most}"
        raise DamagedScan(
            f"{name}: {field}: expected {count} whole numbers, found {text[:64]!r}; correct the header"
        )
    return tuple(map(int, parts))
