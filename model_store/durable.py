"""Writing so that a power cut leaves the old file or the new one, never half of one; and removing folders."""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path


def write_durably(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write beside `path`, flush to the disk, and rename over it."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.chmod(mode)
        aside.replace(path)
    except BaseException:
        # On a full disk above all: half a file nobody asks for would keep it full.
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it, and flush that to the disk. Nothing there is no error."""
    while path.exists():
        # Another process may remove the same files at the same time, at which rmtree stops half way.
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
            sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's own entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
