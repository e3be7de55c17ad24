"""`POST /segment`: a scan in, a mask out, at once or by a job."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Header, Request
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import Response

from service.adaptation.card.reading import read_view
from service.adaptation.scan_jobs import create, kept_of, wait_for
from service.adaptation.scan_requests import ScanRequest
from service.catalog.network import Selection, select_network
from service.catalog.version import ResolvedVersion, serve_version
from service.context import ServiceContext
from service.database.job_states import TERMINAL
from service.errors import ParametersContradict
from service.files import log_and_continue
from service.http.audit import Audited, AuditedRoute, concerns
from service.http.conditions import preferred_wait, prefers_async
from service.http.dependencies import AsReader
from service.http.parameters import ANSWER_HEADERS, described_headers
from service.http.problems import problem_responses
from service.inference.pipeline import PreparedScan, Stopwatch
from service.job_kinds import segment as segment_job
from service.jobs import records
from service.jobs.files import JobFolder, StoredScan
from service.jobs.results import read_result
from service.jobs.views import JobView
from service.kinds import SCAN_BY_JOB
from service.prediction.options import SegmentOptions, read_options, request_body
from service.prediction.output import SegmentationReport
from service.prediction.segmentation import SegmentationPredictor
from service.routes.scan_request import JobInstead, answer_or_keep, answer_prepared, receive_scan, scan_in
from service.runtime.spool import ScanFile

router = APIRouter(tags=["segmentation"], route_class=AuditedRoute)

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_HEADERS = {**ANSWER_HEADERS, "Locum-Labels": "JSON: mask value -> its labels."}
_APPLIED = {"Preference-Applied": "The preferences of `Prefer` that were applied."}

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The mask, a picture of it, or a report, by `output`. For research use only.",
        "headers": described_headers({**_HEADERS, **_APPLIED}),
        "model": SegmentationReport,
        "content": {
            "application/gzip": _BINARY,
            "application/octet-stream": _BINARY,
            "image/png": _BINARY,
            "application/dicom": _BINARY,
            "multipart/form-data": _BINARY,
        },
    },
    202: {
        "description": "The job that will have the answer as its result: of a volume that takes long "
        f"(LOCUM_VOLUME_SECONDS), of `personalization=scan` with {SCAN_BY_JOB}, and of `Prefer: "
        "respond-async`.",
        "headers": described_headers({"Location": "The job.", **_APPLIED}),
        "model": JobView,
    },
}
Prefer = Annotated[
    list[str] | None,
    Header(
        description="RFC 7240. `wait=N`: where a job has the mask, wait up to N seconds for it. "
        "`respond-async`: let a job segment the scan."
    ),
]


@router.post(
    "/segment",
    response_class=Response,
    responses={**_ANSWERS, **problem_responses(404, 408, 409, 410, 413, 415, 422, 503, 507)},
    openapi_extra={"requestBody": request_body(SegmentOptions)},
)
async def segment_scan(
    request: Request, context: Annotated[AsReader, Audited("scan.segmented")], prefer: Prefer = None
) -> Response:
    """Segment one scan.

    The service deletes the scan after its answer. It slices a volume along the task's plane, whatever the
    order of its axes, and returns the mask on the volume's own grid and affine.

    A network that sees volumes looks at them window by window. Where all windows would take longer than
    `LOCUM_VOLUME_SECONDS`, by the seconds that one takes, the answer is 202 and a job, of which `progress`
    has the windows that are done.

    An ssf-pool adapts itself to every scan, in about the time of two plain answers. With a routing-space and
    `personalization=scan`, the answer is adapted to this scan: at once with the default preset, unless the
    scan is too large to be held in memory at once, else by a job with the mask as its result.
    """
    watch, by_job = Stopwatch(), prefers_async(prefer or ())
    with await receive_scan(request, context, watch, by_channel=True) as form:
        options = read_options(SegmentOptions, form.fields)
        answered = await answer_or_start(request, context, options, scan_in(form), watch, by_job=by_job)
    if isinstance(answered, Response):
        return answered
    wait = preferred_wait(prefer or (), context.settings.max_wait_seconds)
    response = await result_within(request, context, answered, wait or 0)
    # RFC 7240: what was waited for was not answered asynchronously.
    applied = ["respond-async"] if by_job and response.status_code == HTTPStatus.ACCEPTED else []
    applied += [] if wait is None else [f"wait={wait}"]
    if applied:
        response.headers["Preference-Applied"] = ", ".join(applied)
    return response


async def answer_or_start(
    request: Request,
    context: ServiceContext,
    options: SegmentOptions,
    scan: ScanFile,
    watch: Stopwatch,
    *,
    by_job: bool = False,
) -> Response | str:
    """Segment a received scan: return the answer, or the id of the job that will have it.

    `by_job`: a job segments it, however short that takes. Raises what `POST /segment` rejects.
    """
    request_id = request.state.request_id
    concerns(request, hospital=options.hospital, scan=scan.sha256)
    with watch.stage("select"):
        chosen = await to_thread.run_sync(_choose, context, request_id, options, scan, watch)
    if isinstance(chosen, Selection):
        settings = context.settings
        instead = JobInstead(lambda data: kept_of(data, options, settings), at_once=by_job)
        answered = await answer_or_keep(
            request, context, SegmentationPredictor, options, chosen, scan, watch, instead
        )
        if isinstance(answered, Response):
            return answered
        kept = StoredScan(answered, scan.sha256, scan.size, chosen.kept, options.series, chosen.alarmed)
        return await to_thread.run_sync(
            create, context, segment_job.KIND, options, chosen.offered, kept, request_id
        )

    def answer_at_once(reading: PreparedScan, graph: str) -> Response:
        concerns(request, version=chosen.parent.digest, artefact=str(chosen.parent))
        return answer_prepared(request, context, chosen.predictor, reading, chosen.parent, graph, whole=True)

    return await chosen.accept(request, answer_at_once)


def _choose(
    context: ServiceContext, request_id: str, options: SegmentOptions, scan: ScanFile, watch: Stopwatch
) -> Selection | ScanRequest:
    """Choose the network that answers, or the artefact that is adapted to the scan."""

    def within(found: ResolvedVersion) -> Selection | ScanRequest:
        if options.personalization == "scan" and not found.adapts_itself:
            return ScanRequest.of(context, request_id, options, scan, found, watch)
        if options.preset is not None or options.shape_weight is not None:
            raise ParametersContradict(
                "`preset` and `shape_weight` belong to personalization=scan with a routing-space; leave "
                "them out."
            )
        return select_network(context.store, found, options.personalization, options.site)

    return serve_version(
        context.store,
        context.database,
        options.model,
        options.hospital,
        SegmentationPredictor.KIND,
        context.settings.new_versions,
        within,
    )


async def result_within(request: Request, context: ServiceContext, job_id: str, seconds: float) -> Response:
    """The result of a job if it ends within `seconds`, else its state with 202. Raises as `wait_for`."""
    job = await wait_for(request, context, job_id, seconds)
    over = job.state in TERMINAL
    return await to_thread.run_sync(_collected if over else _accepted, context, job_id)


def _collected(context: ServiceContext, job_id: str) -> Response:
    try:
        stored = read_result(context.database, context.settings.open_files(), job_id)
        return Response(stored.body, headers=dict(stored.headers), media_type=stored.media_type)
    finally:
        # The client never saw the job's id, so no request will fetch or delete its result. Files that cannot
        # be deleted now are expired; the answer is sent in any case.
        with suppress(SQLAlchemyError), context.database.write() as session:
            records.expire_files_now(records.get(session, job_id))
        with log_and_continue(f"the files of job {job_id}"):
            JobFolder(context.settings.open_files(), job_id).delete()


def _accepted(context: ServiceContext, job_id: str) -> Response:
    body = read_view(context.store, context.database, job_id).model_dump_json()
    headers = {"Location": f"/jobs/{job_id}"}
    return Response(body, status_code=202, headers=headers, media_type="application/json")
