"""Masks of a cohort's scans: stored, bounded, counted and deleted with the scans.

Two scans may have masks of the same bytes (such as empty ones): a file is deleted with its last row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from model_store.scan import Note
from service.cohorts import cohorts
from service.cohorts.files import CohortFolder
from service.database import CohortMask, CohortScan, Database, in_turn
from service.errors import CohortUnknown, MaskStale, MaskTaken
from service.runtime.spool import Upload
from service.settings import Settings


@dataclass(frozen=True)
class DecodedMask:
    """The format of a decoded mask, its label values, and remarks on how they were found."""

    format: str
    label_values: list[int]
    notes: tuple[Note, ...] = ()


def of_scans(session: Session, scans: Sequence[CohortScan]) -> dict[int, CohortMask]:
    """Return the masks of some scans, by the id of the scan."""
    query = select(CohortMask).where(CohortMask.scan.in_([scan.id for scan in scans]))
    return {mask.scan: mask for mask in session.scalars(query)}


def of_cohort(session: Session, cohort_id: str) -> dict[str, CohortMask]:
    """Return the masks by scan name, sorted by name."""
    query = (
        select(CohortScan.name, CohortMask)
        .join(CohortMask, CohortMask.scan == CohortScan.id)
        .where(CohortScan.cohort == cohort_id)
        .order_by(CohortScan.name)
    )
    return {name: mask for name, mask in session.execute(query)}  # noqa: C416 - rows are no pairs to mypy


def get(session: Session, hospital: str, cohort_id: str, name: str) -> tuple[CohortScan, CohortMask]:
    """Return the scan of this name and its mask. Raises CohortUnknown, CohortDeleted."""
    cohorts.usable(session, hospital, cohort_id)
    scan = cohorts.named(session, cohort_id, name)
    return scan, _mask_of(session, scan)


def check_room(
    session: Session, settings: Settings, hospital: str, cohort_id: str, name: str, size: int
) -> CohortScan:
    """Return the scan for a mask of `size` bytes, checked before its bytes are received.

    A scan with a mask passes, because the client may repeat an upload. Raises as `add_mask`.
    """
    cohorts.usable(session, hospital, cohort_id)
    scan = cohorts.named(session, cohort_id, name)
    if session.get(CohortMask, scan.id) is None:
        cohorts.check_idle(session, cohort_id)
        cohorts.check_quota(session, settings, hospital, size)
    return scan


def add_mask(
    database: Database,
    settings: Settings,
    hospital: str,
    cohort_id: str,
    scan: CohortScan,
    upload: Upload,
    decoded: DecodedMask,
    replaces: Callable[[str], bool] | None = None,
) -> tuple[CohortMask, bool]:
    """Add the mask of a scan. It is durable when this returns. Blocking: call it in a thread.

    Args:
        database: the database of the cohort.
        settings: the quota, and the place of scans.
        hospital: the owner of the cohort.
        cohort_id: the id of the cohort.
        scan: the scan that the mask was compared with; rejected if its name belongs to another scan by now.
        upload: the bytes of the mask.
        decoded: the format and values of the mask.
        replaces: whether the mask with a digest (`sha256:…`) may be replaced; None replaces no mask.

    Returns:
        (row, whether it is new): a repeated upload of the same bytes changes nothing.

    Raises:
        CohortUnknown, CohortDeleted, CohortInUse, MaskTaken, MaskStale, CohortFull, FilesUnavailable.
    """
    sha256 = upload.sha256.removeprefix("sha256:")
    with cohorts.staged(settings, upload) as aside, database.write() as session:
        cohorts.usable(session, hospital, cohort_id, lock=True)
        row = cohorts.named(session, cohort_id, scan.name)
        if row.sha256 != scan.sha256:
            raise MaskTaken(
                f"another scan of cohort {cohort_id} has this name by now: look at it, and draw its mask"
            )
        known = session.get(CohortMask, row.id)
        if known is not None and known.sha256 == sha256:
            return known, False
        if replaces is not None and (known is None or not replaces(f"sha256:{known.sha256}")):
            raise _stale(scan.name, known)
        if known is not None and replaces is None:
            raise MaskTaken(
                f"scan '{scan.name}' has another mask (its sha256 begins with {known.sha256[:12]}, the new "
                f"one's with {sha256[:12]}): replace it with If-Match, or DELETE it first"
            )
        cohorts.check_idle(session, cohort_id)
        in_turn(session, cohorts.QUOTA)
        cohorts.check_quota(session, settings, hospital, upload.size - (0 if known is None else known.size))
        outdated = [] if known is None else [known.sha256]
        made = session.merge(
            CohortMask(
                scan=row.id,
                cohort=cohort_id,
                sha256=sha256,
                size=upload.size,
                format=decoded.format,
                label_values=decoded.label_values,
                created_at=datetime.now(UTC),
            )
        )
        session.flush()
        CohortFolder(settings.open_files(), cohort_id).keep(aside, sha256)
        cohorts.remove_unnamed(session, settings, cohort_id, outdated)
        return made, known is None


def remove_mask(
    database: Database,
    settings: Settings,
    hospital: str,
    cohort_id: str,
    name: str,
    removes: Callable[[str], bool] | None = None,
) -> None:
    """Delete the mask of a scan with its file; keep the scan.

    `removes` says whether the mask with a digest (`sha256:…`) may be deleted; None: every mask.

    Raises:
        CohortUnknown, CohortDeleted, CohortInUse, MaskStale.
    """
    with database.write() as session:
        cohorts.usable(session, hospital, cohort_id, lock=True)
        found = _mask_of(session, cohorts.named(session, cohort_id, name))
        if removes is not None and not removes(f"sha256:{found.sha256}"):
            raise _stale(name, found)
        cohorts.check_idle(session, cohort_id)
        session.delete(found)
        session.flush()
        cohorts.remove_unnamed(session, settings, cohort_id, [found.sha256])


def _stale(name: str, known: CohortMask | None) -> MaskStale:
    found = "no mask" if known is None else f"a mask with sha256 {known.sha256[:12]}…"
    return MaskStale(
        f"scan '{name}' has {found} by now, which is not the mask that If-Match names: look at it, then "
        "decide again"
    )


def _mask_of(session: Session, scan: CohortScan) -> CohortMask:
    found = session.get(CohortMask, scan.id)
    if found is None:
        raise CohortUnknown(f"this scan of cohort {scan.cohort} has no mask: GET its scans says which have")
    return found
