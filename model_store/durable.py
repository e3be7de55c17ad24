"""Writing so that a power cut leaves the old file or the new one, never half of one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_durably(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write beside `path`, flush to the disk, and rename over it."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.chmod(mode)
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's own entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
