"""Open files of this process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """Files of `folder` that this process has open, including deleted ones."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # Another thread may have closed it since it was listed.
        with suppress(FileNotFoundError):
            found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return [path for path in found if path.startswith(str(folder))]
