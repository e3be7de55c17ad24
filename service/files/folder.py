"""Files in a folder that API and workers share, readable by their owner only."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from model_store.durable import remove_folder, sync_folder, write_durably

# A received upload is written within seconds. An older staged file was left by a killed process.
STAGED_LIFETIME_SECONDS = 3600.0
STAGING = ".incoming"


@dataclass(frozen=True)
class _Staged:
    root: Path
    path: Path

    def keep(self, key: str) -> None:
        """Rename the file to its key."""
        to = self.root / key
        to.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.replace(to)
        sync_folder(to.parent)
        sync_folder(to.parent.parent)


class FilesFolder:
    """`Files` in a folder, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.location = root

    def check(self) -> None:
        """Make the folder, and list it."""
        self._make_folders(self.location)
        next(self.location.iterdir(), None)

    def read(self, key: str) -> bytes | None:
        """Return a file's content; None if there is none."""
        try:
            return (self.location / key).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, key: str, content: bytes) -> None:
        """Write a file durably."""
        path = self.location / key
        self._make_folders(path.parent)
        write_durably(path, content, mode=0o600)

    def create(self, key: str, content: bytes) -> bytes:
        """Write a file durably unless there is one, and return what is there then."""
        path = self.location / key
        with suppress(FileNotFoundError):
            return path.read_bytes()
        self._make_folders(path.parent)
        drawn = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        # On disk before its link is, so that a power cut leaves no empty file.
        write_durably(drawn, content, mode=0o600)
        # A link appears whole or not at all, and never replaces the file of another process.
        with suppress(FileExistsError):
            path.hardlink_to(drawn)
        drawn.unlink()
        sync_folder(path.parent)
        return path.read_bytes()

    @contextmanager
    def stage(self, folder: str, chunks: Iterable[bytes]) -> Iterator[_Staged]:
        """Write and flush a file without a key. Raises OSError if the disk is full."""
        aside = self.location / folder / STAGING
        self._make_folders(aside)
        path = aside / uuid.uuid4().hex
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            yield _Staged(self.location, path)
        finally:
            path.unlink(missing_ok=True)

    def remove(self, *keys: str) -> None:
        """Delete files, where they exist."""
        for key in keys:
            path = self.location / key
            with suppress(FileNotFoundError):
                path.unlink()
                sync_folder(path.parent)

    def remove_folder(self, folder: str) -> None:
        """Delete every file below `folder`, if there are any."""
        remove_folder(self.location / folder)

    def names(self, folder: str) -> list[str]:
        """List the files below `folder` by their paths in it, sorted."""
        root = self.location / folder
        # Another process may delete the whole folder meanwhile.
        with suppress(FileNotFoundError):
            return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir())
        return []

    def folders(self, folder: str) -> list[tuple[str, float]]:
        """List the folders in `folder`: name, and time of the last change in seconds since the epoch."""
        root, found = self.location / folder, []
        for path in root.iterdir() if root.is_dir() else ():
            with suppress(FileNotFoundError):
                if path.is_dir():
                    found.append((path.name, path.stat().st_mtime))
        return found

    def sweep(self, folder: str) -> None:
        """Delete the staged files that killed processes left in `folder`."""
        for path in (self.location / folder / STAGING).glob("*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STAGED_LIFETIME_SECONDS:
                    path.unlink()

    def _make_folders(self, folder: Path) -> None:
        for each in (*reversed(folder.parents), folder):
            if not each.is_dir():
                each.mkdir(mode=0o700, exist_ok=True)
                sync_folder(each.parent)
