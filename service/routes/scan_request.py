"""Receive one scan, choose a network and answer: shared by `/segment` and `/classify`.

with await receive_scan(request, context, watch) as form:
    scan = scan_in(form)
    return await answer_now(request, context, kind, options, selection, scan, watch)

`/segment` lets a job do what would take long.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from anyio import to_thread
from fastapi import Request
from starlette.background import BackgroundTasks
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from typing_extensions import override

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, SsfPoolManifest
from model_store.preprocessing import Price
from model_store.scan import MOST_FILES, choose_series, kind_of, series_of
from service.catalog.adapted import origin_of
from service.catalog.network import Selection
from service.context import ServiceContext
from service.corrections import kept_answers
from service.http.audit import concerns, observes
from service.http.problems import Problem
from service.http.uploads.multipart import malformed, missing, shown
from service.http.uploads.receive import UploadForm, UploadLimits, receive
from service.inference.admission import Turn
from service.inference.pipeline import PreparedScan, Stopwatch
from service.inference.sessions import GraphSession
from service.inference.shift import Reference
from service.inference.volumes import Deadline, TakesLonger
from service.prediction.answer import LoadedGraph, Options, Predictor, receipt_of
from service.runtime.spool import ScanFile, Upload, pack, pack_channels
from service.serving import key_usage
from service.settings import Settings, scan_limits
from service.shadow import ShadowOptions, keep

Made = TypeVar("Made")

# How soon a client's leaving ends the work on its scan.
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

    `at_once`: for every scan; otherwise for one that would take longer than `LOCUM_VOLUME_SECONDS`, or would
    hold the slot longer than others are to wait.
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
    async with context.admission.slot() as turn:
        watch.stages["wait"] = turn.waited * 1000
        work = Work(request, context.settings, turn, by_job=instead is not None)
        predictor = kind(
            request_id=request.state.request_id,
            options=options,
            selection=selection,
            input_sha256=upload.sha256,
            input_bytes=upload.size,
            limits=scan_limits(context.settings, selection.manifest.task),
            watch=watch,
            reviews=context.reviews,
            between=work,
        )
        return await work.run(lambda: _answer_or_keep(request, context, predictor, upload, work, instead))


def _answer_or_keep(
    request: Request,
    context: ServiceContext,
    predictor: Predictor[Options],
    upload: ScanFile,
    work: Work,
    instead: JobInstead | None,
) -> Response | bytes:
    """In a thread: an answer, or what a job keeps of the scan."""
    model = predictor.selection.model
    with predictor.watch.stage("read"):
        data = choose_series(upload.read(), predictor.options.series, predictor.limits)
    opened = predictor.open(data)
    if instead is not None and opened.price is not None:
        known = context.sessions.loaded(model.manifest.files[GRAPH].sha256)
        # Not prepared here, so that what it looks like is for the job to judge.
        if instead.at_once or work.takes_long(opened.price, known):
            predictor.check_outline(opened)
            return instead.keep(data)
    try:
        reading = predictor.prepare(opened)
        if instead is not None and instead.at_once:
            return instead.keep(data)
        return answer_prepared(request, context, predictor, reading, model, GRAPH)
    except TakesLonger:
        assert instead is not None
        return instead.keep(data)


class Work(Deadline):
    """The work on a scan in a thread, for a client that waits, while others wait for the slot.

    It ends when the client leaves. Where a job can answer instead, it ends when it would take longer than
    `LOCUM_VOLUME_SECONDS`. Every `LOCUM_TURN_SECONDS`, the scans of other hospitals that wait go first.
    """

    def __init__(self, request: Request, settings: Settings, turn: Turn, *, by_job: bool) -> None:
        super().__init__(settings.volume_seconds if by_job else math.inf)
        self._request, self._turn = request, turn
        self._left, self._loop = threading.Event(), asyncio.get_running_loop()
        self._turn_seconds = settings.turn_seconds
        self._began = time.monotonic()

    async def run(self, work: Callable[[], Made]) -> Made:
        """Do the work in a thread, and notice meanwhile if the client leaves. Raises ClientDisconnect."""
        if await self._request.is_disconnected():
            raise ClientDisconnect
        noticing = asyncio.create_task(self._notice())
        self._began = time.monotonic()
        try:
            return await to_thread.run_sync(work)
        finally:
            noticing.cancel()

    async def _notice(self) -> None:
        # `run` has just looked: most answers are there before the next look.
        await asyncio.sleep(_LOOK_SECONDS)
        while not await self._request.is_disconnected():
            await asyncio.sleep(_LOOK_SECONDS)
        self._left.set()

    @override
    def look(self) -> None:
        """Rest if others wait. Raises ClientDisconnect, and TakesLonger where there is no room to rest."""
        if self._left.is_set():
            raise ClientDisconnect
        began = time.monotonic()
        if began - self._began < self._turn_seconds:
            return
        found = asyncio.run_coroutine_threadsafe(self._turn.rest(), self._loop).result()
        self._began = time.monotonic()
        self.rested += self._began - began
        if found == "alone":
            # Looked at again soon: a slot is free, or a scan came in the meantime.
            self._began -= self._turn_seconds - min(_LOOK_SECONDS, self._turn_seconds)
        elif found == "no-room" and self.seconds < math.inf:
            raise TakesLonger("others wait, and there is no room to rest")

    def takes_long(self, price: Price, session: GraphSession | None) -> bool:
        """Whether a job should prepare a volume, which would hold the slot or take too long.

        `session` is the loaded graph, if it is.
        """
        each = None if session is None else session.seconds_each
        runs = 0.0 if each is None else each * price.passes
        return price.preparing > self._turn_seconds or price.preparing + runs > self.seconds


def answer_prepared(
    request: Request,
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
        behind = origin_of(context.store, selection.offered)
        session = context.sessions.get(
            artefact.manifest.files[file].sha256,
            lambda: artefact.read(file),
            lambda: Reference.of(behind, selection.model),
        )
    answer = predictor.make(reading, LoadedGraph(session, receipt_of(artefact), behind.name, whole))
    observes(request, answer.observed)
    context.metrics.inference_seconds.labels(selection.offered.name, session.provider).observe(
        watch.stages["inference"] / 1000
    )
    noting = BackgroundTasks()
    if answer.picked is not None and options.hospital is not None:
        # Once the answer is sent: neither it nor the next scan waits for the database.
        pool, picked = selection.offered.expect(SsfPoolManifest), answer.picked
        noting.add_task(key_usage.note, context.database, options.hospital, pool, picked)
    observed, hospital = answer.observed, options.hospital
    own = (context.database, context.settings)
    # No thread is woken where there is nothing to keep.
    if hospital is not None and answer.found is not None:
        noting.add_task(kept_answers.keep, *own, hospital, predictor.request_id, observed, answer.found)
    # What a person asked of another network says nothing of the one that serves.
    unseen = context.shadows.taken(hospital, observed.model, predictor.request_id) if observed.usual else None
    if unseen is not None and hospital is not None and observed.choice is not None:
        second = ShadowOptions(
            shadow=unseen,
            request=predictor.request_id,
            version=observed.version,
            choice=dict(observed.choice),
        )
        received = (predictor.input_sha256, predictor.input_bytes)
        noting.add_task(keep, *own, context.queue, hospital, observed.model, reading.data, received, second)
    return Response(answer.body, headers=answer.headers, media_type=answer.media_type, background=noting)
