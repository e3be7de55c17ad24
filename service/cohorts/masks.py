"""Masks of a cohort's scans: stored, bounded, counted and deleted with the scans.

Two scans may have masks of the same bytes (two without a target, say), so a file goes when no row names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.cohorts import cohorts
from service.cohorts.files import CohortFolder
from service.database import CohortMask, CohortScan, Database, in_turn
from service.errors import CohortUnknown, MaskTaken
from service.runtime.spool import Upload
from service.settings import Settings


@dataclass(frozen=True)
class DecodedMask:
    """What was seen when a mask was decoded once: its format, and the values in it."""

    format: str
    label_values: list[int]


def of_cohort(session: Session, cohort_id: str) -> dict[str, CohortMask]:
    """Each mask by its scan's name, in the names' order."""
    query = (
        select(CohortScan.name, CohortMask)
        .join(CohortMask, CohortMask.scan == CohortScan.id)
        .where(CohortScan.cohort == cohort_id)
        .order_by(CohortScan.name)
    )
    return {name: mask for name, mask in session.execute(query)}  # noqa: C416 - rows are no pairs to mypy


def check_room(
    session: Session, settings: Settings, hospital: str, cohort_id: str, name: str, size: int
) -> CohortScan:
    """The scan that a mask of `size` bytes could be added to, asked before its bytes are taken.

    A scan that has a mask passes: the bytes may be the same ones again. Raises as `add_mask`.
    """
    cohorts.usable(session, hospital, cohort_id)
    scan = cohorts.named(session, cohort_id, name)
    if session.get(CohortMask, scan.id) is None:
        cohorts.check_idle(session, cohort_id)
        cohorts.check_quota(session, settings, size)
    return scan


def add_mask(
    database: Database,
    settings: Settings,
    hospital: str,
    cohort_id: str,
    scan: CohortScan,
    upload: Upload,
    decoded: DecodedMask,
) -> tuple[CohortMask, bool]:
    """Give a scan its mask. Once this returns it is on the disk. Blocking: call it in a thread.

    Args:
        database: where the cohort is.
        settings: quota, and where scans lie.
        hospital: owner of the cohort.
        cohort_id: which.
        scan: that the mask was held against; if another one has its name by now, it is refused.
        upload: the mask's bytes.
        decoded: what is in them.

    Returns:
        (row, whether it is new): the same bytes again change nothing.

    Raises:
        CohortUnknown, CohortDeleted, CohortInUse, MaskTaken, CohortFull.
    """
    sha256 = upload.sha256.removeprefix("sha256:")
    aside = cohorts.keep_aside(settings, upload)
    try:
        with database.write() as session:
            cohorts.usable(session, hospital, cohort_id, lock=True)
            row = cohorts.named(session, cohort_id, scan.name)
            if row.sha256 != scan.sha256:
                raise MaskTaken(
                    f"another scan of cohort {cohort_id} has this name by now: look at it, and draw its mask"
                )
            known = session.get(CohortMask, row.id)
            if known is not None:
                if known.sha256 != sha256:
                    raise MaskTaken(
                        f"scan '{scan.name}' has another mask (its sha256 begins with "
                        f"{known.sha256[:12]}, this one's with {sha256[:12]}): DELETE that one first"
                    )
                return known, False
            cohorts.check_idle(session, cohort_id)
            in_turn(session, cohorts.QUOTA)
            cohorts.check_quota(session, settings, upload.size)
            made = CohortMask(
                scan=row.id,
                cohort=cohort_id,
                sha256=sha256,
                size=upload.size,
                format=decoded.format,
                label_values=decoded.label_values,
                created_at=datetime.now(UTC),
            )
            session.add(made)
            session.flush()
            CohortFolder(settings.cohorts, cohort_id).keep(aside, sha256)
            return made, True
    finally:
        aside.unlink(missing_ok=True)


def remove_mask(database: Database, settings: Settings, hospital: str, cohort_id: str, name: str) -> None:
    """Delete one scan's mask, its file included; the scan stays.

    Raises:
        CohortUnknown, CohortDeleted, CohortInUse.
    """
    with database.write() as session:
        cohorts.usable(session, hospital, cohort_id, lock=True)
        found = session.get(CohortMask, cohorts.named(session, cohort_id, name).id)
        if found is None:
            raise CohortUnknown(f"this scan of cohort {cohort_id} has no mask: GET its scans says which have")
        cohorts.check_idle(session, cohort_id)
        session.delete(found)
        session.flush()
        cohorts.remove_unnamed(session, settings, cohort_id, [found.sha256])
