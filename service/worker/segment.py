"""Segment one scan in the worker: a job of kind `segment`, and the answer of a job on a PACS.

The answer equals that of `/segment`, headers included, but for the times in it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from typing_extensions import override

from model_store.manifest import GRAPH, SsfPoolManifest
from service.catalog.adapted import origin_of
from service.catalog.network import Selection, chosen_before
from service.corrections import kept_answers
from service.errors import ScanGone, ScanJobTooLong
from service.inference.pipeline import Stopwatch
from service.inference.shift import Reference
from service.inference.volumes import Between
from service.jobs.files import StoredResult, StoredScan
from service.observation import Reviews
from service.prediction.answer import EncodedAnswer, LoadedGraph, receipt_of
from service.prediction.options import SegmentOptions
from service.prediction.segmentation import SegmentationPredictor
from service.serving import key_usage
from service.settings import scan_limits
from service.worker.attempt import Attempt, AttemptOutcome
from service.worker.pictures import load

# About as often the windows that are done are noted: each note is an event of the job.
_NOTES = 50


def run_segment(attempt: Attempt) -> AttemptOutcome:
    """Segment the scan of the job. The runner reports any error as the job's reason."""
    attempt.set_stage("preparing")
    scan = attempt.folder.read_input()
    if scan is None or scan.chosen is None:
        raise ScanGone("the scan is not there any more; send it again")
    options: SegmentOptions = attempt.options.model_copy(update={"series": scan.series})
    selection = chosen_before(attempt.settings.open_store(), attempt.job.parent, scan.chosen)
    selection = replace(selection, alarmed=scan.alarmed)
    answer = segment_scan(attempt, options, selection, scan)
    attempt.check_cancelled()
    attempt.folder.write_result(StoredResult(answer.body, answer.media_type, answer.headers))
    return AttemptOutcome("succeeded", observed=answer.observed)


class _Progress(Between):
    """Notes the progress of a job, and ends one that takes longer than `LOCUM_SCAN_JOB_SECONDS`."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt, self._most = attempt, attempt.settings.scan_job_seconds
        self._began = time.monotonic()

    @override
    def look(self) -> None:
        """Raises what `check_cancelled` raises, and ScanJobTooLong."""
        self._attempt.check_cancelled()
        self._check(time.monotonic() - self._began)

    @override
    def before_run(self, done: int, total: int, seconds: float | None) -> None:
        self.look()
        if seconds is not None:
            self._check(seconds)
        if done % max(1, total // _NOTES):
            return
        left = {}
        if seconds is not None:
            left["seconds_left"] = max(0, round(seconds * (1 - done / total)))
        self._attempt.set_stage("segmenting", window=done, windows=total, **left)

    def _check(self, seconds: float) -> None:
        if seconds > self._most:
            raise ScanJobTooLong(
                f"the scan takes {seconds:.0f} s or more, and a job on one scan may take {self._most} s: "
                "send a part of the scan, or set LOCUM_SCAN_JOB_SECONDS higher"
            )


def segment_scan(
    attempt: Attempt, options: SegmentOptions, selection: Selection, scan: StoredScan
) -> EncodedAnswer:
    """Run the chosen network on a scan, window by window, with the job's progress and cancellation.

    Raises ScanError, StoreError, ServiceError.
    """
    attempt.set_stage("segmenting")
    settings = attempt.settings
    predictor = SegmentationPredictor(
        request_id=attempt.job.request_id or attempt.job.id,
        options=options,
        selection=selection,
        input_sha256=scan.received_sha256,
        input_bytes=scan.received_bytes,
        limits=scan_limits(settings, selection.manifest.task),
        watch=Stopwatch(),
        reviews=Reviews(attempt.database),
        between=_Progress(attempt),
    )
    reading = predictor.read(scan.content)
    behind = origin_of(settings.open_store(), selection.offered)
    reference = Reference.of(behind, selection.model)
    session = load(selection.model.read(GRAPH), settings, reference)
    graph = LoadedGraph(session, receipt_of(selection.model), behind.name)
    answer = predictor.make(reading, graph)
    kept_answers.keep(
        attempt.database, settings, options.hospital, predictor.request_id, answer.observed, answer.found
    )
    if answer.picked is not None and options.hospital is not None:
        pool = selection.offered.expect(SsfPoolManifest)
        key_usage.note(attempt.database, options.hospital, pool, answer.picked)
    return answer
