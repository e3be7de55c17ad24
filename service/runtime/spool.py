"""Spool of uploads: private files without a name, deleted with their request.

A small scan stays in memory, a large one goes to a file without a name. When the request ends (answered,
rejected, client gone, process killed), the system deletes the file, since scans are patients'.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from model_store.scans import channels

# Up to this size an upload stays in memory and never touches the disk.
IN_MEMORY_BYTES = 1024 * 1024
_HEAD_BYTES = 1024
_PREFIX = "upload-"


class ScanFile(Protocol):
    """The bytes of a scan, in an upload or in a file that is kept."""

    @property
    def sha256(self) -> str:
        """`sha256:` and the hexadecimal digest of the bytes."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    def read(self) -> bytes:
        """Return all bytes. Blocking: call it in a thread."""


class Upload:
    """One uploaded file: its size, its sha256, and its bytes until `close`.

    Files of a repeated field are stored in one `shared` file, one after the other: thousands of descriptors
    and buffers would exceed a process's limits.
    """

    def __init__(self, spool: Path, shared: Upload | None = None) -> None:
        self._file: IO[bytes] = shared._file if shared is not None else _spooled(spool)
        self._hash = hashlib.sha256()
        self._start = 0
        self._received: str | None = None
        self.size = 0

    @property
    def sha256(self) -> str:
        """`sha256:` and the hexadecimal digest of the bytes."""
        return f"sha256:{self._hash.hexdigest()}"

    @property
    def received_sha256(self) -> str:
        """The digest before `replace`."""
        return self._received or self.sha256

    def write(self, data: bytes, /) -> None:
        """Append. Blocking: call it in a thread."""
        if self.size == 0:
            self._start = self._file.tell()
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def read(self) -> bytes:
        """Return all bytes. Blocking: call it in a thread."""
        self._file.seek(self._start)
        return self._file.read(self.size)

    def head(self) -> bytes:
        """Return the first bytes, which tell its format. Blocking: call it in a thread."""
        self._file.seek(self._start)
        return self._file.read(min(_HEAD_BYTES, self.size))

    def replace(self, data: bytes) -> None:
        """Put other bytes in place of those that were received. Blocking: call it in a thread."""
        self._received = self.received_sha256
        self._file.seek(0, 2)
        self._hash, self.size = hashlib.sha256(), 0
        self.write(data)

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes, piece by piece. Blocking: call it in a thread."""
        for begin in range(0, self.size, IN_MEMORY_BYTES):
            self._file.seek(self._start + begin)
            yield self._file.read(min(IN_MEMORY_BYTES, self.size - begin))

    def close(self) -> None:
        """Release the bytes."""
        self._file.close()

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pack(uploads: Sequence[Upload], spool: Path) -> Upload:
    """Pack several files as one zip, closing them. The same files in any order give the same bytes.

    Blocking: call it in a thread.
    """
    packed = Upload(spool)
    pack_into(packed.write, (upload.read() for upload in sorted(uploads, key=lambda each: each.sha256)))
    for upload in uploads:
        upload.close()
    return packed


def pack_channels(uploads: Mapping[str, Sequence[Upload]], spool: Path) -> Upload:
    """Pack the files of each channel as one zip, closing them. The same files in any order, the same bytes.

    Blocking: call it in a thread.
    """
    packed = Upload(spool)
    channels.pack_into(
        _Stream(packed.write),
        {
            name: [own.read for own in sorted(files, key=lambda each: each.sha256)]
            for name, files in uploads.items()
        },
    )
    for each in (one for many in uploads.values() for one in many):
        each.close()
    return packed


def pack_into(write: Callable[[bytes], object], files: Iterable[bytes]) -> None:
    """Write a zip of the files, in this order. Those of a scan are sorted by digest."""
    with zipfile.ZipFile(_Stream(write), "w") as archive:
        for number, content in enumerate(files):
            archive.writestr(zipfile.ZipInfo(f"{number:05d}"), content)


class _Stream:
    """The stream that zipfile expects. That it cannot seek is seen in the zip's bytes."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def write(self, data: bytes) -> int:
        self._write(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: no bytes are buffered here."""

    def close(self) -> None:
        """Do nothing: the upload stays open."""


def prepare_spool(spool: Path) -> None:
    """Create the folder, readable by its owner alone, and delete what a killed process left in it."""
    spool.mkdir(parents=True, exist_ok=True)
    spool.chmod(0o700)
    # Where the system cannot open a file without a name, it has one for an instant before it is unlinked.
    for leftover in spool.glob(f"{_PREFIX}*"):
        leftover.unlink(missing_ok=True)


def _spooled(spool: Path) -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES, dir=str(spool), prefix=_PREFIX)
