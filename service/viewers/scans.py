"""Scans that a viewer uploaded, kept for a while for its requests on them.

    viewers/<scan id>/scan       the bytes as received, see `service.files`
    a row `ViewerScanRow`        its owner and names, when it was used, and when it expires

An owner is a caller with the hospitals that it sees: no other caller finds the scan. Scans expire some time
after their last use. When a caller has too many, or its hospital or all callers together too many bytes, the
caller's own least recently used scans are deleted for its next one, since viewers never delete any.

A scan's file appears before its row. Evicted scans lose their rows first, in the transaction that adds the
new one, so that a rejected scan takes no other's place. A crash can leave a file without a row, which `sweep`
deletes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from model_store.durable import remove_folder
from model_store.scan import Limits, decode, open_series
from service.database import Database, ViewerScanRow, in_turn
from service.database.hospitals import share_of
from service.errors import DiskFull, ViewerQuotaExceeded, ViewerScanUnknown
from service.files import Files, log_and_continue
from service.runtime.reserve import make_room
from service.runtime.spool import Upload
from service.settings import Settings
from service.validation import JOB_ID

VIEWERS = "viewers"
QUOTA = "the bytes of viewers' scans"
"""Lock name: holders count and add to viewers' scans in turn, see `in_turn`."""

# In the state folder, of versions that kept the scans without rows.
_EARLIER = "viewer-scans"
# A scan has its file shortly before its row.
_SHORTEST_ORPHAN_SECONDS = 3600.0


@dataclass(frozen=True)
class ViewerScan:
    """A kept scan.

    Attributes:
        id: 32 hexadecimal digits.
        image: the viewer's own name for it, if it gave one.
        series: SeriesInstanceUID of a DICOM series.
        format: as in `model_store.scans.formats`.
        sha256, size: of the bytes.
        created_at, used_at: of the upload and of the last use.
        lifetime: seconds from its last use until it expires.
        files: where its bytes are.
    """

    id: str
    image: str | None
    series: str | None
    format: str
    sha256: str
    size: int
    created_at: datetime
    used_at: datetime
    lifetime: float
    files: Files = field(repr=False)

    def read(self) -> bytes:
        """Return the bytes. Raises ViewerScanUnknown if it expired meanwhile, and as `Files.read`."""
        content = self.files.read(_key(self.id))
        if content is None:
            raise _unknown()
        return content


def examine(upload: Upload, limits: Limits) -> tuple[str, str | None]:
    """Decode an upload; return its format, and of a DICOM series the UID. Raises ScanError.

    Blocking, and holds the voxels in memory: call it in a thread, in its turn.
    """
    data = upload.read()
    found = decode(data, limits).format
    if found != "dicom":
        return found, None
    uid = open_series(data, limits).headers[0].get("SeriesInstanceUID")
    return found, None if uid is None else str(uid)


class ViewerScans:
    """The scans of the database's caller. Blocking: call it in a thread."""

    def __init__(self, database: Database, settings: Settings) -> None:
        caller = database.caller
        self._database = database
        self._settings = settings
        self._files = settings.open_files()
        # A name alone could be given to another hospital's key later.
        hospitals = None if caller.hospitals is None else sorted(caller.hospitals)
        self._owner = _digest(json.dumps([caller.actor, hospitals]))
        self._share = _digest(caller.share)

    def add(
        self,
        upload: Upload,
        image: str | None,
        examined: tuple[str, str | None],
        lifetime: float | None = None,
    ) -> ViewerScan:
        """Keep a scan; one with the same `image` is replaced. `lifetime` may shorten the configured one.

        It is durable when this returns.

        Raises:
            ViewerQuotaExceeded: the scans of other callers leave no room.
            DiskFull: the disk does.
            FilesUnavailable: the S3 service does not answer.
        """
        _delete_expired(self._database, self._settings)
        longest = self._settings.viewer_scan_minutes * 60
        now = datetime.now(UTC)
        row = ViewerScanRow(
            id=uuid.uuid4().hex,
            owner=self._owner,
            share=self._share,
            image=image,
            series=examined[1],
            format=examined[0],
            sha256=upload.sha256,
            size=upload.size,
            created_at=now,
            used_at=now,
            expires_at=now + timedelta(seconds=min(lifetime or longest, longest)),
        )
        try:
            # Not under the database's write lock, since a bucket may be slow.
            with self._files.stage(VIEWERS, upload.chunks()) as aside:
                aside.keep(_key(row.id))
            with self._database.write() as session:
                in_turn(session, QUOTA)
                evicted = self._make_room(session, row)
                session.add(row)
        except BaseException as error:
            self._discard(row.id)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull("The service's disk is full; send the scan later.") from error
            raise
        self._discard(*evicted)
        return self._scan(row)

    def get(self, scan_id: str, *, use: bool = False) -> ViewerScan:
        """The scan with this id; `use` puts its expiry off. Raises ViewerScanUnknown."""
        if not re.fullmatch(JOB_ID, scan_id):
            raise _unknown()
        with self._database.write() if use else self._database.read() as session:
            found = session.get(ViewerScanRow, scan_id)
            now = datetime.now(UTC)
            if found is None or found.owner != self._owner or found.expires_at <= now:
                raise _unknown()
            if use:
                put_off = {"used_at": now, "expires_at": now + (found.expires_at - found.used_at)}
                # No error if another process deletes the row meanwhile.
                session.execute(update(ViewerScanRow).where(ViewerScanRow.id == scan_id).values(put_off))
        return self._scan(found)

    def find(self, image: str) -> ViewerScan:
        """The newest scan with this name or SeriesInstanceUID, for use. Raises ViewerScanUnknown."""
        named = [scan for scan in self.all() if image in (scan.image, scan.series, scan.id)]
        if not named:
            raise _unknown()
        return self.get(max(named, key=lambda scan: scan.created_at).id, use=True)

    def all(self) -> list[ViewerScan]:
        """The caller's scans, the least recently used first."""
        now = datetime.now(UTC)
        with self._database.read() as session:
            return [self._scan(row) for row in self._rows(session) if row.expires_at > now]

    def remove(self, scan: ViewerScan) -> None:
        """Delete a scan. Raises FilesUnavailable."""
        _delete(self._database, self._files, scan.id)

    def _make_room(self, session: Session, scan: ViewerScanRow) -> list[str]:
        """Delete the rows that make room for a scan; return their ids.

        The quota is that of cohorts, counted for viewers' scans alone, see `share_of`.
        """
        own = self._rows(session)
        gone = [row for row in own if scan.image is not None and row.image == scan.image]
        kept = [row for row in own if row not in gone]
        total = select(func.coalesce(func.sum(ViewerScanRow.size), 0))
        used = int(session.scalar(total) or 0)
        of_share = int(session.scalar(total.where(ViewerScanRow.share == self._share)) or 0)
        quota = self._settings.cohort_quota_bytes
        room = min(quota - used, share_of(session, quota) - of_share) + sum(row.size for row in own)
        if scan.size > room:
            raise ViewerQuotaExceeded(
                "there is no room for this scan: send it later, or let the operator raise "
                "LOCUM_COHORT_QUOTA_BYTES"
            )
        most = self._settings.max_viewer_scans
        while kept and (len(kept) >= most or sum(row.size for row in kept) + scan.size > room):
            gone.append(kept.pop(0))
        ids = [row.id for row in gone]
        session.execute(delete(ViewerScanRow).where(ViewerScanRow.id.in_(ids)))
        return ids

    def _discard(self, *scan_ids: str) -> None:
        """Delete files without rows. `sweep` deletes what cannot be deleted now."""
        for scan_id in scan_ids:
            with log_and_continue(f"the viewer's scan {scan_id}"):
                self._files.remove_folder(_folder(scan_id))

    def _rows(self, session: Session) -> list[ViewerScanRow]:
        query = select(ViewerScanRow).where(ViewerScanRow.owner == self._owner)
        return list(session.scalars(query.order_by(ViewerScanRow.used_at, ViewerScanRow.id)))

    def _scan(self, row: ViewerScanRow) -> ViewerScan:
        return ViewerScan(
            id=row.id,
            image=row.image,
            series=row.series,
            format=row.format,
            sha256=row.sha256,
            size=row.size,
            created_at=row.created_at,
            used_at=row.used_at,
            lifetime=(row.expires_at - row.used_at).total_seconds(),
            files=self._files,
        )


def sweep(database: Database, settings: Settings) -> None:
    """Delete expired scans, and what killed processes and earlier versions left."""
    _delete_expired(database, settings)
    files = settings.open_files()
    with log_and_continue("what viewers sent and was left half written"):
        files.sweep(VIEWERS)
        for scan_id in _orphans(database, files, settings.viewer_scan_minutes * 60):
            files.remove_folder(_folder(scan_id))
    with log_and_continue("the viewers' scans of an earlier version"):
        remove_folder(settings.state_dir / _EARLIER)


def _delete_expired(database: Database, settings: Settings) -> None:
    due = select(ViewerScanRow.id).where(ViewerScanRow.expires_at <= datetime.now(UTC))
    with database.read() as session:
        found = list(session.scalars(due))
    if found:
        make_room(settings)
    for scan_id in found:
        with log_and_continue(f"the viewer's scan {scan_id}"):
            _delete(database, settings.open_files(), scan_id)


def _delete(database: Database, files: Files, scan_id: str) -> None:
    """Delete the file, then the row: a file without its row is a patient's scan that stays for a while."""
    files.remove_folder(_folder(scan_id))
    with database.write() as session:
        session.execute(delete(ViewerScanRow).where(ViewerScanRow.id == scan_id))


def _orphans(database: Database, files: Files, lifetime: float) -> Iterable[str]:
    """The scans without a row that have expired if they are another database's, see `service.expiry`."""
    before = time.time() - max(lifetime, _SHORTEST_ORPHAN_SECONDS)
    old = {
        name for name, changed in files.folders(VIEWERS) if re.fullmatch(JOB_ID, name) and changed < before
    }
    with database.read() as session:
        return old.difference(session.scalars(select(ViewerScanRow.id))) if old else ()


def _folder(scan_id: str) -> str:
    return f"{VIEWERS}/{scan_id}"


def _key(scan_id: str) -> str:
    return f"{_folder(scan_id)}/scan"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _unknown() -> ViewerScanUnknown:
    return ViewerScanUnknown(
        "this caller has no such scan, or it has expired: let the viewer send it again (PUT …/session/ or "
        "PUT …/datastore/)"
    )
