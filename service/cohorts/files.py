"""The files of a cohort: STATE/cohorts/<cohort id>/<sha256>, readable by their owner only.

A file is written aside and flushed before its row is there, and removed before its row is gone for good, so
that whatever is killed when, no row is without its scan and no scan stays without anybody knowing: what has
no row is swept.
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

# An upload is written within seconds once it was received; what is older was left by a killed process.
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
        """Its bytes. Raises CohortDeleted when they are not there, or are others."""
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
    """Making one touches nothing. Files are called by digests: no path has a part that a client wrote."""

    def __init__(self, root: Path, cohort_id: str) -> None:
        self.path = root / cohort_id

    def scan(self, sha256: str) -> Path:
        """Where the scan with this digest (64 hexadecimal digits) lies."""
        return self.path / sha256

    def keep(self, aside: Path, sha256: str) -> None:
        """Make a file that was written aside part of the cohort."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        aside.replace(self.scan(sha256))
        sync_folder(self.path)
        sync_folder(self.path.parent)

    def remove(self, sha256: str) -> None:
        """Remove one scan. One that is not there is no error."""
        with suppress(FileNotFoundError):
            self.scan(sha256).unlink()
            sync_folder(self.path)

    def delete(self) -> None:
        """Remove every scan. Nothing there is no error."""
        remove_folder(self.path)

    def sweep(self, known: Collection[str]) -> int:
        """Remove the files that no row names; how many there were."""
        found = [path for path in self.path.iterdir() if path.name not in known] if self.path.is_dir() else []
        for path in found:
            path.unlink()
        return len(found)


def write_aside(root: Path, chunks: Iterable[bytes]) -> Path:
    """Write and flush a file that is no cohort's yet. Raises OSError when the disk is full."""
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
    """Remove what a killed process left half written."""
    for path in _aside(root).glob("*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ASIDE_LIFETIME_SECONDS:
                path.unlink()


def _aside(root: Path) -> Path:
    return root / ".incoming"
