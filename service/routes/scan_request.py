"""Receive one scan, choose a network and answer: shared by `/segment` and `/classify`.

with await receive_scan(request, context, watch) as form:
    scan = scan_in(form)
    return await answer_now(request, context, kind, options, selection, scan, watch)

`/segment` lets a job do what would take long.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anyio import to_thread
from fastapi import Request
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, SsfPoolManifest
from model_store.scan import MOST_FILES, kind_of, series_of
from service.catalog.network import Selection
from service.context import ServiceContext
from service.http.audit import concerns
from service.http.problems import Problem
from service.http.uploads.multipart import malformed, missing, shown
from service.http.uploads.receive import UploadForm, UploadLimits, receive
from service.inference.pipeline import PreparedScan, Stopwatch
from service.inference.volumes import BetweenPatches, Deadline, TakesLonger
from service.prediction.answer import LoadedGraph, Options, Predictor, receipt_of
from service.runtime.spool import ScanFile, Upload, pack, pack_channels
from service.serving import key_usage
from service.settings import scan_limits

# How soon a client's leaving ends the work on its volume.
_LOOK_SECONDS = 0.5


async def receive_scan(
    request: Request,
    context: ServiceContext,
    watch: Stopwatch,
    field: str = "scan",
    *,
    by_channel: bool = False,
) -> UploadForm:
    """The form with the scan; rejected before it is read when the queue is full.

    Several files in the `field` are packed as one zip: the files of a DICOM series. `by_channel`: files in
    fields `FIELD.CHANNEL` are packed as a zip of channels.

    Raises ServiceBusy, Problem, ClientDisconnect.
    """

    async def admit() -> None:
        context.admission.refuse_if_full()

    with watch.stage("receive"):
        limits = UploadLimits(context.settings.max_upload_bytes, MOST_FILES)
        spool = context.settings.spool
        form = await receive(
            request,
            spool,
            limits,
            file_fields=(field,),
            repeated_fields=(field,),
            by_channel=field if by_channel else None,
            admit=admit,
        )
        parts = form.repeated.pop(field, [])
        channels = {name.removeprefix(f"{field}."): files for name, files in form.repeated.items()}
        if channels and parts:
            form.repeated[field] = parts
            form.close()
            raise malformed(
                f"expected the field '{field}', or one field '{field}.CHANNEL' for each channel, found both"
            )
        try:
            if channels:
                for name, files in channels.items():
                    await to_thread.run_sync(_check_series, f"{field}.{name}", files)
                form.files[field] = await to_thread.run_sync(pack_channels, channels, spool)
            elif len(parts) == 1:
                form.files[field] = parts[0]
            elif parts:
                await to_thread.run_sync(_check_series, field, parts)
                form.files[field] = await to_thread.run_sync(pack, parts, spool)
        except Problem:
            form.repeated[field] = parts
            form.close()
            raise
        return form


def _check_series(field: str, files: Sequence[Upload]) -> None:
    """Raise Problem 422 for several files that are no series: packed, they would be called an archive."""
    heads = [each.head() for each in files] if len(files) > 1 else []
    if not heads or series_of(heads) is not None:
        return
    raise malformed(
        f"field '{shown(field)}': expected one file, or the DICOM files of a series, found {len(heads)} "
        f"files and no DICOM among them; of the first, {kind_of(heads[0])}. Send one file; of a scan of "
        "several channels, each in a field of its own, such as scan.T1"
    )


def scan_in(form: UploadForm, field: str = "scan") -> Upload:
    """The scan's file. Raises Problem 422 where it is missing."""
    scan = form.files.get(field)
    if scan is None:
        raise missing(field)
    return scan


@dataclass(frozen=True)
class JobInstead:
    """How a job answers instead: `keep` makes of the scan's bytes what the job keeps, in a thread.

    `at_once`: for every scan; otherwise for a volume that would take longer than `LOCUM_VOLUME_SECONDS`.
    """

    keep: Callable[[bytes], bytes]
    at_once: bool


async def answer_now(
    request: Request,
    context: ServiceContext,
    kind: type[Predictor[Options]],
    options: Options,
    selection: Selection,
    upload: ScanFile,
    watch: Stopwatch,
) -> Response:
    """Wait for a slot, read the upload and run the chosen network on it. Raises as `answer_or_keep`."""
    answered = await answer_or_keep(request, context, kind, options, selection, upload, watch)
    assert isinstance(answered, Response)
    return answered


async def answer_or_keep(
    request: Request,
    context: ServiceContext,
    kind: type[Predictor[Options]],
    options: Options,
    selection: Selection,
    upload: ScanFile,
    watch: Stopwatch,
    instead: JobInstead | None = None,
) -> Response | bytes:
    """The same, in a thread; of a scan that `instead` is for, return what its job keeps of it.

    Raises as `answer_prepared`, ServiceBusy beyond the queue, and ClientDisconnect when the client left while
    it waited.
    """
    concerns(request, version=selection.offered.digest, artefact=str(selection.offered))
    left = _Left(request)
    between: BetweenPatches = left.between
    if instead is not None:
        between = Deadline(context.settings.volume_seconds, left.check)
    predictor = kind(
        request_id=request.state.request_id,
        options=options,
        selection=selection,
        input_sha256=upload.sha256,
        input_bytes=upload.size,
        limits=scan_limits(context.settings, selection.manifest.task),
        watch=watch,
        between=between,
    )

    def answer() -> Response | bytes:
        with watch.stage("read"):
            data = upload.read()
        reading = predictor.read(data)
        if instead is not None and instead.at_once:
            return instead.keep(data)
        try:
            return answer_prepared(context, predictor, reading, selection.model, GRAPH)
        except TakesLonger:
            assert instead is not None
            del reading
            return instead.keep(data)

    async with context.admission.slot() as waited:
        watch.stages["wait"] = waited * 1000
        if await request.is_disconnected():
            raise ClientDisconnect
        if not selection.manifest.task.is_volume:
            return await to_thread.run_sync(answer)
        noticing = asyncio.create_task(left.notice())
        try:
            return await to_thread.run_sync(answer)
        finally:
            noticing.cancel()


class _Left:
    """Whether the client of a request left, for the thread that works for it."""

    def __init__(self, request: Request) -> None:
        self._request, self._left = request, threading.Event()

    async def notice(self) -> None:
        """Look until the client leaves, or until cancelled."""
        while not await self._request.is_disconnected():
            await asyncio.sleep(_LOOK_SECONDS)
        self._left.set()

    def between(self, done: int, total: int, seconds: float | None) -> None:
        """The same as `check`, between two patches."""
        del done, total, seconds
        self.check()

    def check(self) -> None:
        """Raise ClientDisconnect if it left."""
        if self._left.is_set():
            raise ClientDisconnect


def answer_prepared(
    context: ServiceContext,
    predictor: Predictor[Options],
    reading: PreparedScan,
    artefact: Artefact,
    file: str,
    *,
    whole: bool = False,
) -> Response:
    """Load a graph, the `file` of an artefact, and run it on a scan that was read, in a thread.

    `whole`: the graph takes all slices at once. Raises ScanError, StoreError, ServiceError.
    """
    watch, selection, options = predictor.watch, predictor.selection, predictor.options
    with watch.stage("load"):
        session = context.sessions.get(artefact.manifest.files[file].sha256, lambda: artefact.read(file))
    answer = predictor.make(reading, LoadedGraph(session, receipt_of(artefact), whole))
    context.metrics.inference_seconds.labels(selection.offered.name, session.provider).observe(
        watch.stages["inference"] / 1000
    )
    noting = None
    if answer.picked is not None and options.hospital is not None:
        # Once the answer is sent: neither it nor the next scan waits for the database.
        pool, picked = selection.offered.expect(SsfPoolManifest), answer.picked
        noting = BackgroundTask(key_usage.note, context.database, options.hospital, pool, picked)
    return Response(answer.body, headers=answer.headers, media_type=answer.media_type, background=noting)
