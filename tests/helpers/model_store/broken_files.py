"""Files as a failing disk has them."""

from __future__ import annotations

from pathlib import Path


def unreadable(path: Path) -> None:
    """Make an empty file one that looks the same, and gives EIO to whoever reads it, root too."""
    assert path.stat().st_size == 0
    path.unlink()
    # Nothing is mapped at address 0 of any process.
    path.symlink_to("/proc/self/mem")
