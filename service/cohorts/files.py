"""The files of a cohort: STATE/cohorts/<cohort id>/<sha256>, readable by their owner only.

An upload is written to a temporary name and flushed before its row is committed, and a file is deleted before
the deletion of its row is committed. A crash can leave a file without a row, which `sweep` deletes.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from model_store.digest import sha256
from model_store.durable import remove_folder, sync_folder
from service.errors import CohortDeleted

# A received upload is written within seconds. An older temporary file was left by a killed process.
_ASIDE_LIFETIME_SECONDS = 3600.0


@dataclass(frozen=True)
class ScanFile:
    """A scan of a cohort, or its mask: the client's name, its file, and the digest the file should have.

    `what` stands before the name in errors.
    """

    name: str
    path: Path
    sha256: str
    what: str = "scan"

    def read(self) -> bytes:
        """Read the file. Raises CohortDeleted if it is missing or its digest differs."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError as error:
            raise CohortDeleted(
                f"{self.what} '{self.name}' is not on the disk any more: upload the cohort again"
            ) from error
        if sha256(data) != f"sha256:{self.sha256}":
            raise CohortDeleted(
                f"{self.what} '{self.name}' was changed on the disk since its upload: upload it again"
            )
        return data


class CohortFolder:
    """The folder of one cohort. Files are named by digest, so no path has a part that a client wrote."""

    def __init__(self, root: Path, cohort_id: str) -> None:
        self.path = root / cohort_id

    def scan(self, sha256: str) -> Path:
        """Path of the scan with this digest (64 hexadecimal digits)."""
        return self.path / sha256

    def keep(self, aside: Path, sha256: str) -> None:
        """Move a file of `write_aside` into the cohort."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        aside.replace(self.scan(sha256))
        sync_folder(self.path)
        sync_folder(self.path.parent)

    def remove(self, sha256: str) -> None:
        """Delete one scan, if it exists."""
        with suppress(FileNotFoundError):
            self.scan(sha256).unlink()
            sync_folder(self.path)

    def delete(self) -> None:
        """Delete every scan, if there are any."""
        remove_folder(self.path)

    def sweep(self, known: Collection[str]) -> int:
        """Delete the orphaned files, those without a row, and return their number."""
        found = [path for path in self.path.iterdir() if path.name not in known] if self.path.is_dir() else []
        for path in found:
            path.unlink()
        return len(found)


def write_aside(root: Path, chunks: Iterable[bytes]) -> Path:
    """Write and flush a file outside any cohort. Raises OSError if the disk is full."""
    folder = _aside(root)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / uuid.uuid4().hex
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def sweep_aside(root: Path) -> None:
    """Delete the partial files of killed processes."""
    for path in _aside(root).glob("*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ASIDE_LIFETIME_SECONDS:
                path.unlink()


def _aside(root: Path) -> Path:
    return root / ".incoming"
