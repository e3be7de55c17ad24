"""Files that fail as on a broken disk."""

from __future__ import annotations

from pathlib import Path


def unreadable(path: Path) -> None:
    """Replace an empty file by one that looks the same and gives EIO to every reader, root included."""
    assert path.stat().st_size == 0
    path.unlink()
    # Reading it fails: no process has a page mapped at address 0.
    path.symlink_to("/proc/self/mem")
