"""The files of one job. They show patients, so they are private, expire and can be deleted.

STATE/jobs/<job id>/checkpoint       where a later attempt goes on
STATE/jobs/<job id>/request          of a job on a PACS: UIDs, which no row of the database has
STATE/jobs/<job id>/input            the scan of a job of kind `scan`
STATE/jobs/<job id>/result           the answer, and beside it result.json: media type and headers
STATE/jobs/<job id>/pictures/        before and after, for the candidate's card
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from model_store.durable import remove_folder, sync_folder, write_durably
from service.validation import JOB_ID


@dataclass(frozen=True)
class StoredResult:
    """A finished answer: body, media type and headers."""

    body: bytes
    media_type: str
    headers: Mapping[str, str]


class JobFolder:
    """The folder of one job. The first write creates it."""

    def __init__(self, state_dir: Path, job_id: str) -> None:
        if not re.fullmatch(JOB_ID, job_id):
            raise ValueError(f"{job_id!r} is no id of a job: expected 32 hexadecimal digits")
        self.path = state_dir / "jobs" / job_id

    @property
    def exists(self) -> bool:
        """Whether the job has any file."""
        return self.path.is_dir()

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint, which `write(folder.checkpoint, ...)` creates."""
        return self.path / "checkpoint"

    @property
    def request(self) -> Path:
        """Path of what a job on a PACS looks for."""
        return self.path / "request"

    @property
    def input(self) -> Path:
        """Path of the scan of a job of kind `scan`."""
        return self.path / "input"

    @property
    def pictures(self) -> Path:
        """Folder of the PNGs, which may not exist."""
        return self.path / "pictures"

    def write(self, path: Path, content: bytes) -> None:
        """Write one of the job's files durably, readable by the owner only."""
        for folder in (self.path.parent, self.path, path.parent):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(folder.parent)
        write_durably(path, content, mode=0o600)

    def read(self, path: Path) -> bytes | None:
        """Return the content of one of the job's files; None if it does not exist."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def write_result(self, result: StoredResult) -> None:
        """Store the answer atomically: a reader sees all of it or nothing."""
        self.write(self.path / "result", result.body)
        # Written last: without it there is no result.
        about = {"media_type": result.media_type, "headers": dict(result.headers)}
        self.write(self.path / "result.json", json.dumps(about).encode())

    def read_result(self) -> StoredResult | None:
        """Return the answer; None before it is stored and after it was deleted."""
        about, body = self.read(self.path / "result.json"), self.read(self.path / "result")
        if about is None or body is None:
            return None
        said = json.loads(about)
        return StoredResult(body, said["media_type"], said["headers"])

    def delete_unfinished(self) -> None:
        """Delete the files that only an unfinished job needs, and partial files of a killed worker."""
        # Another process may delete the whole folder meanwhile.
        with suppress(FileNotFoundError):
            for path in (self.checkpoint, self.request, self.input, *self.path.rglob(".*")):
                path.unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete every file of the job, if there are any."""
        remove_folder(self.path)
