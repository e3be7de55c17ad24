"""`POST /display`: a scan in, what a viewer shows out."""

from __future__ import annotations

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from model_store.scan import Limits, decode
from service.errors import RequestInvalid
from service.http.audit import Audited, AuditedRoute, concerns
from service.http.dependencies import AsReader
from service.http.problems import problem_responses
from service.inference.pipeline import Stopwatch
from service.prediction.display import encode_scan
from service.prediction.options import CHANNEL_FIELDS, scan_field
from service.routes.scan_request import receive_scan, scan_in
from service.settings import scan_limits

router = APIRouter(tags=["segmentation"], route_class=AuditedRoute)

_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_FORM = {
    "type": "object",
    "properties": {"scan": scan_field(by_channel=True)},
    "patternProperties": CHANNEL_FIELDS,
    "additionalProperties": False,
}
DISPLAYED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A volume as `.nii.gz` on its own grid, in millimetres; an image as an 8-bit PNG.",
        "content": {"application/gzip": _BINARY, "image/png": _BINARY},
    }
}


@router.post(
    "/display",
    response_class=Response,
    responses={**DISPLAYED, **problem_responses(408, 413, 415, 422, 503, 507)},
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def display_scan(request: Request, context: Annotated[AsReader, Audited("scan.displayed")]) -> Response:
    """Return a scan as the service reads it, for a viewer.

    The mask of `POST /segment` fits on it voxel by voxel, whatever the format of the scan. Intensities are
    for display: an image of more than 8 bits loses the darkest and brightest half percent. The service
    deletes the scan after its answer.
    """
    with await receive_scan(request, context, Stopwatch(), by_channel=True) as form:
        scan = scan_in(form)
        if form.fields:
            unknown = [
                {"field": ascii(name)[1:-1][:64], "reason": "not a field; /display takes `scan` alone"}
                for name in form.fields
            ]
            raise RequestInvalid(unknown)
        concerns(request, scan=scan.sha256)
        limits = scan_limits(context.settings)
        async with context.admission.slot():
            return await to_thread.run_sync(lambda: displayed(scan.read(), limits))


def displayed(content: bytes, limits: Limits) -> Response:
    """Decode a scan, and answer with what a viewer shows. Blocking. Raises ScanError."""
    body, media_type = encode_scan(decode(content, limits))
    return Response(body, media_type=media_type)
