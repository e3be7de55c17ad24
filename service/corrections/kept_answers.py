"""Answered masks that a hospital chose to keep, so that a correction is compared with the mask itself.

answers/<id>/mask         class indices on the scan's grid, see `service.files`
answers/<id>/<sha256>     a mask that a person corrected, of a scan that the service does not have
a row `KeptAnswer`        hospital, request, a keyed digest of the voxels, bytes
a row `KeptAnswerRule`    what the hospital chose: days and bytes; without one nothing is kept

A row comes before its files and goes after them, so that no file is without one.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from model_store.errors import ScanError
from model_store.scan import Scan, decode_mask, encode_nifti, encode_png
from service import observation
from service.audit import trail
from service.database import Database, KeptAnswer, KeptAnswerRule, Observation, in_turn
from service.database.hospitals import share_of
from service.errors import FileDamaged, FilesUnavailable, RequestInvalid
from service.files import log_and_continue
from service.inference.pipeline import Segmentation
from service.observation import Observed
from service.observation.rows import keyed_with
from service.runtime.spool import Upload
from service.settings import Settings, scan_limits

ANSWERS = "answers"
MASK = "mask"

_log = logging.getLogger("locum.service")
_LOCK = "the kept answers"
# Rows that are deleted, with their files, before others are looked for.
_AT_ONCE = 200


@dataclass(frozen=True)
class KeptMask:
    """An answered mask: `id` of its row, its grid, and class indices as they were answered."""

    id: str
    scan: Scan
    classes: NDArray[np.uint8]


def rule_of(session: Session, hospital: str) -> KeptAnswerRule | None:
    """What a hospital chose; None where nothing is kept."""
    query = select(KeptAnswerRule).where(KeptAnswerRule.hospital == hospital)
    found = session.scalars(query.order_by(KeptAnswerRule.id.desc()).limit(1)).first()
    return None if found is None or found.days is None else found


def choose(
    session: Session,
    settings: Settings,
    hospital: str,
    days: int | None,
    quota_bytes: int,
    actor: str,
    reason: str,
) -> None:
    """Keep answered masks from now on, for so many days and in so many bytes; None: keep none.

    `trim` deletes what is kept beyond that. Raises RequestInvalid.
    """
    share = share_of(session, settings.cohort_quota_bytes)
    if days is not None and quota_bytes > share:
        raise RequestInvalid(
            [
                {
                    "field": "body.quota_bytes",
                    "reason": f"expected at most {share}, the hospital's share of LOCUM_COHORT_QUOTA_BYTES",
                }
            ]
        )
    now = datetime.now(UTC)
    session.add(
        KeptAnswerRule(
            hospital=hospital, days=days, quota_bytes=quota_bytes, actor=actor, reason=reason, at=now
        )
    )
    details = {"days": days, "quota_bytes": quota_bytes, "reason": reason}
    trail.append(session, "answers.chosen", hospital=hospital, actor=actor, details=details)


def size_of(session: Session, hospital: str) -> tuple[int, int]:
    """How many masks of a hospital are kept, and their bytes."""
    query = select(func.count(), func.coalesce(func.sum(KeptAnswer.size), 0))
    count, size = session.execute(query.where(KeptAnswer.hospital == hospital)).one()
    return int(count), int(size)


def keep(
    database: Database,
    settings: Settings,
    hospital: str | None,
    request: str,
    observed: Observed,
    found: Segmentation | None,
) -> None:
    """Keep an answered mask where its hospital chose that. Blocking.

    Errors are logged: the answer does not depend on it.
    """
    if hospital is None or found is None or observed.mask is None:
        return
    try:
        with database.read() as session:
            rule, keyed = rule_of(session, hospital), keyed_with(session)
            quota = 0 if rule is None else min(rule.quota_bytes, _share(session, settings))
        if rule is None:
            return
        content = _encoded(found)
        if len(content) > quota:
            _log.warning("the mask of request %s is larger than all that may be kept", request)
            return
        made = KeptAnswer(
            id=uuid.uuid4().hex,
            hospital=hospital,
            request=request,
            mask=keyed(observed.mask),
            size=len(content),
            at=datetime.now(UTC),
        )
        with database.write() as session:
            in_turn(session, _LOCK)
            # A later attempt of a job answers again.
            if _row(session, hospital, request, made.mask) is not None:
                return
            session.add(made)
        settings.open_files().write(_key(made.id, MASK), content)
        with database.read() as session:
            still = session.get(KeptAnswer, made.id) is not None
        if not still:
            # The hospital took its choice back at this moment.
            settings.open_files().remove_folder(f"{ANSWERS}/{made.id}")
        trim(database, settings, hospital)
    except (OSError, SQLAlchemyError, FilesUnavailable) as error:
        _log.warning("the mask of request %s is not kept: %s", request, type(error).__name__)


def find(database: Database, settings: Settings, answer: Observation) -> KeptMask | None:
    """The mask of an answer as it was served; None where it is not kept. Raises FilesUnavailable. Blocking.

    One with other voxels is left out: the version that answered can answer again.
    """
    if answer.mask is None or answer.hospital is None:
        return None
    with database.read() as session:
        row, keyed = _row(session, answer.hospital, answer.request, answer.mask), keyed_with(session)
    if row is None:
        return None
    try:
        content = settings.open_files().read(_key(row.id, MASK))
        scan = None if content is None else decode_mask(content, scan_limits(settings))
    except (FileDamaged, ScanError):
        scan = None
    if scan is None:
        return None
    classes = np.ascontiguousarray(scan.voxels[..., 0].reshape(scan.grid), np.uint8)
    if keyed(observation.mask_digest(classes)) != answer.mask:
        _log.warning("the kept mask of request %s has other voxels than were answered", answer.request)
        return None
    return KeptMask(row.id, scan, classes)


def add_corrected(database: Database, settings: Settings, kept: KeptMask, mask: Upload) -> None:
    """Keep a corrected mask beside the answered one, as long. Blocking. Raises FilesUnavailable."""
    with database.write() as session:
        grown = update(KeptAnswer).where(KeptAnswer.id == kept.id)
        session.execute(grown.values(size=KeptAnswer.size + mask.size))
    settings.open_files().write(_key(kept.id, mask.sha256.removeprefix("sha256:")), mask.read())


def read_corrected(settings: Settings, kept: KeptMask, sha256: str) -> bytes | None:
    """A corrected mask of the digest; None where it is not there. Raises FileDamaged, FilesUnavailable."""
    return settings.open_files().read(_key(kept.id, sha256))


def trim(database: Database, settings: Settings, hospital: str) -> None:
    """Delete what is older or more than the hospital chose, the oldest first. Blocking."""
    while True:
        with database.read() as session:
            beyond = _beyond(session, settings, hospital)
        if not beyond or not _delete(database, settings, beyond):
            return


def trim_all(database: Database, settings: Settings) -> None:
    """The same of every hospital."""
    with database.read() as session:
        hospitals = list(session.scalars(select(KeptAnswer.hospital).distinct()))
    for hospital in hospitals:
        trim(database, settings, hospital)


def delete_of(database: Database, settings: Settings, hospital: str) -> None:
    """Delete all kept answers of a hospital; the choice stays. Blocking."""
    while True:
        with database.read() as session:
            query = select(KeptAnswer.id).where(KeptAnswer.hospital == hospital).limit(_AT_ONCE)
            found = list(session.scalars(query))
        if not found or not _delete(database, settings, found):
            return


def _beyond(session: Session, settings: Settings, hospital: str) -> list[str]:
    """The oldest masks that are beyond days or bytes, some at once."""
    rule = rule_of(session, hospital)
    own = select(KeptAnswer.id, KeptAnswer.size).where(KeptAnswer.hospital == hospital)
    oldest = own.order_by(KeptAnswer.at, KeptAnswer.id).limit(_AT_ONCE)
    if rule is None or rule.days is None:
        return [row.id for row in session.execute(oldest)]
    # Without its observation nothing leads to a mask.
    days = min(rule.days, settings.observation_days)
    late = oldest.where(KeptAnswer.at < datetime.now(UTC) - timedelta(days=days))
    found = [row.id for row in session.execute(late)]
    if found:
        return found
    _, size = size_of(session, hospital)
    for row in session.execute(oldest):
        if size <= min(rule.quota_bytes, _share(session, settings)):
            break
        found.append(row.id)
        size -= row.size
    return found


def _share(session: Session, settings: Settings) -> int:
    return share_of(session, settings.cohort_quota_bytes)


def _delete(database: Database, settings: Settings, ids: list[str]) -> bool:
    """Delete files, then rows. What cannot be deleted now stays for the next pass: then false."""
    gone: list[str] = []
    for number in ids:
        with log_and_continue(f"the kept mask {number}"):
            settings.open_files().remove_folder(f"{ANSWERS}/{number}")
            gone.append(number)
    with database.write() as session:
        session.execute(delete(KeptAnswer).where(KeptAnswer.id.in_(gone)))
    return len(gone) == len(ids)


def _row(session: Session, hospital: str, request: str, mask: str) -> KeptAnswer | None:
    own = (KeptAnswer.hospital == hospital, KeptAnswer.request == request, KeptAnswer.mask == mask)
    return session.scalars(select(KeptAnswer).where(*own)).first()


def _encoded(found: Segmentation) -> bytes:
    scan = found.scan
    if scan.affine is None:
        return encode_png(found.classes)
    return encode_nifti(found.classes, scan.affine, scan.mm_per_unit, scan.forms)


def _key(number: str, name: str) -> str:
    return f"{ANSWERS}/{number}/{name}"
