"""A cohort of the hospital `north`, with its files, to put scans and jobs into."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from service.cohorts import cohorts, masks
from service.database import Database
from service.runtime.spool import Upload, prepare_spool
from service.settings import Settings
from tests.helpers.service.queued import queued


class Bench:
    def __init__(self, database: Database, state_dir: Path, **settings: object) -> None:
        self.database = database
        self.settings = Settings(state_dir=state_dir, **settings)  # type: ignore[arg-type]
        prepare_spool(self.settings.spool)
        with database.write() as session:
            self.cohort = cohorts.create(session, self.settings, "north", "first").id

    def add(self, name: str, content: bytes, cohort: str | None = None) -> bool:
        with Upload(self.settings.spool) as upload:
            upload.write(content)
            where = (self.database, self.settings, "north", cohort or self.cohort)
            return cohorts.add_scan(*where, name, upload, "png")[1]

    def draw(self, name: str, content: bytes, values: Sequence[int] = (0, 1)) -> bool:
        """Give a scan its mask, which has these values; whether it is new."""
        where = (self.database, self.settings, "north", self.cohort)
        with self.database.read() as session:
            scan = masks.check_room(session, *where[1:], name, len(content))
        with Upload(self.settings.spool) as upload:
            upload.write(content)
            return masks.add_mask(*where, scan, upload, masks.DecodedMask("png", [*values]))[1]

    def files(self) -> dict[str, bytes]:
        """Whatever lies under the folder of cohorts, by its path there."""
        root = self.settings.state_dir / "cohorts"
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    def names(self) -> list[str]:
        with self.database.read() as session:
            return [scan.name for scan in cohorts.scans(session, self.cohort)]

    def job(self, state: str = "queued") -> str:
        """A job over the cohort, in that state."""
        with self.database.write() as session:
            asked = {"kind": "adaptation", "hospital": "north", "model": "brain", "parent": "sha256:0"}
            job = queued(session, self.settings, **asked, cohort=self.cohort, options={})
            job.state = state
            return job.id


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
