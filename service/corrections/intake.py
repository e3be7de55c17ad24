"""Find the answer that a mask is of, check the mask against its scan, and keep both.

The scan comes with the mask, unless the service still has it: in a cohort of the hospital, or as a scan that
the caller's viewer sent. It is known by the digest of its bytes, or of a DICOM series by its UID, so that a
mask never gets to another scan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from model_store.preprocessing import classes_on
from model_store.scan import Scan, decode, decode_mask, is_contours, open_series
from model_store.store import Store
from model_store.task import Task
from service import observation, shadow
from service.cohorts import cohorts, masks
from service.cohorts.drawn import take_in_mask
from service.cohorts.intake import check_and_deidentify
from service.corrections import kept_answers, rows
from service.corrections.rows import CorrectionView, LabelChange, New
from service.database import (
    Cohort,
    CohortScan,
    Correction,
    Database,
    Job,
    Observation,
    ObservedLabel,
    caller_of,
    in_turn,
)
from service.errors import (
    AnsweredScanGone,
    AnswerUnknown,
    CohortInUse,
    CorrectionMismatch,
    MaskTaken,
    RequestInvalid,
)
from service.job_kinds import correction as correction_job
from service.jobs import records
from service.jobs.records import Asked, Work
from service.observation.rows import keyed_with
from service.prediction.dicom_instance import device_uid
from service.runtime.spool import Upload
from service.settings import Settings, cohort_limits, scan_limits
from service.viewers.scans import ViewerScan, ViewerScans

_LOCK = "the cohorts of corrections"
# The newest answers to a series that are looked at.
_MOST_ANSWERS = 100


@dataclass(frozen=True)
class Desk:
    """What taking a correction in needs, in the API and in the worker. The caller is the database's."""

    database: Database
    settings: Settings
    store: Store


@dataclass(frozen=True)
class Kept:
    """A stored correction, whether it is new, and the job that measures it, to be sent on; None for none."""

    view: CorrectionView
    created: bool
    job: str | None


@dataclass(frozen=True)
class Found:
    """An answer that may be corrected: its observation, and the voxels of its labels."""

    row: Observation
    voxels: Mapping[str, int]


@dataclass
class Sent:
    """What a person sends: a mask, or that the answer was right.

    `scan` is replaced by its de-identified bytes. `name` is the scan's in the cohort, and tells its patient.
    `names` are those of the mask's values, where a viewer has values of its own. `edited`: only a mask that
    differs from the answer is a person's, since the answer itself comes the same way.
    """

    way: str
    mask: Upload | None = None
    scan: Upload | None = None
    accepted: bool = False
    seconds: float | None = None
    note: str | None = None
    name: str | None = None
    series: str | None = None
    names: Mapping[int, str] | None = None
    edited: bool = False
    actor: str | None = None


def find_answer(session: Session, hospital: str, request: str) -> list[Found]:
    """The answers of a request: several where a job answered several scans. Raises AnswerUnknown."""
    query = select(Observation).where(Observation.hospital == hospital, Observation.request == request)
    found = list(session.scalars(query.order_by(Observation.id)))
    if not found:
        raise AnswerUnknown(
            f"{hospital} has no answer of request '{request}': send the id that the answer had as "
            "`Locum-Request`, before the observation expires (LOCUM_OBSERVATION_DAYS)"
        )
    return [_with_voxels(session, each) for each in found]


def find_series(session: Session, hospital: str, series: str, devices: Collection[str]) -> Found | None:
    """The newest answer to a DICOM series, by its UID, of a network that is one of these devices; else None.

    Each version of a network is a device with a UID, which its SEG names and editors leave in theirs.
    """
    query = select(Observation).where(Observation.hospital == hospital, Observation.choice.is_not(None))
    query = query.where(Observation.series == keyed_with(session)(series)).order_by(Observation.id.desc())
    for row in session.scalars(query.limit(_MOST_ANSWERS)):
        if device_uid(str((row.choice or {}).get("model"))) in devices:
            return _with_voxels(session, row)
    return None


def find_viewed(desk: Desk, image: str, model: str | None = None) -> tuple[Found, Upload]:
    """The newest answer that the caller's viewer got of a scan that it sent, and that scan. Blocking.

    `image` is its name. A viewer sends a scan again before its mask: where this one was not answered,
    the one of the caller's scans counts that has the same voxels on the same grid. `model`: the answer's, if
    there is one.

    Raises ViewerScanUnknown, AnswerUnknown.
    """
    scans = ViewerScans(desk.database, desk.settings)
    named = scans.find(image)
    for each in (named, *_alike(scans, named, desk.settings)):
        with desk.database.read() as session:
            found = _newest(session, each, model)
        if found is not None:
            return found, _upload(desk.settings, each.read())
    raise AnswerUnknown(
        "no answer to this scan is known for a hospital: choose the hospital among the viewer's options, "
        "segment the scan, then send its mask"
    )


def _alike(scans: ViewerScans, named: ViewerScan, settings: Settings) -> Iterator[ViewerScan]:
    limits = scan_limits(settings)
    own = decode(named.read(), limits)
    for each in reversed(scans.all()):
        if each.id == named.id:
            continue
        other = decode(each.read(), limits)
        if other.affine is None or own.affine is None:
            same = other.affine is own.affine
        else:
            same = np.allclose(other.affine * other.mm_per_unit, own.affine * own.mm_per_unit, atol=1e-4)
        if same and np.array_equal(other.voxels, own.voxels):
            yield each


def _newest(session: Session, scan: ViewerScan, model: str | None) -> Found | None:
    keyed, caller = keyed_with(session), caller_of(session)
    same = Observation.scan == keyed(scan.sha256)
    if scan.series is not None:
        same = or_(same, Observation.series == keyed(scan.series))
    query = select(Observation).where(same, Observation.actor == caller.actor)
    query = query.where(Observation.hospital.is_not(None))
    if caller.hospitals is not None:
        query = query.where(Observation.hospital.in_(caller.hospitals))
    newest = query.order_by(Observation.id.desc())
    of_model = newest.where(Observation.model == model)
    found = session.scalars(of_model).first() or session.scalars(newest).first()
    return None if found is None else _with_voxels(session, found)


def next_viewed(desk: Desk) -> ViewerScan | None:
    """The scan of the caller's viewer to look at first: answered, not corrected, the least sure. Blocking."""
    scans = ViewerScans(desk.database, desk.settings).all()
    doubts: dict[int, float] = {}
    with desk.database.read() as session:
        for number, scan in enumerate(scans):
            found = _newest(session, scan, None)
            corrected = select(Correction.id).where(Correction.observation == (found.row.id if found else 0))
            if found is None or session.scalar(corrected) is not None:
                continue
            assert found.row.hospital is not None
            ranks = observation.doubts(session, found.row.hospital, [scan.sha256])
            doubts[number] = ranks.get(scan.sha256, 1.0)
    return scans[min(doubts, key=doubts.__getitem__)] if doubts else None


def keep(desk: Desk, hospital: str, answers: list[Found], sent: Sent) -> Kept | None:
    """Store a correction, with a job that measures it. Blocking.

    None where the mask is the answer, and `sent.edited` says that such a mask is no person's.

    Raises:
        CorrectionMismatch: the scan is not the one that was answered.
        AnsweredScanGone: there is no scan to check the mask against.
        ScanError: the mask does not fit the scan.
        CohortError, QueueFull, StoreError.
    """
    if sent.accepted == (sent.mask is not None):
        raise RequestInvalid(
            [{"field": "body.mask", "reason": "expected a mask, or accepted=true without one"}]
        )
    if sent.mask is None:
        return _put(desk, _right(answers), sent, None, accepted=True)
    own: Upload | None = None
    try:
        found, scan = _scan_of(desk, hospital, answers, sent)
        task = desk.store.by_digest(found.row.version).manifest.task
        if task.kind != "segmentation":
            reason = f"the answer of '{found.row.model}' is a class, which has no mask"
            raise RequestInvalid([{"field": "body.mask", "reason": reason}])
        if scan is None:
            return _keep_alone(desk, found, sent, task)
        own = scan
        scan_format = check_and_deidentify(scan, desk.settings, sent.series)
        below = decode(scan.read(), cohort_limits(desk.settings))
        if [*below.grid] != found.row.size:
            # A part of the series, say.
            raise CorrectionMismatch(
                f"the scan has the grid {[*below.grid]}, and the one that was answered {found.row.size}: "
                "send the whole scan"
            )
        decoded = take_in_mask(sent.mask, below, task, desk.settings, sent.names)
        accepted = _is_answer(desk, found, sent.mask, below, task)
        if accepted and sent.edited:
            return None
        place = _keep_files(desk, found, sent, scan, scan_format, decoded)
        return _put(desk, found, sent, place, accepted=accepted)
    finally:
        if own is not None and own is not sent.scan:
            own.close()


def _keep_alone(desk: Desk, found: Found, sent: Sent, task: Task) -> Kept:
    """Store a correction of a scan that is not there: beside the answered mask, where that is kept."""
    assert sent.mask is not None
    # Contours are no mask without their scan.
    if not is_contours(sent.mask.read()):
        answered = kept_answers.find(desk.database, desk.settings, found.row)
        if answered is not None:
            take_in_mask(sent.mask, answered.scan, task, desk.settings, sent.names)
            accepted = _is_answer(desk, found, sent.mask, answered.scan, task)
            if not accepted:
                kept_answers.add_corrected(desk.database, desk.settings, answered, sent.mask)
            return _put(desk, found, sent, None, accepted=accepted)
        alone = decode_mask(sent.mask.read(), scan_limits(desk.settings))
        if _is_answer(desk, found, sent.mask, alone, task):
            return _put(desk, found, sent, None, accepted=True)
    raise AnsweredScanGone(
        f"the scan of request '{found.row.request}' is not kept here: send it as `scan`, with the mask"
    )


def _is_answer(desk: Desk, found: Found, mask: Upload, below: Scan, task: Task) -> bool:
    """Whether a mask has the voxels of the answer."""
    with desk.database.read() as session:
        keyed = keyed_with(session)
    drawn = classes_on(below, decode_mask(mask.read(), scan_limits(desk.settings)), task)
    return keyed(observation.mask_digest(drawn)) == found.row.mask


def _right(answers: list[Found]) -> Found:
    if len(answers) > 1:
        raise AnsweredScanGone(
            f"request '{answers[0].row.request}' answered {len(answers)} scans: send one of them, "
            "with its mask"
        )
    return answers[0]


def _scan_of(desk: Desk, hospital: str, answers: list[Found], sent: Sent) -> tuple[Found, Upload | None]:
    """The answer, and the bytes of its scan: those that were sent, or that the service has."""
    with desk.database.read() as session:
        keyed = keyed_with(session)
    if sent.scan is not None:
        digest, series = keyed(sent.scan.sha256), _series_of(sent.scan, desk.settings)
        same = [
            each
            for each in answers
            if each.row.scan == digest or (series is not None and each.row.series == keyed(series))
        ]
        if not same:
            raise CorrectionMismatch(
                f"the scan (its sha256 begins with {sent.scan.sha256.removeprefix('sha256:')[:12]}) is not "
                f"the one that request '{answers[0].row.request}' answered: send the bytes that were sent "
                "to /segment, or correct the answer of this scan"
            )
        return same[0], sent.scan
    found = _right(answers)
    with desk.database.read() as session:
        kept = kept_scans(session, hospital, {found.row.scan}).get(found.row.scan)
    if kept is not None:
        return found, _upload(desk.settings, cohorts.file_of(desk.settings, kept, kept.name).read())
    for viewed in ViewerScans(desk.database, desk.settings).all():
        if keyed(viewed.sha256) == found.row.scan:
            return found, _upload(desk.settings, viewed.read())
    return found, None


def kept_scans(session: Session, hospital: str, answered: Collection[str]) -> dict[str, CohortScan]:
    """The scans of the hospital's cohorts that were answered, by the digest that the answer keeps of each."""
    query = select(CohortScan).join(Cohort, Cohort.id == CohortScan.cohort)
    query = query.where(Cohort.hospital == hospital, Cohort.deleted_at.is_(None)).order_by(CohortScan.id)
    keyed = keyed_with(session)
    found = ((keyed(f"sha256:{row.sha256}"), row) for row in session.scalars(query))
    return {digest: row for digest, row in found if digest in answered}


def _series_of(scan: Upload, settings: Settings) -> str | None:
    """The SeriesInstanceUID of DICOM files; None of others."""
    limits = cohort_limits(settings)
    if decode(scan.read(), limits).format != "dicom":
        return None
    uid = open_series(scan.read(), limits).headers[0].get("SeriesInstanceUID")
    return None if uid is None else str(uid)


def _upload(settings: Settings, content: bytes) -> Upload:
    upload = Upload(settings.spool)
    upload.write(content)
    return upload


def _keep_files(
    desk: Desk,
    found: Found,
    sent: Sent,
    scan: Upload,
    scan_format: str,
    decoded: masks.DecodedMask,
) -> tuple[str, str]:
    """Put scan and mask into a cohort of corrections: (its id, the scan's name there)."""
    assert sent.mask is not None
    assert found.row.hospital is not None
    database, settings, hospital = desk.database, desk.settings, found.row.hospital
    name = sent.name or f"scan-{found.row.scan[:16]}"
    with database.write() as session:
        cohort = _cohort_for(session, settings, hospital, found.row.model, name)
    row, _ = cohorts.add_scan(database, settings, hospital, cohort, name, scan, scan_format)
    try:
        masks.add_mask(database, settings, hospital, cohort, row, sent.mask, decoded)
    except MaskTaken:
        masks.add_mask(database, settings, hospital, cohort, row, sent.mask, decoded, lambda _: True)
    return cohort, name


def _cohort_for(session: Session, settings: Settings, hospital: str, model: str, name: str) -> str:
    """The cohort of corrections that takes a scan: the oldest that has it, or has room and no job."""
    in_turn(session, _LOCK)
    query = select(Cohort).where(
        Cohort.hospital == hospital, Cohort.corrections_of == model, Cohort.deleted_at.is_(None)
    )
    expires = datetime.now(UTC) + timedelta(days=settings.correction_days)
    there = {row.id: row for row in session.scalars(query.order_by(Cohort.created_at, Cohort.id))}
    counts = cohorts.totals(session, there)
    has = select(CohortScan.cohort).where(CohortScan.cohort.in_(there), CohortScan.name == name)
    having = set(session.scalars(has))
    for number, cohort in sorted(there.items(), key=lambda item: item[0] not in having):
        try:
            cohorts.check_idle(session, number)
        except CohortInUse:
            continue
        if number in having or counts.get(number, (0, 0))[0] < settings.max_cohort_scans:
            cohort.expires_at = expires
            return number
    made = cohorts.create(session, settings, hospital, "kept by the service", f"Corrections of {model}")
    made.corrections_of, made.may_train, made.expires_at = model, False, expires
    return made.id


def _put(desk: Desk, found: Found, sent: Sent, place: tuple[str, str] | None, *, accepted: bool) -> Kept:
    row, mask = found.row, sent.mask
    assert row.hospital is not None
    job: str | None = None
    with desk.database.write() as session:
        new = New(
            observation=row.id,
            hospital=row.hospital,
            model=row.model,
            version=row.version,
            request=row.request,
            scanner=row.scanner,
            answered_at=row.at,
            way=sent.way,
            actor=sent.actor or caller_of(session).actor,
            accepted=accepted,
            seconds=sent.seconds,
            note=sent.note,
            mask=None
            if mask is None or (place is None and accepted)
            else mask.sha256.removeprefix("sha256:"),
            cohort=None if place is None else place[0],
            scan=None if place is None else place[1],
        )
        in_ml = row.spacing is not None
        labels = {name: LabelChange.none(voxels, in_ml=in_ml) for name, voxels in found.voxels.items()}
        stored, created = rows.put(session, new, labels if accepted else None)
        if accepted and (second := shadow.of_request(session, None, row.request)) is not None:
            shadow.accepted(session, second.id)
        if stored.state == "waiting":
            job = _measuring(session, desk.settings, row.hospital, row.model)
    return Kept(stored, created, job)


def _measuring(session: Session, settings: Settings, hospital: str, model: str) -> str | None:
    """Make a job that measures what waits of a model; None where one waits already."""
    alike = {"kind": correction_job.KIND.name, "state": "queued", "hospital": hospital, "model": model}
    # Locked, so that it does not begin, and look, before this transaction ends.
    if session.scalars(select(Job).filter_by(**alike).with_for_update()).first():
        return None
    work = Work(kind=correction_job.KIND, hospital=hospital, model=model, options={})
    return records.create(session, settings, work, Asked()).id


def _with_voxels(session: Session, row: Observation) -> Found:
    query = select(ObservedLabel.label, ObservedLabel.voxels).where(ObservedLabel.observation == row.id)
    voxels = {label: count for label, count in session.execute(query)}  # noqa: C416 - rows are no pairs to mypy
    session.expunge(row)
    return Found(row, voxels)
