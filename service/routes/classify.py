"""`POST /classify`: a scan in, class probabilities out."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.catalog.network import resolve_network
from service.http.audit import Audited, AuditedRoute, concerns
from service.http.dependencies import AsReader
from service.http.parameters import ANSWER_HEADERS, described_headers
from service.http.problems import problem_responses
from service.inference.pipeline import Stopwatch
from service.prediction.classification import ClassificationPredictor, ClassificationReport
from service.prediction.options import ClassifyOptions, read_options, request_body
from service.routes.scan_request import answer_now, receive_scan, scan_in

router = APIRouter(tags=["classification"], route_class=AuditedRoute)


@router.post(
    "/classify",
    response_class=Response,
    responses={
        200: {
            "description": "The probability of each class. For research use only.",
            "headers": described_headers(ANSWER_HEADERS),
            "model": ClassificationReport,
        },
        **problem_responses(404, 408, 410, 413, 415, 422, 503, 507),
    },
    openapi_extra={"requestBody": request_body(ClassifyOptions)},
)
async def classify_scan(
    request: Request, context: Annotated[AsReader, Audited("scan.classified")]
) -> Response:
    """Classify one scan.

    The service deletes the scan after its answer. It slices a volume along the task's plane, whatever the
    order of its axes; its probabilities are the mean over its slices. `slices` has those of each slice.
    """
    watch = Stopwatch()
    with await receive_scan(request, context, watch) as form:
        options = read_options(ClassifyOptions, form.fields)
        scan = scan_in(form)
        concerns(request, hospital=options.hospital, scan=scan.sha256)

        select = partial(
            resolve_network,
            context.store,
            context.database,
            options.model,
            options.hospital,
            options.personalization,
            options.site,
            options.cluster,
            kind=ClassificationPredictor.KIND,
            new_versions=context.settings.new_versions,
        )
        with watch.stage("select"):
            selection = await to_thread.run_sync(select)
        return await answer_now(request, context, ClassificationPredictor, options, selection, scan, watch)
