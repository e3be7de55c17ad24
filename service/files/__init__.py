"""Files of patients: scans of cohorts and viewers, masks, files of jobs, in a folder or in an S3 bucket.

    cohorts/<cohort id>/<sha256>       a scan or a mask
    jobs/<job id>/...                  see `service.jobs.files`
    viewers/<scan id>/scan             see `service.viewers.scans`
    answers/<id>/...                   see `service.corrections.kept_answers`
    dicom-uid.key                      the installation's key for UIDs

A key is such a path. No part of it was written by a client. No file is kept in a cache: it would outlive the
deletion of the patient's scan, on a machine that does not learn of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

from service.errors import FilesUnavailable
from service.files.folder import FilesFolder

_log = logging.getLogger("locum.service")


class Staged(Protocol):
    """A written file that nothing refers to yet."""

    def keep(self, key: str) -> None:
        """Give the file its key, at once. It is durable when this returns."""


class Files(Protocol):
    """The files of patients. Safe for many processes at once.

    A file appears whole or not at all. Every method raises FilesUnavailable where the S3 service does not
    answer, and OSError where a folder cannot be used.
    """

    @property
    def location(self) -> Path | str:
        """The folder, or the bucket's URL."""

    def check(self) -> None:
        """Raise FilesUnavailable or OSError if files cannot be read."""

    def read(self, key: str) -> bytes | None:
        """Return a file's content; None if there is none. Raises FileDamaged."""

    def write(self, key: str, content: bytes) -> None:
        """Write a file durably, in place of the one that is there."""

    def create(self, key: str, content: bytes) -> bytes:
        """Write a file durably unless there is one, and return what is there then."""

    def stage(self, folder: str, chunks: Iterable[bytes]) -> AbstractContextManager[Staged]:
        """Write a file without a key into `folder`. It is deleted at the end, unless it was kept."""

    def remove(self, *keys: str) -> None:
        """Delete files, where they exist."""

    def remove_folder(self, folder: str) -> None:
        """Delete every file below `folder`, if there are any."""

    def names(self, folder: str) -> list[str]:
        """List the files below `folder` by their paths in it, sorted. Partial files begin with a dot."""

    def folders(self, folder: str) -> list[tuple[str, float]]:
        """List the folders in `folder`: name, and time of the last change in seconds since the epoch."""

    def sweep(self, folder: str) -> None:
        """Delete the staged files that killed processes left in `folder`."""


@cache
def open_files(location: Path | str) -> Files:
    """Return the files at a folder or a bucket's URL. Raises FilesUnavailable.

    One per process and place: a bucket's connections are shared between threads.
    """
    if isinstance(location, Path):
        return FilesFolder(location)
    # Imported late: most services keep files in a folder, and do without the extra.
    try:
        from service.files.bucket import FilesBucket
    except ModuleNotFoundError as error:
        raise FilesUnavailable(f"{location}: files in a bucket need 'pip install locum[s3]'") from error
    return FilesBucket(location)


@contextmanager
def log_and_continue(what: str) -> Iterator[None]:
    """Log what cannot be deleted now and continue; the next pass retries."""
    try:
        yield
    except FileNotFoundError:
        # Another process deleted it meanwhile.
        return
    except (OSError, FilesUnavailable) as error:
        _log.warning("%s cannot be deleted: %s", what, type(error).__name__)
