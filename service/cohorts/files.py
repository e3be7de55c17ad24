"""The files of a cohort: `cohorts/<cohort id>/<sha256>`, see `service.files`.

An upload is staged before its row is committed, and a file is deleted before the deletion of its row is
committed. A crash can leave a file without a row, which `sweep` deletes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from model_store.digest import sha256
from service.errors import CohortDeleted
from service.files import Files, Staged

COHORTS = "cohorts"


def label_of(sha256: str) -> str:
    """Return how a job's reason and warnings name a scan: by digest, since its name may be a patient's.

    They outlive the deletion of the scan, and any reader of the job sees them.
    """
    return f"scan {sha256[:12]}"


@dataclass(frozen=True)
class ScanFile:
    """A scan of a cohort, or its mask: the client's name, its file, and the digest the file should have.

    `what` stands before the digest in errors.
    """

    name: str
    files: Files
    key: str
    sha256: str
    what: str = "scan"

    def read(self) -> bytes:
        """Read the file. Raises CohortDeleted if it is missing or its digest differs, FilesUnavailable."""
        data = self.files.read(self.key)
        if data is None:
            raise CohortDeleted(
                f"{self.what} {self.sha256[:12]} is not stored any more: upload the cohort again"
            )
        if sha256(data) != f"sha256:{self.sha256}":
            raise CohortDeleted(
                f"{self.what} {self.sha256[:12]} was changed where it is stored since its upload: upload it "
                "again"
            )
        return data


class CohortFolder:
    """The folder of one cohort. Files are named by digest, so no key has a part that a client wrote."""

    def __init__(self, files: Files, cohort_id: str) -> None:
        self._files = files
        self._folder = f"{COHORTS}/{cohort_id}"

    def scan(self, sha256: str) -> str:
        """Key of the scan with this digest (64 hexadecimal digits)."""
        return f"{self._folder}/{sha256}"

    def keep(self, staged: Staged, sha256: str) -> None:
        """Take a staged file into the cohort."""
        staged.keep(self.scan(sha256))

    def remove(self, sha256: str) -> None:
        """Delete one scan, if it exists."""
        self._files.remove(self.scan(sha256))

    def delete(self) -> None:
        """Delete every scan, if there are any."""
        self._files.remove_folder(self._folder)

    def sweep(self, known: Collection[str]) -> int:
        """Delete the orphaned files, those without a row, and return their number."""
        found = [name for name in self._files.names(self._folder) if name not in known]
        self._files.remove(*(f"{self._folder}/{name}" for name in found))
        return len(found)
