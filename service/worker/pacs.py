"""Run the jobs on a PACS: segment a series, and store the SEG or keep the answer; fill a cohort.

What is to be stored is kept as the job's checkpoint before it is sent, so that a later attempt sends the same
instances, whatever the PACS holds by then. If the version that answered was withdrawn meanwhile, the job
fails, unless the PACS has the SEG already. A job that is cancelled while it stores stores the rest, too, and
succeeds: the PACS must have no SEG without its row in the audit trail, and none without its report.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from pydicom import dcmread

from model_store.digest import sha256
from model_store.errors import ScanError
from service.audit import trail
from service.catalog.network import Selection, resolve_network
from service.cohorts import cohorts
from service.cohorts.intake import check_and_deidentify, uid_key
from service.errors import (
    CohortInUse,
    PacsJobFailed,
    PacsUnavailable,
    SeriesMismatched,
    SeriesMissing,
    ServiceError,
)
from service.jobs.files import StoredResult, StoredScan
from service.jobs.leases import fenced
from service.observation import Observed
from service.pacs.client import Found, PacsClient, text_of
from service.pacs.configuration import PacsServer, server_for
from service.pacs.requests import FillOptions, FollowUpOptions, SeriesOptions
from service.prediction.answer import EncodedAnswer
from service.prediction.options import SegmentOptions
from service.runtime.spool import Upload, pack_into
from service.settings import scan_limits
from service.worker.attempt import Attempt, AttemptOutcome, Postponed
from service.worker.segment import segment_scan

Made = TypeVar("Made")

_LONGEST_PAUSE_SECONDS = 600.0


def run_pacs_segment(attempt: Attempt) -> AttemptOutcome:
    """Segment a series of a PACS. The runner reports any error as the job's reason.

    Raises:
        Postponed: the PACS does not answer; a later attempt goes on.
    """
    return with_pacs(attempt, _segment)


def run_pacs_cohort(attempt: Attempt) -> AttemptOutcome:
    """Add the series that a query finds to a cohort. A later attempt skips those that were added.

    Raises:
        Postponed: the PACS does not answer, or another job needs the cohort; a later attempt goes on.
    """
    return with_pacs(attempt, _fill)


def with_pacs(attempt: Attempt, work: Callable[[Attempt, PacsClient], Made]) -> Made:
    """Do the work of a job on its PACS. Raises Postponed where the PACS does not answer."""
    attempt.set_stage("preparing")
    name, hospital = attempt.options.pacs, str(attempt.job.hospital)
    server = server_for(attempt.settings.pacs, name, hospital)
    try:
        with PacsClient(name, server, attempt.check_cancelled) as pacs:
            return work(attempt, pacs)
    except (PacsUnavailable, CohortInUse) as error:
        raise _postponed(attempt, server, error) from None


def _segment(attempt: Attempt, pacs: PacsClient) -> AttemptOutcome:
    folder = attempt.folder
    options: SeriesOptions = attempt.options
    # The checkpoint of an earlier attempt, which was lost before the PACS had confirmed all of it.
    kept = attempt.read_checkpoint()
    if kept is None:
        data = _fetch(attempt, pacs)
        answer, digest = _answer(attempt, options.segmentation(), data)
        if not options.store:
            folder.write_result(StoredResult(answer.body, answer.media_type, answer.headers))
            return AttemptOutcome("succeeded", observed=answer.observed)
        if answer.unlike and not options.store_unlike:
            warnings = "; ".join(each.text for each in answer.unlike)
            raise PacsJobFailed(
                f"the guard warns of the scan ({warnings}): nothing was stored. Look at the answer without "
                "`store`, or send the request again with store_unlike=true"
            )
        attempt.check_cancelled()
        kept = _packed(answer, digest)
        folder.write(folder.CHECKPOINT, kept)
    attempt.set_stage("storing")
    about: dict[str, Any] = {"pacs": pacs.name}
    new = False
    network, observed, *instances = unpacked(kept)

    def check_version() -> None:
        opened = attempt.settings.open_store()
        opened.by_digest(attempt.job.parent)
        opened.by_digest(network.decode())

    for place, content in enumerate(instances):
        # A report follows a SEG that the PACS has, whatever happened to the version.
        stored_now = pacs.store(content, check_version if place == 0 else None)
        new |= stored_now
        made = dcmread(io.BytesIO(content), stop_before_pixels=True)
        uids = {keyword: str(made.get(keyword)) for keyword in _UIDS}
        if made.Modality in ("SEG", "RTSTRUCT"):
            note(attempt, "mask.stored", pacs, new=stored_now)
            about |= uids
        else:
            note(attempt, "report.stored", pacs, new=stored_now)
            about["report"] = uids
    folder.write_result(StoredResult(json.dumps(about).encode(), "application/json", {}))
    result = {"stored": True, "new": new}
    return AttemptOutcome("succeeded", result=result, observed=Observed.from_json(observed))


_UIDS = ("StudyInstanceUID", "SeriesInstanceUID", "SOPClassUID", "SOPInstanceUID")


def _packed(answer: EncodedAnswer, network: str) -> bytes:
    """The network's digest, what is stored of the answer, and the instances, the SEG before the report that
    refers to it."""
    packed = io.BytesIO()
    parts = [network.encode(), answer.observed.to_json(), *filter(None, [answer.segmentation]), answer.body]
    pack_into(packed.write, parts)
    return packed.getvalue()


def unpacked(kept: bytes) -> list[bytes]:
    """The parts of a stored zip, in order; what is no zip is its own."""
    if not zipfile.is_zipfile(io.BytesIO(kept)):
        return [kept]
    with zipfile.ZipFile(io.BytesIO(kept)) as archive:
        return [archive.read(name) for name in archive.namelist()]


def wanted(attempt: Attempt) -> dict[str, Any]:
    """What a job on a PACS looks for. Raises PacsJobFailed."""
    content = attempt.folder.read(attempt.folder.REQUEST)
    if content is None:
        raise PacsJobFailed("what was asked for is not there any more; send the request again")
    found: dict[str, Any] = json.loads(content)
    return found


def _fetch(attempt: Attempt, pacs: PacsClient) -> bytes:
    asked = wanted(attempt)
    attempt.set_stage("fetching")
    data = pacs.fetch_series(asked["study"], asked["series"], scan_limits(attempt.settings))
    note(attempt, "scan.fetched", pacs, scan=sha256(data))
    return data


def _answer(attempt: Attempt, options: SegmentOptions, data: bytes) -> tuple[EncodedAnswer, str]:
    """The answer, and the digest of the network that gave it."""
    selection = selection_of(attempt, options)
    # A version that is named, as here, has no warning of the watch by itself.
    selection = replace(selection, alarmed=wanted(attempt).get("alarmed", False))
    answer = segment_scan(attempt, options, selection, StoredScan(data, sha256(data), len(data)))
    for warning in filter(None, answer.headers.get("Locum-Warning-Names", "").split(", ")):
        attempt.warn(warning)
    return answer, selection.model.digest


def selection_of(attempt: Attempt, options: SegmentOptions | FollowUpOptions) -> Selection:
    """Choose the network of the version that the request was accepted with."""
    return resolve_network(
        attempt.settings.open_store(),
        attempt.database,
        f"{attempt.job.model}@{attempt.job.parent}",
        options.hospital,
        options.personalization,
        options.site,
        kind="segmentation",
    )


def _fill(attempt: Attempt, pacs: PacsClient) -> AttemptOutcome:
    options: FillOptions = attempt.options
    settings, cohort, most = attempt.settings, str(attempt.job.cohort), options.most
    attempt.set_stage("searching")
    found = pacs.search_series(wanted(attempt)["query"], most)
    if len(found) > most:
        raise PacsJobFailed(f"the query finds more than {most} series (`most`): narrow it, or accept more")
    settings.spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = uid_key(settings)
    with attempt.database.read() as session:
        cohorts.usable(session, str(attempt.job.hospital), cohort)
        present = {scan.name for scan in cohorts.scans(session, cohort)}
    added, already, skipped = 0, 0, Counter[str]()
    for place, item in enumerate(found, start=1):
        attempt.set_stage("fetching", series=place, of=len(found))
        name = _scan_name(item, key)
        if name in present:
            already += 1
            continue
        try:
            data = pacs.fetch_series(
                text_of(item, "StudyInstanceUID"), text_of(item, "SeriesInstanceUID"), scan_limits(settings)
            )
            with Upload(settings.spool) as upload:
                upload.write(data)
                scan_format = check_and_deidentify(upload, settings)
                attempt.check_cancelled()
                cohorts.add_scan(
                    attempt.database,
                    settings,
                    str(attempt.job.hospital),
                    cohort,
                    name,
                    upload,
                    scan_format,
                )
                note(attempt, "scan.stored", pacs, scan=upload.sha256, cohort=cohort)
        except (ScanError, SeriesMissing, SeriesMismatched) as error:
            skipped[type(error).__name__] += 1
            continue
        added += 1
    result = {"found": len(found), "added": added, "already": already, "skipped": dict(skipped)}
    if added + already == 0:
        reason = f"none of the {len(found)} series that the query finds is a scan that can be read"
        return AttemptOutcome("failed", reason if found else "the query finds no series", result)
    return AttemptOutcome("succeeded", result=result)


def _scan_name(item: Found, key: bytes) -> str:
    """Keyed hashes of patient and series: the same series has one name, and so has a patient."""
    patient = text_of(item, "PatientID") or text_of(item, "StudyInstanceUID")
    parts = (f"patient {patient}", f"series {text_of(item, 'SeriesInstanceUID')}")
    return "/".join(hmac.digest(key, part.encode(), hashlib.sha256).hex()[:20] for part in parts)


def note(attempt: Attempt, action: str, pacs: PacsClient, scan: str | None = None, **more: Any) -> None:
    """Add a row to the audit trail, while the lease is in force."""
    details = {"job": attempt.job.id, "pacs": pacs.name, "started_by": attempt.job.actor, **more}
    with fenced(attempt.database, attempt.lease) as (session, job):
        trail.append(
            session,
            action,
            hospital=job.hospital,
            version=job.parent or None,
            scan=scan,
            details=details,
        )


def _postponed(attempt: Attempt, server: PacsServer, error: ServiceError) -> Exception:
    """As long a pause as all the time before, so that pauses double; the error itself after the last."""
    now = datetime.now(UTC)
    waited = (now - attempt.job.created_at).total_seconds()
    if waited > server.give_up_hours * 3600:
        return PacsJobFailed(
            f"{error}, {server.give_up_hours:.3g} h after the request: send it again when it does"
        )
    longest = max(_LONGEST_PAUSE_SECONDS, server.first_retry_seconds)
    pause = min(max(waited, server.first_retry_seconds), longest)
    return Postponed(str(error), now + timedelta(seconds=pause))
