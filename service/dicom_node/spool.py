"""The node's queue on disk. A killed node loses no object that it has acknowledged.

    ROOT/receiving/<hospital>/<series>/<object>      of a series that is not complete
    ROOT/ready/<id>/                                 a complete series: its objects, and hospital
    ROOT/failed/<id>/                                one that failed, and reason

Names are digests: no UID of a patient is a part of a path. A move between the folders is one rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from model_store.durable import remove_folder, sync_folder, write_durably
from model_store.scan import MOST_FILES
from service.errors import DiskFull, SettingsInvalid

# Less than this, and the queue could not be worked off.
_LEAST_FREE_BYTES = 64 * 2**20
_HOSPITAL, _REASON = "hospital", "reason"
_OBJECT_NAME = 64


@dataclass(frozen=True)
class Entry:
    """A complete series."""

    path: Path

    @property
    def id(self) -> str:
        """Its name in logs: it says nothing of the patient."""
        return self.path.name

    @property
    def hospital(self) -> str:
        """The hospital of the AE that sent it."""
        return (self.path / _HOSPITAL).read_text()

    @property
    def completed_at(self) -> float:
        """Seconds since the epoch."""
        return (self.path / _HOSPITAL).stat().st_mtime

    @property
    def objects(self) -> list[Path]:
        """Its files, in the order of their digests."""
        return sorted(path for path in self.path.iterdir() if len(path.name) == _OBJECT_NAME)


class Spool:
    """The queue, held by one process. Safe from several threads."""

    def __init__(self, root: Path, most_bytes: int) -> None:
        """Take the queue, with what is left in it. Raises SettingsInvalid if another node holds it."""
        self._root, self._most = root, most_bytes
        for name in ("receiving", "ready", "failed"):
            (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._held = (root / "lock").open("w")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._held.close()
            raise SettingsInvalid(f"another DICOM node works on {root}: one node has one queue") from None
        self._lock = threading.Lock()
        for path in [*root.rglob(".*")]:
            # Half written or half deleted by a node that was killed: never acknowledged, or delivered.
            remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)
        self._bytes = _size(root)

    def close(self) -> None:
        """Let another process have the queue."""
        self._held.close()

    def add(self, hospital: str, series: str, instance: str, content: bytes) -> str:
        """Write one object; it is on the disk when this returns. The same instance again replaces it.

        Returns:
            the key of its series, for `complete`.

        Raises:
            DiskFull: the queue or the disk has no room, or the series has too many objects.
        """
        key = f"{hospital}/{_digest(series)}"
        folder = self._root / "receiving" / key
        path = folder / _digest(instance)
        with self._lock:
            if self._bytes + len(content) > self._most:
                raise DiskFull(f"the queue of the DICOM node has its most bytes ({self._most})")
            if shutil.disk_usage(self._root).free < len(content) + _LEAST_FREE_BYTES:
                raise DiskFull("the disk of the DICOM node is full")
            if not folder.is_dir():
                folder.mkdir(mode=0o700, parents=True)
                sync_folder(folder.parent)
                sync_folder(folder.parent.parent)
            if not path.exists() and sum(1 for _ in folder.iterdir()) >= MOST_FILES:
                raise DiskFull(f"a series has its most objects ({MOST_FILES})")
            before = path.stat().st_size if path.exists() else 0
            write_durably(path, content, mode=0o600)
            self._bytes += len(content) - before
        return key

    def receiving(self) -> Iterator[tuple[str, float]]:
        """The series that are not complete: (key, seconds since the last object)."""
        now = time.time()
        for folder in sorted((self._root / "receiving").glob("*/*/")):
            yield f"{folder.parent.name}/{folder.name}", now - folder.stat().st_mtime

    def complete(self, key: str) -> Entry:
        """Make a series ready. An object of it that comes later begins a new one."""
        folder = self._root / "receiving" / key
        entry = Entry(self._root / "ready" / uuid.uuid4().hex)
        with self._lock:
            write_durably(folder / _HOSPITAL, folder.parent.name.encode(), mode=0o600)
            folder.rename(entry.path)
            sync_folder(entry.path.parent)
            sync_folder(folder.parent)
        return entry

    def ready(self) -> list[Entry]:
        """The complete series, the oldest first."""
        # Half deleted ones begin with a dot.
        found = [Entry(path) for path in (self._root / "ready").glob("[!.]*")]
        return sorted(found, key=lambda entry: entry.completed_at)

    def finish(self, entry: Entry) -> None:
        """Delete a series that was delivered."""
        with self._releasing(entry.path):
            # Its mark first: a folder that is half deleted is not sent again as a series.
            aside = entry.path.with_name(f".{entry.id}")
            entry.path.rename(aside)
            remove_folder(aside)

    def fail(self, entry: Entry, why: str) -> None:
        """Set a series aside for an operator, who may move its folder back to `ready`."""
        write_durably(entry.path / _REASON, why.encode(), mode=0o600)
        entry.path.rename(self._root / "failed" / entry.id)
        sync_folder(self._root / "failed")

    def sweep(self, lifetime_seconds: float) -> None:
        """Delete series that failed long ago."""
        for path in (self._root / "failed").iterdir():
            if time.time() - path.stat().st_mtime > lifetime_seconds:
                with self._releasing(path):
                    remove_folder(path)

    @contextmanager
    def _releasing(self, path: Path) -> Iterator[None]:
        size = _size(path)
        yield
        with self._lock:
            self._bytes -= size


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _size(root: Path) -> int:
    """Bytes of the objects, which alone are counted when they arrive: of no hospital or reason."""
    total = 0
    for folder, _, names in os.walk(root):
        total += sum((Path(folder) / name).stat().st_size for name in names if len(name) == _OBJECT_NAME)
    return total
