"""`POST /segment`: a scan in, a mask out."""

from __future__ import annotations

from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from service.answering import answer_upload
from service.answers import SegmentationReport
from service.context import InContext
from service.inference.pipeline import Stopwatch
from service.multipart import malformed
from service.problems import problem_responses
from service.segment_options import read_options, request_body
from service.selection import resolve
from service.uploads import UploadLimits, receive

router = APIRouter(tags=["segmentation"])

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_HEADERS = {
    "Locum-Request": "Id of this request.",
    "Locum-Model": "`name@version` that was asked for.",
    "Locum-Graph": "sha256 of the onnx graph that answered.",
    "Locum-Personalization": "Whose network it was: `global`, or `member; site=CS`.",
    "Locum-Labels": "JSON: mask value -> labels it stands for.",
    "Locum-Warnings": "How many warnings the guard has; output=json lists them.",
    "Server-Timing": "Milliseconds per stage.",
}
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The mask, a picture of it, or a report, as `output` says. For research use only.",
        "headers": {
            name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.items()
        },
        "model": SegmentationReport,
        "content": {"application/gzip": _BINARY, "image/png": _BINARY},
    }
}


@router.post(
    "/segment",
    response_class=Response,
    responses={**_ANSWER, **problem_responses(404, 408, 410, 413, 415, 422, 503, 507)},
    openapi_extra={"requestBody": request_body()},
)
async def segment_scan(request: Request, context: InContext) -> Response:
    """Segment one scan.

    The scan is deleted once it is answered. A volume is sliced along the task's plane, however its axes are
    stored, and its mask comes back on its own grid and affine.
    """
    watch = Stopwatch()
    with watch.stage("receive"):
        limits = UploadLimits(context.settings.max_upload_bytes)
        form = await receive(request, context.settings.spool, limits, admit=context.admission.refuse_if_full)
    with form:
        options = read_options(form.fields)
        scan = form.files.get("scan")
        if scan is None:
            raise malformed("the field 'scan' with the scan's file is missing")
        with watch.stage("select"):
            selection = await to_thread.run_sync(
                resolve,
                context,
                options.model,
                options.hospital,
                options.personalization,
                options.site,
            )
        async with context.admission.slot() as waited:
            watch.stages["wait"] = waited * 1000
            if await request.is_disconnected():
                raise ClientDisconnect
            request_id = request.state.request_id
            return await to_thread.run_sync(
                answer_upload, context, request_id, options, selection, scan, watch
            )
