"""Scans that a viewer uploaded, kept for a while for its requests on them.

    STATE/viewer-scans/<owner>/<id>/scan          the bytes as received
    STATE/viewer-scans/<owner>/<id>/about.json    written with it; its time of change is that of the last use

An owner is a caller with the hospitals that it sees: no other caller finds the scan. Scans expire some time
after their last use. When a caller has too many, or all callers together too many bytes, the caller's own
least recently used scans are deleted for its next one, since viewers never delete any.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model_store.durable import remove_folder
from model_store.scan import Limits, decode, open_series
from service.database import Caller
from service.errors import DiskFull, ViewerQuotaExceeded, ViewerScanUnknown
from service.runtime.spool import Upload
from service.settings import Settings

_ID = re.compile(r"[0-9a-f]{32}")
_ASIDE = "new-"
# A received upload is moved within seconds. An older one was left by a killed process.
_ASIDE_LIFETIME_SECONDS = 3600.0


@dataclass(frozen=True)
class ViewerScan:
    """A kept scan.

    Attributes:
        id: 32 hexadecimal digits.
        image: the viewer's own name for it, if it gave one.
        series: SeriesInstanceUID of a DICOM series.
        format: as in `model_store.scans.formats`.
        sha256, size: of the bytes.
        created, used: seconds since the epoch.
        lifetime: seconds from its last use until it expires.
        folder: its files.
    """

    id: str
    image: str | None
    series: str | None
    format: str
    sha256: str
    size: int
    created: float
    used: float
    lifetime: float
    folder: Path

    def read(self) -> bytes:
        """Return the bytes. Raises ViewerScanUnknown if it expired meanwhile."""
        try:
            return (self.folder / "scan").read_bytes()
        except FileNotFoundError:
            raise _unknown() from None

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return time.time() >= self.used + self.lifetime


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
    """The scans of one caller. Blocking: call it in a thread."""

    def __init__(self, settings: Settings, caller: Caller) -> None:
        self._settings = settings
        self._root = settings.viewer_scans
        # A name alone could be given to another hospital's key later.
        hospitals = None if caller.hospitals is None else sorted(caller.hospitals)
        owner = json.dumps([caller.actor, hospitals])
        self._folder = self._root / hashlib.sha256(owner.encode()).hexdigest()[:32]

    def add(
        self,
        upload: Upload,
        image: str | None,
        examined: tuple[str, str | None],
        lifetime: float | None = None,
    ) -> ViewerScan:
        """Keep a scan; one with the same `image` is replaced. `lifetime` may shorten the configured one.

        Raises:
            ViewerQuotaExceeded: the scans of other callers leave no room.
            DiskFull: the disk does.
        """
        longest = self._settings.viewer_scan_minutes * 60
        now = time.time()
        scan = ViewerScan(
            id=uuid.uuid4().hex,
            image=image,
            series=examined[1],
            format=examined[0],
            sha256=upload.sha256,
            size=upload.size,
            created=now,
            used=now,
            lifetime=min(lifetime or longest, longest),
            folder=self._root / f"{_ASIDE}{uuid.uuid4().hex}",
        )
        try:
            self._write(scan, upload)
            with self._locked():
                self._make_room(scan)
                self._folder.mkdir(mode=0o700, exist_ok=True)
                scan.folder.replace(self._folder / scan.id)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFull("The service's disk is full; send the scan later.") from error
        finally:
            remove_folder(scan.folder)
        return self.get(scan.id)

    def get(self, scan_id: str, *, use: bool = False) -> ViewerScan:
        """The scan with this id; `use` puts its expiry off. Raises ViewerScanUnknown."""
        found = _read(self._folder / scan_id) if _ID.fullmatch(scan_id) else None
        if found is None or found.expired:
            raise _unknown()
        if use:
            with suppress(FileNotFoundError):
                os.utime(found.folder / "about.json")
        return found

    def find(self, image: str) -> ViewerScan:
        """The newest scan with this name or SeriesInstanceUID, for use. Raises ViewerScanUnknown."""
        named = [scan for scan in self.all() if image in (scan.image, scan.series, scan.id)]
        if not named:
            raise _unknown()
        return self.get(max(named, key=lambda scan: scan.created).id, use=True)

    def all(self) -> list[ViewerScan]:
        """The caller's scans, the least recently used first."""
        found = [scan for scan in _scans(self._folder) if not scan.expired]
        return sorted(found, key=lambda scan: scan.used)

    def remove(self, scan: ViewerScan) -> None:
        """Delete a scan."""
        remove_folder(scan.folder)

    def _write(self, scan: ViewerScan, upload: Upload) -> None:
        self._root.mkdir(mode=0o700, exist_ok=True)
        scan.folder.mkdir(mode=0o700)
        with (scan.folder / "scan").open("wb") as file:
            for chunk in upload.chunks():
                file.write(chunk)
        about = {name: value for name, value in asdict(scan).items() if name not in ("used", "folder")}
        (scan.folder / "about.json").write_text(json.dumps(about))

    def _make_room(self, scan: ViewerScan) -> None:
        sweep(self._root)
        settings, own = self._settings, self.all()
        if scan.image is not None:
            for old in [each for each in own if each.image == scan.image]:
                own.remove(old)
                self.remove(old)
        others = sum(each.size for each in _everything(self._root)) - sum(each.size for each in own)
        if others + scan.size > settings.viewer_quota_bytes:
            raise ViewerQuotaExceeded(
                "there is no room for this scan: send it later, or let the operator raise "
                "LOCUM_VIEWER_QUOTA_BYTES"
            )
        room = settings.viewer_quota_bytes - others - scan.size
        while own and (len(own) >= settings.max_viewer_scans or sum(each.size for each in own) > room):
            self.remove(own.pop(0))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def sweep(root: Path) -> None:
    """Delete expired scans, and what a killed process or a power cut left."""
    for folder in (*root.glob(f"{_ASIDE}*"), *root.glob("*/*/")):
        with suppress(FileNotFoundError):
            found = None if folder.parent == root else _read(folder)
            age = time.time() - folder.stat().st_mtime
            if age > _ASIDE_LIFETIME_SECONDS if found is None else found.expired:
                remove_folder(folder)


def _everything(root: Path) -> Iterator[ViewerScan]:
    for owner in root.iterdir() if root.is_dir() else ():
        if _ID.fullmatch(owner.name):
            yield from _scans(owner)


def _scans(owner: Path) -> Iterator[ViewerScan]:
    for folder in owner.iterdir() if owner.is_dir() else ():
        if (found := _read(folder)) is not None:
            yield found


def _read(folder: Path) -> ViewerScan | None:
    """None for a folder without a readable description."""
    with suppress(FileNotFoundError, ValueError, TypeError):
        used = (folder / "about.json").stat().st_mtime
        about: dict[str, Any] = json.loads((folder / "about.json").read_text())
        return ViewerScan(**about, used=used, folder=folder)
    return None


def _unknown() -> ViewerScanUnknown:
    return ViewerScanUnknown(
        "this caller has no such scan, or it has expired: let the viewer send it again (PUT …/session/ or "
        "PUT …/datastore/)"
    )
