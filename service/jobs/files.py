"""The files of one job. They show patients, so they are private, expire and can be deleted.

jobs/<job id>/checkpoint       where a later attempt goes on
jobs/<job id>/request          of a job on a PACS: UIDs, which no row of the database has
jobs/<job id>/input            the scan of a job on one scan, and beside it input.json: what was received
jobs/<job id>/result           the answer, and beside it result.json: media type and headers
jobs/<job id>/preview          masks of a few slices by the present state, while a job runs
jobs/<job id>/pictures/        before and after, for the candidate's card
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from service.files import Files
from service.validation import JOB_ID

JOBS = "jobs"


@dataclass(frozen=True)
class StoredResult:
    """A finished answer: body, media type and headers."""

    body: bytes
    media_type: str
    headers: Mapping[str, str]


@dataclass(frozen=True)
class StoredScan:
    """A scan that waits for its job: what is kept of it, and digest and size of what was received.

    `chosen` is the network that answers, for a job of kind `segment`, and `series` the option of the request
    by which `content` was chosen of an upload of several. `alarmed`: an alarm of the watch waited for a
    person when the scan was received.
    """

    content: bytes
    received_sha256: str
    received_bytes: int
    chosen: Mapping[str, str | None] | None = None
    series: str | None = None
    alarmed: bool = False


class JobFolder:
    """The folder of one job. The first write creates it. Its files are named by their paths in it."""

    CHECKPOINT: Final = "checkpoint"
    """Where a later attempt goes on."""
    REQUEST: Final = "request"
    """What a job on a PACS looks for."""
    INPUT: Final = "input"
    """The scan of a job on one scan."""
    RECEIVED: Final = "input.json"
    """What was received as this scan."""
    PREVIEW: Final = "preview"
    """The masks of a few slices after the latest epoch, as PNG."""

    def __init__(self, files: Files, job_id: str) -> None:
        if not re.fullmatch(JOB_ID, job_id):
            raise ValueError(f"{job_id!r} is no id of a job: expected 32 hexadecimal digits")
        self._files = files
        self._folder = f"{JOBS}/{job_id}"

    @property
    def names(self) -> list[str]:
        """The job's files, sorted; partial files of a killed worker included."""
        return self._files.names(self._folder)

    def write(self, name: str, content: bytes) -> None:
        """Write one of the job's files durably, readable by the owner only."""
        self._files.write(f"{self._folder}/{name}", content)

    def read(self, name: str) -> bytes | None:
        """Return the content of one of the job's files; None if it does not exist. Raises FileDamaged."""
        return self._files.read(f"{self._folder}/{name}")

    def write_input(self, scan: StoredScan) -> None:
        """Write the scan of a job on one scan."""
        self.write(self.INPUT, scan.content)
        # Written last: without it there is no scan.
        received = {
            "sha256": scan.received_sha256,
            "bytes": scan.received_bytes,
            "chosen": scan.chosen,
            "series": scan.series,
            "alarmed": scan.alarmed,
        }
        self.write(self.RECEIVED, json.dumps(received).encode())

    def read_input(self) -> StoredScan | None:
        """Return the scan; None before it is stored and after it was deleted."""
        received, content = self.read(self.RECEIVED), self.read(self.INPUT)
        if received is None or content is None:
            return None
        said = json.loads(received)
        # What an earlier release wrote may lack some.
        return StoredScan(
            content,
            said["sha256"],
            said["bytes"],
            said.get("chosen"),
            said.get("series"),
            said.get("alarmed", False),
        )

    def write_picture(self, scan: str, when: str, content: bytes) -> None:
        """Write the PNG of a scan `before`, `after`, through the `lens`, or as it was `drawn`."""
        self.write(_picture(scan, when), content)

    def pictures(self) -> dict[str, dict[str, bytes]]:
        """Return the PNGs of each scan. One that was deleted meanwhile is left out."""
        found: dict[str, dict[str, bytes]] = {}
        for name in self.names:
            parts = re.fullmatch(_picture("([^/.]*)", "([a-z]+)"), name)
            content = None if parts is None else self.read(name)
            if parts is not None and content is not None:
                found.setdefault(parts[1], {})[parts[2]] = content
        return found

    def write_result(self, result: StoredResult) -> None:
        """Store the answer atomically: a reader sees all of it or nothing."""
        self.write("result", result.body)
        # Written last: without it there is no result.
        about = {"media_type": result.media_type, "headers": dict(result.headers)}
        self.write("result.json", json.dumps(about).encode())

    def read_result(self) -> StoredResult | None:
        """Return the answer; None before it is stored and after it was deleted."""
        about, body = self.read("result.json"), self.read("result")
        if about is None or body is None:
            return None
        said = json.loads(about)
        return StoredResult(body, said["media_type"], said["headers"])

    def delete_unfinished(self) -> None:
        """Delete the files that only an unfinished job needs, and partial files of a killed worker."""
        unfinished = [
            name
            for name in self.names
            if name in (self.CHECKPOINT, self.REQUEST, self.INPUT, self.RECEIVED, self.PREVIEW)
            or name.rpartition("/")[2].startswith(".")
        ]
        self._files.remove(*(f"{self._folder}/{name}" for name in unfinished))

    def delete(self) -> None:
        """Delete every file of the job, if there are any."""
        self._files.remove_folder(self._folder)


def _picture(scan: str, when: str) -> str:
    return f"pictures/{scan}-{when}.png"
