"""Find segmentations in a PACS that a person edited, and take them for corrections of the answers.

Our SEG or RTSTRUCT names the version that answered as a device, and an editor's keeps that name. One with the
voxels of the answer is our own, or says nothing of a person who looked.
"""

from __future__ import annotations

import io
from collections import Counter

from pydicom import Dataset, dcmread
from pydicom.errors import InvalidDicomError

from model_store.digest import sha256
from model_store.errors import LocumStoreError, ScanError
from service import corrections
from service.corrections import Desk, Sent
from service.errors import CorrectionError, PacsJobFailed, SeriesMismatched, SeriesMissing
from service.pacs.client import PacsClient, text_of
from service.pacs.requests import FillOptions
from service.runtime.spool import Upload
from service.settings import scan_limits
from service.worker.attempt import Attempt, AttemptOutcome
from service.worker.correction import measure
from service.worker.pacs import note, wanted, with_pacs


def run_pacs_correction(attempt: Attempt) -> AttemptOutcome:
    """Take what persons edited in a PACS. A later attempt finds what was taken unchanged.

    Raises:
        Postponed: the PACS does not answer; a later attempt goes on.
    """
    return with_pacs(attempt, _correct)


def _correct(attempt: Attempt, pacs: PacsClient) -> AttemptOutcome:
    options: FillOptions = attempt.options
    settings, hospital = attempt.settings, str(attempt.job.hospital)
    attempt.set_stage("searching")
    query = wanted(attempt)["query"]
    found = [
        item
        for modality in ("SEG", "RTSTRUCT")
        for item in pacs.search_series({**query, "Modality": modality}, options.most)
    ]
    if len(found) > options.most:
        raise PacsJobFailed(
            f"the query finds more than {options.most} series (`most`): narrow it, or accept more"
        )
    settings.spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    desk = Desk(attempt.database, settings, settings.open_store())
    counts, models = Counter[str](), set[str]()
    for place, item in enumerate(found, start=1):
        attempt.set_stage("fetching", series=place, of=len(found))
        study = text_of(item, "StudyInstanceUID")
        try:
            what = _take(attempt, pacs, desk, study, text_of(item, "SeriesInstanceUID"), models)
        except (LocumStoreError, ScanError, SeriesMissing, SeriesMismatched, CorrectionError) as error:
            what = type(error).__name__
        counts[what] += 1
    for model in sorted(models):
        measure(attempt, hospital, model)
    taken = counts.pop("taken", 0)
    return AttemptOutcome("succeeded", result={"found": len(found), "taken": taken, "skipped": dict(counts)})


def _take(attempt: Attempt, pacs: PacsClient, desk: Desk, study: str, series: str, models: set[str]) -> str:
    """Take one segmentation; return what became of it."""
    settings, hospital = attempt.settings, str(attempt.job.hospital)
    limits = scan_limits(settings)
    content = pacs.fetch_series(study, series, limits)
    try:
        header = dcmread(io.BytesIO(content), stop_before_pixels=True)
    except InvalidDicomError:
        return "several instances"
    source = source_of(header)
    with attempt.database.read() as session:
        answer = corrections.find_series(session, hospital, source, devices_of(header)) if source else None
    if answer is None:
        return "not of an answer"
    scan = pacs.fetch_series(study, source, limits)
    note(attempt, "scan.fetched", pacs, scan=sha256(scan))
    with Upload(settings.spool) as mask, Upload(settings.spool) as below:
        mask.write(content)
        below.write(scan)
        sent = Sent("pacs", mask, below, edited=True, actor=attempt.job.actor)
        kept = corrections.keep(desk, hospital, [answer], sent)
    if kept is None:
        return "unchanged"
    models.add(answer.row.model)
    if not kept.created:
        return "taken before"
    note(attempt, "correction.stored", pacs, scan=None, mask=kept.view.mask, answer=kept.view.request)
    return "taken"


def source_of(header: Dataset) -> str:
    """The UID of the series that a segmentation is of; "" where it names none."""
    named = [*(header.get("ReferencedSeriesSequence") or [])]
    for frame in header.get("ReferencedFrameOfReferenceSequence") or []:
        for study in frame.get("RTReferencedStudySequence") or []:
            named += study.get("RTReferencedSeriesSequence") or []
    return str(named[0].get("SeriesInstanceUID", "")) if named else ""


def devices_of(header: Dataset) -> set[str]:
    """The UIDs of the devices that took part."""
    return {str(each.get("DeviceUID", "")) for each in header.get("ContributingEquipmentSequence") or []}
