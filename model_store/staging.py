"""Where a version is written before one rename makes it visible, and the end of what a killed process left.

A writer holds a lock on its folder. The lock ends with the process, however that ends: a folder that nobody
holds is abandoned, while one whose writer is only slow, or stopped, is not.
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
    """A new folder to write a version in; what is not renamed is gone afterwards. Sweeps first."""
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    staged = root / uuid.uuid4().hex
    # Shared: writers do not wait for each other, only a sweep, which must not come between folder and lock.
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
    """Delete the folders whose writers are gone. Returns them."""
    if not root.is_dir():
        return []
    abandoned = []
    with _held(root, fcntl.LOCK_EX):
        for staged in root.iterdir():
            try:
                with _held(staged, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(staged, ignore_errors=True)
            except (BlockingIOError, FileNotFoundError):
                # Being written, or just made visible by its writer.
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
