"""Turn what a caller has into the one file that the service takes: a path, a folder of DICOM, a nibabel
image, an array, or one of these for each channel.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeAlias

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import SpatialImage
from numpy.typing import NDArray

from locum.answers import pillow
from locum.errors import ScanInvalid

Channel: TypeAlias = str | Path | SpatialImage | NDArray[Any]
"""A path of a file or of a folder with one DICOM series, a nibabel image, or an array (a volume with its
affine). A header (.hdr) is sent with the voxels (.img) beside it.
"""

Scan: TypeAlias = Channel | Mapping[str, Channel]
"""The same, or one for each channel of a scan, by the channel's name or nnU-Net's number:
`{"T1": "t1.nii.gz", "FLAIR": "flair.nii.gz"}`. Channels share one grid.
"""

_PIECE = 2**20
# Every DICOM file has it after a preamble of 128 bytes, and some have neither.
_DICOM_AT, _DICOM = 128, b"DICM"
# A zip's earliest date: a scan's digest must not depend on when it was sent.
_NO_DATE = (1980, 1, 1, 0, 0, 0)
# A scan of two files: the end of the header's name, and that of its voxels'.
PAIRS = {".hdr": ".img", ".hdr.gz": ".img.gz"}
_CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
_NUMBER = re.compile(r"(?:(?P<case>.*)_)?(?P<number>\d{4})", re.DOTALL)


@dataclass(frozen=True)
class Upload:
    """An open file to send.

    `header` is that of a NIfTI: the mask's file gets the same forms, so that every reader puts both in one
    place.
    """

    name: str
    file: IO[bytes]
    header: nib.Nifti1Header | None = None

    def rewound(self) -> IO[bytes]:
        """The file, at its start: a retry sends it again."""
        self.file.seek(0)
        return self.file

    def pieces(self) -> Iterator[bytes]:
        """The content, piece by piece."""
        file = self.rewound()
        while piece := file.read(_PIECE):
            yield piece

    @cached_property
    def digest(self) -> hashlib._Hash:
        """SHA-256 of the content."""
        found = hashlib.sha256()
        for piece in self.pieces():
            found.update(piece)
        return found

    @property
    def sha256(self) -> str:
        """As receipts and cohorts have it."""
        return f"sha256:{self.digest.hexdigest()}"

    @property
    def repr_digest(self) -> str:
        """As a header (RFC 9530)."""
        return f"sha-256=:{base64.b64encode(self.digest.digest()).decode()}:"

    @property
    def size(self) -> int:
        """Bytes."""
        return self.file.seek(0, io.SEEK_END)


@contextmanager
def opened(scan: Scan, affine: NDArray[Any] | None = None) -> Iterator[Upload]:
    """Open a scan for sending.

    Args:
        scan: see `Scan`. Arrays are [I, J, K] with an affine, or images [H, W] and [H, W, 3] without one.
        affine: [4, 4], of an array, or of those of all channels: voxel indices to millimetres in RAS+, as
            nibabel has it.

    Raises:
        ScanInvalid: there is no such file, the folder has no DICOM, or the array is no scan.
    """
    if isinstance(scan, Mapping):
        with _of_channels(scan, affine) as upload:
            yield upload
        return
    if affine is not None and not isinstance(scan, np.ndarray):
        raise ScanInvalid("`affine` belongs to an array; a file and a nibabel image have their own")
    if isinstance(scan, np.ndarray):
        yield _of_array(scan, affine)
    elif isinstance(scan, SpatialImage):
        yield _of_image(scan)
    elif (path := Path(scan)).is_dir():
        with _zipped(_series_in(path), path.name) as upload:
            yield upload
    elif (voxels := voxels_of(path)) is not None:
        with _zipped([path, voxels], path.name) as upload:
            yield upload
    else:
        try:
            file = path.open("rb")
        except OSError as error:
            raise ScanInvalid(f"{path}: expected a scan or a folder, found: {error.strerror}") from None
        with file:
            yield Upload(path.name, file, _nifti_header(path))


def split_name(stem: str, channels: Sequence[str]) -> tuple[str, int] | None:
    """Find the case and the number of the channel in a name without suffix; None where it has none.

    `case7_FLAIR`, `case7-flair` and `case7_0001` are channel 1 of case7, for the channels T1 and FLAIR;
    `FLAIR` alone is of the case "". The service reads names so, too.
    """
    folded = stem.casefold()
    for index in sorted(range(len(channels)), key=lambda each: -len(channels[each])):
        name = channels[index].casefold()
        if folded == name:
            return "", index
        if folded.endswith((f"_{name}", f"-{name}")):
            return stem[: -len(name) - 1], index
    found = _NUMBER.fullmatch(stem)
    if found is None or int(found["number"]) >= len(channels):
        return None
    return found["case"] or "", int(found["number"])


@contextmanager
def _of_channels(channels: Mapping[str, Channel], affine: NDArray[Any] | None) -> Iterator[Upload]:
    """A zip of the folder `channels`, with a file or a series for each channel, in the order of names."""
    if wrong := [name for name in channels if _CHANNEL.fullmatch(name) is None]:
        raise ScanInvalid(
            f"channel {wrong[0]!r:.80}: expected a name of letters, digits and '-', such as T1 or 0000"
        )
    if not channels:
        raise ScanInvalid("expected a scan for each channel, found none")
    with tempfile.TemporaryFile(prefix="locum-") as file, ExitStack() as stack:
        header = None
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for number, name in enumerate(sorted(channels)):
                channel = channels[name]
                folder = None if isinstance(channel, SpatialImage | np.ndarray) else Path(channel)
                if folder is not None and folder.is_dir():
                    _add(archive, f"channels/{name}/", _series_in(folder))
                    continue
                try:
                    own = affine if isinstance(channel, np.ndarray) else None
                    upload = stack.enter_context(opened(channel, own))
                except ScanInvalid as error:
                    raise ScanInvalid(f"channel {name}: {error}") from None
                header = upload.header if number == 0 else header
                _write(archive, f"channels/{name}/00000", upload.rewound())
        yield Upload("channels.zip", file, header)


def is_dicom(path: Path) -> bool:
    """Whether the file begins as one of DICOM does."""
    with path.open("rb") as file:
        start = file.read(_DICOM_AT + len(_DICOM))
    return start[_DICOM_AT:] == _DICOM


def series_files(folder: Path) -> list[Path]:
    """The DICOM files in a folder, not in folders within it."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("."))
    return [path for path in files if is_dicom(path)]


def voxels_of(header: Path) -> Path | None:
    """The file of the voxels beside a header; None where there is none, and for every other file."""
    lower = header.name.lower()
    for own, other in PAIRS.items():
        if lower.endswith(own):
            end = other.upper() if header.name.endswith(own.upper()) else other
            voxels = header.with_name(header.name[: -len(own)] + end)
            return voxels if voxels.is_file() else None
    return None


@contextmanager
def _zipped(files: Iterable[Path], name: str) -> Iterator[Upload]:
    with tempfile.TemporaryFile(prefix="locum-") as file:
        _zip(files, file)
        yield Upload(f"{name}.zip", file)


def _series_in(folder: Path) -> list[Path]:
    files = series_files(folder)
    if not files:
        raise ScanInvalid(f"{folder}: expected the files of one DICOM series, found none: name a scan's file")
    return files


def _zip(files: Iterable[Path], target: IO[bytes]) -> None:
    # Stored, not deflated: pixels hardly shrink, and the network is faster than one core.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "", files)


def _add(archive: zipfile.ZipFile, folder: str, files: Iterable[Path]) -> None:
    for number, path in enumerate(files):
        with path.open("rb") as source:
            _write(archive, f"{folder}{number:06d}.dcm", source)


def _write(archive: zipfile.ZipFile, name: str, source: IO[bytes]) -> None:
    with archive.open(zipfile.ZipInfo(name, _NO_DATE), "w", force_zip64=True) as sink:
        while piece := source.read(_PIECE):
            sink.write(piece)


def _of_image(image: SpatialImage) -> Upload:
    if not isinstance(image, nib.Nifti1Image):
        image = nib.Nifti1Image.from_image(image)
    return Upload("scan.nii.gz", io.BytesIO(gzip.compress(image.to_bytes(), 1, mtime=0)), image.header)


def _of_array(voxels: NDArray[Any], affine: NDArray[Any] | None) -> Upload:
    if voxels.dtype == np.bool_:
        voxels = voxels.astype(np.uint8)
    if affine is not None:
        affine = np.asarray(affine, np.float64)
        if affine.shape != (4, 4) or voxels.ndim != 3:
            raise ScanInvalid(
                f"expected a volume [I, J, K] with an affine [4, 4], found {list(voxels.shape)} with "
                f"{list(affine.shape)}"
            )
        return _of_image(nib.Nifti1Image(_storable(voxels), affine))
    if voxels.ndim == 2 or (voxels.ndim == 3 and voxels.shape[2] == 3 and voxels.dtype == np.uint8):
        if voxels.dtype not in (np.uint8, np.uint16):
            raise ScanInvalid(f"expected an image of uint8 or uint16, found {voxels.dtype}: convert it")
        content = io.BytesIO()
        pillow().fromarray(np.ascontiguousarray(voxels)).save(content, "PNG", compress_level=3)
        return Upload("scan.png", content)
    raise ScanInvalid(
        f"expected an image [H, W] or a volume [I, J, K] with its `affine`, found an array "
        f"{list(voxels.shape)} of {voxels.dtype} without one"
    )


def _storable(voxels: NDArray[Any]) -> NDArray[Any]:
    """The voxels in a type that NIfTI readers know: int64 and float16 are none."""
    if voxels.dtype == np.float16:
        return voxels.astype(np.float32)
    if voxels.dtype in (np.int64, np.uint64):
        narrow = voxels.astype(np.int32)
        return narrow if np.array_equal(narrow, voxels) else voxels.astype(np.float64)
    return voxels


def _nifti_header(path: Path) -> nib.Nifti1Header | None:
    # By its name, as nibabel reads: without one, the mask's affine is in both forms.
    if not path.name.endswith((".nii", ".nii.gz")):
        return None
    try:
        found = nib.load(path).header
    except (ImageFileError, OSError, ValueError, EOFError):
        # The service says what is wrong with it.
        return None
    return found if isinstance(found, nib.Nifti1Header) else None
