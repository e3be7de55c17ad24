"""Write files atomically and durably (a power cut leaves the old or the new file), and remove folders."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the path in an error of the system that names none, as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_durably(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a temporary file beside `path`, flush it to disk, and rename it to `path`."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        # For its owner alone until it is complete: the content may be a private key.
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with naming(path), os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        # Above all on a full disk, which an orphaned half-written file would keep full.
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder with its content, and flush the removal to disk. A missing folder is not an error."""
    while path.exists():
        # If another process removes the same files at the same time, rmtree stops half way.
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
            sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
