"""The reserve of disk space for deletions.

On a full disk a deletion fails as everything else does: it writes rows. So the state folder keeps a file that
only takes up space. A deletion that finds too little room deletes this file first. It is made again as soon
as there is room for it and for further deletions; until then no scan is received.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import uuid
from pathlib import Path

from service.settings import MEBIBYTE, Settings

_FILE = "reserve"
# What the rows of a deletion take, and the log of changes before them.
_DELETION_BYTES = 4 * MEBIBYTE
_log = logging.getLogger("locum.service")


def keep_reserve(settings: Settings) -> bool:
    """Make the reserve if it is missing; return whether it is there. Blocking."""
    path, size = settings.state_dir / _FILE, settings.reserve_bytes
    if size == 0 or _size(path) == size:
        return True
    # With more than it takes: else a deletion that gave it up would find it made again, and no room.
    if not _has_room(settings.state_dir, size + 2 * _DELETION_BYTES):
        return False
    aside = path.with_name(f"{_FILE}.{uuid.uuid4().hex}")
    try:
        with aside.open("wb") as file:
            _allocate(file.fileno(), size)
        aside.replace(path)
    except OSError as error:
        _log.warning("the reserve for deletions cannot be made: %s", error.strerror)
        return False
    finally:
        aside.unlink(missing_ok=True)
    return True


def make_room(settings: Settings) -> None:
    """Give the reserve up where a deletion would find too little room. Blocking."""
    path = settings.state_dir / _FILE
    if path.exists() and not _has_room(settings.state_dir, _DELETION_BYTES):
        path.unlink(missing_ok=True)
        _log.warning("the disk is full: the reserve is given up for a deletion")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _has_room(folder: Path, size: int) -> bool:
    """Whether so many bytes can be written, quotas included."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _allocate(file.fileno(), size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _allocate(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    zeros = bytes(MEBIBYTE)
    for start in range(0, size, MEBIBYTE):
        os.write(file, zeros[: size - start])
