"""Staging folders: a version is written there before one rename makes it visible.

A writer holds a lock on its staging folder. The operating system releases the lock when the process ends, so
a folder without a lock is orphaned and can be deleted, while the folder of a slow or stopped writer is not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staging(root: Path) -> Iterator[Path]:
    """Sweep, then make a new folder for writing a version. It is deleted at the end unless it was renamed."""
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    staged = root / uuid.uuid4().hex
    # Shared, so that writers wait only for a sweep, which must not run between creating and locking.
    with _held(root, fcntl.LOCK_SH):
        staged.mkdir()
        lock = os.open(staged, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        os.close(lock)


def sweep(root: Path) -> list[Path]:
    """Delete orphaned staging folders. Returns their paths."""
    if not root.is_dir():
        return []
    abandoned = []
    with _held(root, fcntl.LOCK_EX):
        for staged in root.iterdir():
            try:
                with _held(staged, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(staged, ignore_errors=True)
            except (BlockingIOError, FileNotFoundError):
                # Locked by its writer, or just made visible.
                continue
            abandoned.append(staged)
    return abandoned


@contextmanager
def _held(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
