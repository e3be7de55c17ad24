"""Cohorts: create, list, count, bound and delete the scans that a hospital uploads for jobs.

Every change locks the cohort's row first, so that no scan is added to a cohort during its deletion, and no
job is created over scans during theirs. While a job needs a cohort, its scans do not change: a later attempt
must find what the first one found.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session

from service.cohorts.files import COHORTS, CohortFolder, ScanFile
from service.database import Cohort, CohortMask, CohortScan, Database, Job, caller_of, in_turn
from service.database.hospitals import require_hospital, share_of
from service.database.job_states import TERMINAL
from service.errors import CohortDeleted, CohortFull, CohortInUse, CohortUnknown, MayNotTrain, ScanNameTaken
from service.files import Staged
from service.job_kinds import names_where
from service.runtime.spool import Upload
from service.settings import Settings

QUOTA = "the bytes of cohorts"
"""Lock name: holders count and add to cohorts in turn, see `in_turn`."""


def create(
    session: Session, settings: Settings, hospital: str, note: str | None = None, name: str | None = None
) -> Cohort:
    """Create an empty cohort. Raises HospitalUnknown."""
    require_hospital(session, hospital)
    now = datetime.now(UTC)
    cohort = Cohort(
        id=uuid.uuid4().hex,
        hospital=hospital,
        name=name,
        note=note,
        created_at=now,
        expires_at=now + timedelta(days=settings.cohort_lifetime_days),
    )
    session.add(cohort)
    session.flush()
    return cohort


def describe(
    session: Session, hospital: str, cohort_id: str, said: Mapping[str, str | bool | None]
) -> Cohort:
    """Change `name`, `note` or `may_train`, also after the scans were deleted. Raises CohortUnknown."""
    found = get(session, hospital, cohort_id, lock=True)
    for field in ("name", "note"):
        if field in said:
            setattr(found, field, said[field])
    if (may_train := said.get("may_train")) is not None:
        found.may_train = bool(may_train)
    return found


def may_learn(session: Session, hospital: str, cohort_id: str) -> None:
    """Raise MayNotTrain if the hospital has not agreed that a job learns from the cohort."""
    if not get(session, hospital, cohort_id).may_train:
        raise MayNotTrain(
            f"cohort {cohort_id} has corrections, from which no model may learn until the hospital agrees: "
            f"PATCH /hospitals/{hospital}/cohorts/{cohort_id} with may_train=true. Checks may use it as it is"
        )


def get(session: Session, hospital: str, cohort_id: str, *, lock: bool = False) -> Cohort:
    """Return the hospital's cohort, even if deleted; `lock` blocks other writers until the transaction ends.

    Raises:
        CohortUnknown: this hospital has no cohort of that id, or the caller may not see the hospital.
    """
    found = session.get(Cohort, cohort_id, with_for_update=lock)
    if found is None or found.hospital != hospital or not caller_of(session).sees(hospital):
        raise CohortUnknown(
            f"hospital {hospital!r} has no cohort {cohort_id!r}: GET /hospitals/{hospital}/cohorts lists them"
        )
    return found


def usable(session: Session, hospital: str, cohort_id: str, *, lock: bool = False) -> Cohort:
    """Return the hospital's cohort, if its scans are not deleted.

    Raises:
        CohortUnknown, CohortDeleted.
    """
    found = get(session, hospital, cohort_id, lock=lock)
    if found.deleted_at is not None:
        raise CohortDeleted(
            f"the scans of cohort {cohort_id} were deleted on {found.deleted_at:%Y-%m-%d}: "
            "make a new cohort and upload them again"
        )
    return found


def listed(session: Session, hospital: str, limit: int, after: str | None = None) -> list[Cohort]:
    """List the hospital's cohorts that are not deleted, newest first, after the one with the id `after`.

    Raises HospitalUnknown, CohortUnknown.
    """
    require_hospital(session, hospital)
    query = select(Cohort).where(Cohort.hospital == hospital, Cohort.deleted_at.is_(None))
    if after is not None:
        last = get(session, hospital, after)
        earlier = or_(Cohort.created_at < last.created_at, Cohort.id > last.id)
        query = query.where(Cohort.created_at <= last.created_at, earlier)
    return list(session.scalars(query.order_by(Cohort.created_at.desc(), Cohort.id).limit(limit)))


def scans(
    session: Session, cohort_id: str, limit: int | None = None, after: str | None = None
) -> list[CohortScan]:
    """List the cohort's scans, by name, after the name `after`."""
    query = select(CohortScan).where(CohortScan.cohort == cohort_id)
    if after is not None:
        query = query.where(CohortScan.name > after)
    return list(session.scalars(query.order_by(CohortScan.name).limit(limit)))


def file_of(settings: Settings, row: CohortScan | CohortMask, name: str) -> ScanFile:
    """Return the file of the scan of this name, or of its mask."""
    what = "scan" if isinstance(row, CohortScan) else "mask"
    files = settings.open_files()
    return ScanFile(name, files, CohortFolder(files, row.cohort).scan(row.sha256), row.sha256, what)


def totals(session: Session, cohort_ids: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Map each cohort with a scan to (number of scans, bytes of scans and masks)."""
    ids = list(cohort_ids)

    # One after the other: a join would look for the mask of each scan.
    def counted(kind: type[CohortScan | CohortMask]) -> dict[str, tuple[int, int]]:
        query = select(kind.cohort, func.count(), func.sum(kind.size)).where(kind.cohort.in_(ids))
        rows = session.execute(query.group_by(kind.cohort))
        return {cohort: (count, int(size)) for cohort, count, size in rows}

    masks = counted(CohortMask)
    return {
        cohort: (count, size + masks.get(cohort, (0, 0))[1])
        for cohort, (count, size) in counted(CohortScan).items()
    }


def check_room(
    session: Session, settings: Settings, hospital: str, cohort_id: str, name: str, size: int
) -> None:
    """Check that a scan of `size` bytes may be added, before its bytes are received.

    A name in use passes, because the client may repeat an upload. Raises as `add_scan`.
    """
    usable(session, hospital, cohort_id)
    if _named(session, cohort_id, name) is None:
        _check_not_below(session, cohort_id, name)
        check_idle(session, cohort_id)
        _check_room(session, settings, hospital, cohort_id, size)


def add_scan(
    database: Database,
    settings: Settings,
    hospital: str,
    cohort_id: str,
    name: str,
    upload: Upload,
    scan_format: str,
) -> tuple[CohortScan, bool]:
    """Add a decoded scan. It is durable when this returns. Blocking: call it in a thread.

    Args:
        database: the database of the cohort.
        settings: the quota, and the place of scans.
        hospital: the owner of the cohort.
        cohort_id: the id of the cohort.
        name: the client's name for the scan, which is never part of a path.
        upload: the bytes of the scan.
        scan_format: the format that the decoder found.

    Returns:
        (row, whether it is new): a repeated upload of the same bytes under the same name changes nothing.

    Raises:
        CohortUnknown, CohortDeleted, CohortInUse, ScanNameTaken, CohortFull, FilesUnavailable.
    """
    folder = CohortFolder(settings.open_files(), cohort_id)
    sha256 = upload.sha256.removeprefix("sha256:")
    with database.read() as session:
        usable(session, hospital, cohort_id)
        known = _same(session, cohort_id, name, sha256)
    if known is not None:
        return known, False
    with staged(settings, upload) as aside, database.write() as session:
        usable(session, hospital, cohort_id, lock=True)
        known = _same(session, cohort_id, name, sha256)
        if known is not None:
            return known, False
        check_idle(session, cohort_id)
        in_turn(session, QUOTA)
        _check_room(session, settings, hospital, cohort_id, upload.size)
        row = CohortScan(
            cohort=cohort_id,
            name=name,
            sha256=sha256,
            size=upload.size,
            format=scan_format,
            created_at=datetime.now(UTC),
        )
        session.add(row)
        session.flush()
        folder.keep(aside, sha256)
        return row, True


def remove_scan(database: Database, settings: Settings, hospital: str, cohort_id: str, name: str) -> None:
    """Delete one scan with its file and its mask.

    Raises:
        CohortUnknown, CohortDeleted, CohortInUse.
    """
    with database.write() as session:
        usable(session, hospital, cohort_id, lock=True)
        found = named(session, cohort_id, name)
        check_idle(session, cohort_id)
        mask = session.get(CohortMask, found.id)
        if mask is not None:
            session.delete(mask)
            session.flush()
        session.delete(found)
        session.flush()
        remove_unnamed(session, settings, cohort_id, [found.sha256, *([] if mask is None else [mask.sha256])])


def remove(database: Database, settings: Settings, hospital: str, cohort_id: str) -> None:
    """Delete every scan of a cohort and keep the time of the deletion. Idempotent.

    Raises:
        CohortUnknown, CohortInUse.
    """
    with database.write() as session:
        cohort = get(session, hospital, cohort_id, lock=True)
        check_idle(session, cohort_id)
        session.execute(delete(CohortMask).where(CohortMask.cohort == cohort_id))
        session.execute(delete(CohortScan).where(CohortScan.cohort == cohort_id))
        cohort.deleted_at = cohort.deleted_at or datetime.now(UTC)
        session.flush()
        CohortFolder(settings.open_files(), cohort_id).delete()


def named(session: Session, cohort_id: str, name: str) -> CohortScan:
    """Return the scan of this name. Raises CohortUnknown."""
    found = _named(session, cohort_id, name)
    if found is None:
        raise CohortUnknown(
            f"cohort {cohort_id} has no scan '{name}': GET its scans lists them; a scan comes before its mask"
        )
    return found


def digests(session: Session, cohort_id: str) -> set[str]:
    """Return the digests of the cohort's files, scans and masks."""
    return {
        digest
        for kind in (CohortScan, CohortMask)
        for digest in session.scalars(select(kind.sha256).where(kind.cohort == cohort_id))
    }


def remove_unnamed(session: Session, settings: Settings, cohort_id: str, sha256s: Iterable[str]) -> None:
    """Delete the files without a row, after the rows were deleted and before the commit.

    A row without its file makes its job fail. A file without its row would be a patient's scan that is never
    deleted.
    """
    known = digests(session, cohort_id)
    for sha256 in {*sha256s} - known:
        CohortFolder(settings.open_files(), cohort_id).remove(sha256)


def _named(session: Session, cohort_id: str, name: str) -> CohortScan | None:
    query = select(CohortScan).where(CohortScan.cohort == cohort_id, CohortScan.name == name)
    return session.scalars(query).first()


def _check_not_below(session: Session, cohort_id: str, name: str) -> None:
    """Reject `case-7.png/masks` beside a scan `case-7.png`: a misspelt path of its mask, not a new name."""
    parts = name.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts))]
    query = select(CohortScan.name).where(CohortScan.cohort == cohort_id, CohortScan.name.in_(above))
    scan = session.scalars(query).first()
    if scan is not None:
        raise ScanNameTaken(
            f"'{name}' is below the scan '{scan}' of cohort {cohort_id}: its mask goes to …/{scan}/mask; "
            "choose another name for a scan"
        )


def _same(session: Session, cohort_id: str, name: str, sha256: str) -> CohortScan | None:
    found = _named(session, cohort_id, name)
    if found is not None and found.sha256 != sha256:
        raise ScanNameTaken(
            f"another scan of cohort {cohort_id} has this name (its sha256 begins with {found.sha256[:12]}, "
            f"this one's with {sha256[:12]}): DELETE that one first, or choose another name"
        )
    return found


def check_idle(session: Session, cohort_id: str) -> None:
    """Raise CohortInUse while an unfinished job needs the scans. One that adds scans is no such job."""
    adding = names_where(lambda kind: kind.adds_scans)
    query = select(Job.id).where(Job.cohort == cohort_id, Job.state.not_in(TERMINAL), Job.kind.not_in(adding))
    job = session.scalars(query.limit(1)).first()
    if job is not None:
        raise CohortInUse(
            f"job {job} works on the scans of cohort {cohort_id}: wait for it or DELETE /jobs/{job}, or make "
            "another cohort"
        )


def _check_room(session: Session, settings: Settings, hospital: str, cohort_id: str, size: int) -> None:
    count, _ = totals(session, [cohort_id]).get(cohort_id, (0, 0))
    if count >= settings.max_cohort_scans:
        raise CohortFull(
            f"cohort {cohort_id} has {count} scans, which is as many as one may have "
            "(LOCUM_MAX_COHORT_SCANS): make another"
        )
    check_quota(session, settings, hospital, size)


def check_quota(session: Session, settings: Settings, hospital: str, size: int) -> None:
    """Raise CohortFull if `size` more bytes exceed the quota of all cohorts, or the hospital's share."""
    used = own = 0
    for kind in (CohortScan, CohortMask):
        total = select(func.coalesce(func.sum(kind.size), 0))
        used += int(session.scalar(total) or 0)
        of_hospital = total.join(Cohort, Cohort.id == kind.cohort).where(Cohort.hospital == hospital)
        own += int(session.scalar(of_hospital) or 0)
    quota = settings.cohort_quota_bytes
    share = share_of(session, quota)
    if size > 0 and own + size > share:
        raise CohortFull(
            f"the scans of hospital '{hospital}' have {own} bytes, and {size} more are beyond the {share} "
            "that they may have of LOCUM_COHORT_QUOTA_BYTES: delete cohorts that are not needed"
        )
    if size > 0 and used + size > quota:
        raise CohortFull(
            f"expected room for {size} bytes in all cohorts, found less of the {quota} of "
            "LOCUM_COHORT_QUOTA_BYTES: delete cohorts that are not needed, or let the operator raise it"
        )


@contextmanager
def staged(settings: Settings, upload: Upload) -> Iterator[Staged]:
    """Stage an upload. Raises CohortFull if the disk is full, FilesUnavailable."""
    try:
        with settings.open_files().stage(COHORTS, upload.chunks()) as aside:
            yield aside
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CohortFull("the service's disk is full: delete cohorts that are not needed") from error
