"""The two places that a NIfTI header gives a volume: qform and sform, each with a code.

The qform is a rotation, an offset and the voxel sizes: where the scanner had the volume. The sform is a
whole affine: often where a program aligned it to, such as an atlas. A code of 0 says that a form is not set.
Readers differ in the form that they take, so a mask has both as its scan has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Affine = NDArray[np.float64]

# nifti1_io.c: below it, the quaternion's first component counts as 0, and the others as its direction alone.
_HALF_TURN = 1e-7
# Square of the length of b, c and d, which is at most 1 but for rounding.
_LONGEST = 1.01
_SCANNER = 1
# ITK takes an sform as a rotation with sizes where its axes are perpendicular to this precision.
_PERPENDICULAR = 1e-4


@dataclass(frozen=True)
class NiftiForms:
    """Both forms as they are stored, in the file's units: voxel index -> RAS.

    Attributes:
        qform_code: 0 if the qform is not set.
        sform_code: 0 if the sform is not set.
        pixdim: qfac, which is negative where the third axis of the qform is reversed, and the voxel sizes.
        quaternion: b, c and d of the qform's rotation.
        offset: the qform's translation.
        rows: the three rows of the sform.
    """

    qform_code: int
    sform_code: int
    pixdim: tuple[float, ...]
    quaternion: tuple[float, ...]
    offset: tuple[float, ...]
    rows: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, header: Any) -> NiftiForms:
        """Read the forms of a header of nibabel."""
        return cls(
            int(header["qform_code"]),
            int(header["sform_code"]),
            tuple(float(size) for size in header["pixdim"][:4]),
            tuple(float(header[f"quatern_{name}"]) for name in "bcd"),
            tuple(float(header[f"qoffset_{name}"]) for name in "xyz"),
            tuple(tuple(map(float, header[f"srow_{name}"])) for name in "xyz"),
        )

    def write(self, header: Any) -> None:
        """Set both forms of a header of nibabel."""
        header["qform_code"], header["sform_code"] = self.qform_code, self.sform_code
        header["pixdim"][:4] = self.pixdim
        for name, value in zip("bcd", self.quaternion, strict=True):
            header[f"quatern_{name}"] = value
        for name, shift, row in zip("xyz", self.offset, self.rows, strict=True):
            header[f"qoffset_{name}"] = shift
            header[f"srow_{name}"] = row

    def scaled(self, ratio: float) -> NiftiForms:
        """Return the forms in a unit of which one of theirs has `ratio`."""
        qfac, *sizes = self.pixdim
        return replace(
            self,
            pixdim=(qfac, *(size * ratio for size in sizes)),
            offset=tuple(value * ratio for value in self.offset),
            rows=tuple(tuple(value * ratio for value in row) for row in self.rows),
        )

    @property
    def is_rotation(self) -> bool:
        """Whether the quaternion is one of a rotation, as far as rounding allows."""
        return math.fsum(value * value for value in self.quaternion) <= _LONGEST

    @property
    def _sizes(self) -> tuple[float, ...]:
        """The voxel sizes of pixdim, with 1 for what is none, as the standard's own library."""
        return tuple(size if 0 < size < math.inf else 1.0 for size in self.pixdim[1:])

    @property
    def sform(self) -> Affine | None:
        """The sform's affine; None if it is not set."""
        return np.array([*self.rows, (0.0, 0.0, 0.0, 1.0)]) if self.sform_code > 0 else None

    @property
    def qform(self) -> Affine | None:
        """The qform's affine, as `nifti_quatern_to_mat44` of the standard's own library; None if not set.

        A quaternion longer than 1, such as by a rounding, counts as its direction; any qfac that is not
        negative counts as 1.
        """
        if self.qform_code <= 0:
            return None
        b, c, d = self.quaternion
        square = b * b + c * c + d * d
        if 1.0 - square < _HALF_TURN:
            a, length = 0.0, math.sqrt(square)
            b, c, d = b / length, c / length, d / length
        else:
            a = math.sqrt(1.0 - square)
        rotation = np.array(
            [
                [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
                [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
                [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - c * c - b * b],
            ]
        )
        x, y, z = self._sizes
        affine = np.eye(4)
        affine[:3, :3] = rotation * [x, y, -z if self.pixdim[0] < 0 else z]
        affine[:3, 3] = self.offset
        return affine

    @property
    def by_itk(self) -> Affine | None:
        """The affine by which ITK reads the volume, as 3D Slicer and ITK-SNAP do; None where it refuses.

        It takes the qform where it is set, unless the sform is said to be the scanner's too and has no shear.
        The voxel sizes are always those of pixdim. Without either form the axes are LPS from the origin.
        """
        sizes = self._sizes
        qform, sform = self.qform, self.sform
        if sform is not None and (qform is None or self.sform_code == _SCANNER):
            axes = sform[:3, :3] / np.linalg.norm(sform[:3, :3], axis=0)
            if np.abs(axes.T @ axes - np.eye(3)).max() <= _PERPENDICULAR:
                affine = np.eye(4)
                affine[:3, :3], affine[:3, 3] = axes * sizes, sform[:3, 3]
                return affine
        if qform is None and sform is None:
            return np.diag([-sizes[0], -sizes[1], sizes[2], 1.0])
        return qform
