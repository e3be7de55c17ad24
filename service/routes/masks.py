"""`/hospitals/{hospital}/cohorts/{cohort}/scans/{name}/mask`: upload, read and delete the mask of a scan."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, Field

from model_store.preprocessing import align
from model_store.scan import Note, decode, decode_mask, list_formats
from model_store.task import Task
from service.catalog.version import resolve_version
from service.cohorts import cohorts, masks
from service.cohorts.drawn import in_units_of, take_in_mask
from service.context import ServiceContext
from service.database import CohortMask, CohortScan
from service.http.audit import Audited, AuditedRoute, concerns
from service.http.conditions import matcher
from service.http.dependencies import AsOperator
from service.http.parameters import CohortId, HospitalId, ScanName
from service.http.problems import problem_responses
from service.http.uploads.receive import (
    UploadLimits,
    check_digest,
    declared_length,
    receive_body,
    refuse_form,
)
from service.prediction.display import encode_mask
from service.routes.display import DISPLAYED
from service.runtime.spool import Upload
from service.settings import cohort_limits, scan_limits

router = APIRouter(tags=["cohorts"], route_class=AuditedRoute)

_BODY: dict[str, Any] = {
    "required": True,
    "description": f"{list_formats('or')} of whole numbers, on the scan's own grid: an empty target is "
    "a mask of background, and a scan without a mask counts as not reviewed.",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


Output = Annotated[
    Literal["stored", "display"],
    Query(
        description="The `stored` file (the default), or what a viewer shows, for `display`: a volume as "
        "`.nii.gz` on the scan's own grid in millimetres, an image as an 8-bit PNG."
    ),
]
STORED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The stored file as `application/octet-stream`, or what a viewer shows.",
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            **DISPLAYED[200]["content"],
        },
    }
}


class MaskView(BaseModel):
    """The mask of a scan."""

    sha256: str = Field(description="`sha256:` and 64 hexadecimal digits.")
    bytes: int
    format: str
    values: list[int] = Field(description="Distinct values of the mask, ascending.")
    created_at: datetime
    notes: list[str] = Field(
        default_factory=list,
        description="Remarks on how the mask was read, in the answer to PUT: which segments of a DICOM SEG "
        "were taken by their number.",
    )


def mask_view(row: CohortMask, notes: Sequence[Note] = ()) -> MaskView:
    """A row as it looks from outside, with remarks on how it was read."""
    return MaskView(
        sha256=f"sha256:{row.sha256}",
        bytes=row.size,
        format=row.format,
        values=row.label_values,
        created_at=row.created_at,
        notes=[note.text for note in notes],
    )


@router.put(
    "/hospitals/{hospital}/cohorts/{cohort}/scans/{name:path}/mask",
    responses={
        201: {"model": MaskView, "description": "Added and written to disk."},
        **problem_responses(400, 404, 408, 409, 410, 412, 413, 415, 422, 507),
    },
    openapi_extra={"requestBody": _BODY},
)
async def put_mask(
    request: Request,
    context: Annotated[AsOperator, Audited("mask.stored")],
    hospital: HospitalId,
    cohort: CohortId,
    name: ScanName,
    response: Response,
    model: Annotated[
        str | None,
        Query(
            max_length=256,
            description="The model of the mask: values that its task does not name are "
            "rejected now. Without it they are rejected when an adaptation is "
            "requested.",
        ),
    ] = None,
    repr_digest: Annotated[str | None, Header(description="RFC 9530; `sha-256` is checked.")] = None,
    if_match: Annotated[
        str | None,
        Header(
            max_length=1024,
            description='The mask to replace: `"` + its `sha256` + `"`, as `ETag` and the list of scans have '
            "it. Without it another mask is rejected.",
        ),
    ] = None,
) -> MaskView:
    """Add a scan's mask, or replace the one of `If-Match`.

    Sending the same bytes again changes nothing, so a client can resume.

    The service decodes it now and rejects a file that is not a mask or is on another grid than its scan.
    """
    found: tuple[CohortScan, Task | None] | None = None
    replaces = None if if_match is None else matcher(if_match)

    async def admit() -> None:
        nonlocal found
        refuse_form(request.headers.get("content-type"))
        size = declared_length(request) or 0
        found = await to_thread.run_sync(_find, context, hospital, cohort, name, size, model)

    limits = UploadLimits(context.settings.max_upload_bytes)
    with await receive_body(request, context.settings.spool, limits, admit=admit) as upload:
        assert found is not None
        scan, task = found
        check_digest(repr_digest, upload)
        concerns(request, mask=upload.sha256)
        async with context.admission.turn():
            decoded = await to_thread.run_sync(_decoded, context, scan, upload, task)
        concerns(request, mask=upload.sha256)  # that of the stored bytes
        row, created = await to_thread.run_sync(
            masks.add_mask,
            context.database,
            context.settings,
            hospital,
            cohort,
            scan,
            upload,
            decoded,
            replaces,
        )
    response.status_code = 201 if created else 200
    return mask_view(row, decoded.notes)


@router.get(
    "/hospitals/{hospital}/cohorts/{cohort}/scans/{name:path}/mask",
    response_class=Response,
    responses={**STORED, **problem_responses(404, 410, 422)},
)
async def get_mask(
    request: Request,
    context: Annotated[AsOperator, Audited("mask.read")],
    hospital: HospitalId,
    cohort: CohortId,
    name: ScanName,
    output: Output = "stored",
) -> Response:
    """Return a scan's mask. `ETag` has its digest, for the `If-Match` that replaces it."""

    def find() -> tuple[CohortScan, CohortMask]:
        with context.database.read() as session:
            return masks.get(session, hospital, cohort, name)

    scan, mask = await to_thread.run_sync(find)
    concerns(request, mask=f"sha256:{mask.sha256}")

    def read() -> Response:
        content = cohorts.file_of(context.settings, mask, name).read()
        media_type = "application/octet-stream"
        if output == "display":
            limits = scan_limits(context.settings)
            content_below = cohorts.file_of(context.settings, scan, name).read()
            below = decode(content_below, cohort_limits(context.settings))
            drawn = in_units_of(below, decode_mask(content, limits))
            content, media_type = encode_mask(
                align(drawn, below.grid, below.affine, below.other_affine), below
            )
        headers = {"ETag": f'"sha256:{mask.sha256}"'}
        return Response(content, headers=headers, media_type=media_type)

    async with context.admission.turn():
        return await to_thread.run_sync(read)


@router.delete(
    "/hospitals/{hospital}/cohorts/{cohort}/scans/{name:path}/mask",
    status_code=204,
    responses=problem_responses(400, 404, 409, 410, 412, 422),
)
def delete_mask(
    context: Annotated[AsOperator, Audited("mask.deleted")],
    hospital: HospitalId,
    cohort: CohortId,
    name: ScanName,
    if_match: Annotated[
        str | None,
        Header(max_length=1024, description="The mask to delete, as for PUT; without it, any."),
    ] = None,
) -> None:
    """Delete a scan's mask now; the scan stays. Rejected while a job needs it."""
    removes = None if if_match is None else matcher(if_match)
    masks.remove_mask(context.database, context.settings, hospital, cohort, name, removes)


def _find(
    context: ServiceContext, hospital: str, cohort: str, name: str, size: int, model: str | None
) -> tuple[CohortScan, Task | None]:
    """The scan, which has room for a mask of this size, and the task of the model that is named."""
    with context.database.read() as session:
        scan = masks.check_room(session, context.settings, hospital, cohort, name, size)
    if model is None:
        return scan, None
    new_versions = context.settings.new_versions
    meant = resolve_version(context.store, context.database, model, hospital, "segmentation", new_versions)
    return scan, meant.artefact.manifest.task


def _decoded(
    context: ServiceContext, scan: CohortScan, upload: Upload, task: Task | None
) -> masks.DecodedMask:
    below = cohorts.file_of(context.settings, scan, scan.name).read()
    return take_in_mask(upload, decode(below, cohort_limits(context.settings)), task, context.settings)
