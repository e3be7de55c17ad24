"""Where an upload lies while its request is answered: in private nameless files that die with the request.

A scan is a patient's. So a small one stays in memory and a large one goes to a file that has no name from the
moment it is opened: when the request ends, however it ends (answered, refused, client gone, process killed),
the system takes it back.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

# Up to this size an upload stays in memory and never touches the disk.
IN_MEMORY_BYTES = 1024 * 1024
_PREFIX = "upload-"


class Upload:
    """One uploaded file: its size, its sha256, and its bytes until `close`.

    Files of one field that may be repeated lie in one `shared` file, one after the other: a descriptor and a
    buffer for each of thousands would be more than a process may have.
    """

    def __init__(self, spool: Path, shared: Upload | None = None) -> None:
        self._file: IO[bytes] = shared._file if shared is not None else _spooled(spool)
        self._hash = hashlib.sha256()
        self._start = 0
        self.size = 0

    @property
    def sha256(self) -> str:
        """`sha256:` and the hexadecimal digest of what was received."""
        return f"sha256:{self._hash.hexdigest()}"

    def write(self, data: bytes, /) -> None:
        """Append. Blocking: call it in a thread."""
        if self.size == 0:
            self._start = self._file.tell()
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def read(self) -> bytes:
        """All of it. Blocking: call it in a thread."""
        self._file.seek(self._start)
        return self._file.read(self.size)

    def chunks(self) -> Iterator[bytes]:
        """All of it, piece by piece. Blocking: call it in a thread."""
        for begin in range(0, self.size, IN_MEMORY_BYTES):
            self._file.seek(self._start + begin)
            yield self._file.read(min(IN_MEMORY_BYTES, self.size - begin))

    def close(self) -> None:
        """Give the bytes up."""
        self._file.close()

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prepare_spool(spool: Path) -> None:
    """Make the folder, readable by its owner alone, and sweep what a killed process may have left in it."""
    spool.mkdir(parents=True, exist_ok=True)
    spool.chmod(0o700)
    # Where the system cannot open a file without a name, it has one for an instant before it is unlinked.
    for leftover in spool.glob(f"{_PREFIX}*"):
        leftover.unlink(missing_ok=True)


def _spooled(spool: Path) -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES, dir=str(spool), prefix=_PREFIX)
