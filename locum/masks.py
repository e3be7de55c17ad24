"""Read the parts of a `multipart` answer: the report as JSON, and the mask as NRRD or PNG."""

from __future__ import annotations

import io
import math
import re
import zlib
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.spatialimages import HeaderDataError
from numpy.typing import NDArray

from locum.answers import Report, Segmentation, pillow
from locum.core import loads
from locum.errors import AnswerInvalid
from locum.reading import read

# Four times what the service answers at most by default.
MOST_VOXELS = 1 << 29
_GZIP = 31
_VECTOR = re.compile(r"\(([^()]*)\)")


def segmentation(body: bytes, media_type: str, header: nib.Nifti1Header | None = None) -> Segmentation:
    """Read the answer of `output=multipart`.

    Args:
        body: of the answer.
        media_type: its Content-Type, with the boundary.
        header: of the scan, if it was a NIfTI: the mask gets its forms.

    Raises:
        AnswerInvalid: it is another answer.
    """
    parts = _parts(body, media_type)
    if not {"params", "image"} <= parts.keys():
        raise AnswerInvalid(f"expected the parts params and image, found {', '.join(parts) or media_type}")
    try:
        report = read(Report, loads(parts["params"]))
    except ValueError as error:
        raise AnswerInvalid(f"params: expected JSON, found {error}") from None
    content = parts["image"]
    if not content.startswith(b"NRRD"):
        return Segmentation(_picture(content), report, None)
    voxels, affine = read_nrrd(content)
    try:
        return Segmentation(voxels, report, _image(voxels, affine, header))
    except (ValueError, HeaderDataError) as error:
        raise AnswerInvalid(f"image: expected a mask with a position, found none: {error}") from None


def _picture(content: bytes) -> NDArray[np.uint8]:
    image = pillow()
    try:
        with image.open(io.BytesIO(content)) as picture:
            return np.asarray(picture, np.uint8)
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise AnswerInvalid(f"image: expected a PNG mask, found one that cannot be read: {error}") from None


def read_nrrd(content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Read a mask [I, J, K] and its affine to RAS+ in millimetres, as the service writes NRRD. Raises
    AnswerInvalid.
    """
    head, _, data = content.partition(b"\n\n")
    fields = dict(
        line.split(": ", 1) for line in head.decode("ascii", "replace").splitlines()[1:] if ": " in line
    )
    try:
        if fields["type"] != "uint8" or fields["space"] != "left-posterior-superior":
            raise ValueError(f"type {fields['type']}, space {fields['space']}")
        shape = [int(size) for size in fields["sizes"].split()]
        columns = [*_VECTOR.findall(fields["space directions"]), *_VECTOR.findall(fields["space origin"])]
        lps = np.array([[float(value) for value in column.split(",")] for column in columns]).T
        raw = _unpacked(data, math.prod(shape)) if fields["encoding"] == "gzip" else data
        voxels = np.frombuffer(raw, np.uint8).reshape(shape, order="F")
        affine = np.vstack([np.diag([-1.0, -1.0, 1.0]) @ lps, [0, 0, 0, 1]])
        if not np.isfinite(affine).all() or not np.linalg.det(affine[:3, :3]):
            raise ValueError(f"directions that span no volume, {fields['space directions']:.80}")
    except (KeyError, ValueError, zlib.error) as error:
        raise AnswerInvalid(f"image: expected an NRRD mask, found one that cannot be read: {error}") from None
    return voxels, affine


def _unpacked(data: bytes, size: int) -> bytes:
    """`size` bytes at most, of which a mask has one for each voxel. Raises ValueError, zlib.error."""
    if not 0 < size <= MOST_VOXELS:
        raise ValueError(f"expected 1 to {MOST_VOXELS} voxels, found {size}")
    stream = zlib.decompressobj(wbits=_GZIP)
    raw = stream.decompress(data, size + 1)
    if len(raw) != size or not stream.eof:
        raise ValueError(f"expected {size} voxels, found {'more' if len(raw) > size else len(raw)}")
    return raw


def _image(
    voxels: NDArray[np.uint8], affine: NDArray[np.float64], header: nib.Nifti1Header | None
) -> nib.Nifti1Image:
    made = nib.Nifti1Image(voxels, affine)
    if header is None:
        made.set_qform(affine, code=1, strip_shears=True)
        made.set_sform(affine, code=1)
        made.header.set_xyzt_units("mm")
        return made
    # As the scan has them, numbers and unit alike: readers that prefer another form than nibabel agree too.
    for name in (
        "qform_code",
        "sform_code",
        "quatern_b",
        "quatern_c",
        "quatern_d",
        "qoffset_x",
        "qoffset_y",
        "qoffset_z",
    ):
        made.header[name] = header[name]
    for name in ("srow_x", "srow_y", "srow_z"):
        made.header[name] = header[name]
    made.header["pixdim"][:4] = header["pixdim"][:4]
    unit = header.get_xyzt_units()[0]
    made.header.set_xyzt_units(unit if unit != "unknown" else "mm")
    return nib.Nifti1Image(voxels, made.header.get_best_affine(), made.header)


def _parts(body: bytes, media_type: str) -> dict[str, bytes]:
    # RFC 7578's parts are MIME's, which the standard library reads; `HTTP` keeps long lines whole.
    head = f"Content-Type: {media_type}\r\n\r\n".encode("ascii", "replace")
    message = BytesParser(policy=HTTP).parsebytes(head + body)
    found: dict[str, bytes] = {}
    for part in message.iter_parts() if message.is_multipart() else ():
        name: Any = part.get_param("name", header="Content-Disposition")
        payload = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(payload, bytes):
            found[name] = payload
    return found
