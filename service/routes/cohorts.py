"""`/hospitals/{hospital}/cohorts`: create cohorts, and upload, list, read and delete their scans."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from model_store.scan import list_formats
from service.cohorts import cohorts
from service.cohorts.intake import take_in
from service.cohorts.masks import of_scans
from service.context import ServiceContext
from service.database import Cohort, CohortMask, CohortScan
from service.http.audit import Audited, AuditedRoute, concerns
from service.http.dependencies import AsOperator
from service.http.parameters import MOST_LISTED, CohortId, HospitalId, Limit, Page, ScanName, Text
from service.http.problems import problem_responses
from service.http.uploads.receive import (
    UploadLimits,
    check_digest,
    declared_length,
    receive_body,
    refuse_form,
)
from service.observation import doubts
from service.prediction.options import SERIES
from service.routes import masks
from service.routes.display import displayed
from service.routes.masks import STORED, MaskView, Output, mask_view
from service.settings import cohort_limits
from service.validation import COHORT_ID, DICOM_SERIES, PRINTABLE

router = APIRouter(tags=["cohorts"], route_class=AuditedRoute)
# First: a scan's name may have any part of a path in it, but does not end in /mask.
router.include_router(masks.router)

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_SCAN_BODY: dict[str, Any] = {
    "required": True,
    "description": f"{list_formats('or')}: the file as it is. Its first bytes say what it is.",
    "content": {"application/octet-stream": _BINARY},
}


class CohortBody(BaseModel):
    """What people call a cohort, and say of it."""

    model_config = ConfigDict(extra="forbid")

    name: Text | None = Field(
        None, description="What people call it. It outlives the scans, so it must not name a patient."
    )
    note: Text | None = Field(
        None, description="A note for people. It outlives the scans, so it must not name a patient."
    )


class CohortChange(CohortBody):
    """What is changed of a cohort."""

    may_train: bool | None = Field(
        None,
        description="Whether a job may learn from the cohort. Of corrections it is false until somebody says "
        "so here.",
    )


class CohortView(BaseModel):
    """A cohort."""

    id: str
    hospital: str
    name: str | None
    note: str | None
    scans: int = Field(description="How many.")
    bytes: int = Field(description="Bytes of all scans and masks together.")
    corrections_of: str | None = Field(
        None, description="The model, of a cohort that the service fills with corrections of its answers."
    )
    may_train: bool = Field(True, description="Whether a job may learn from it.")
    created_at: datetime
    expires_at: datetime = Field(description="When the scans expire, unless a job still needs them.")
    deleted_at: datetime | None = Field(description="When the scans were deleted.")


class CohortList(Page):
    """The hospital's cohorts that still have their scans, newest first."""

    cohorts: list[CohortView]


class ScanView(BaseModel):
    """A scan of a cohort."""

    name: str
    sha256: str = Field(description="`sha256:` and 64 hexadecimal digits.")
    bytes: int
    format: str
    created_at: datetime
    mask: MaskView | None = Field(None, description="The scan's mask; null without one.")
    review: float | None = Field(
        None,
        description="By the newest answer to this scan: the share of the hospital's answers that were less "
        "sure of the least sure label. Look at the lowest first; null without an answer or a rank.",
    )


class ScanList(Page):
    """The received scans by name; a client that was cut off sends the others."""

    cohort: str
    scans: list[ScanView]


@router.post(
    "/hospitals/{hospital}/cohorts", status_code=201, responses=problem_responses(400, 404, 408, 413, 422)
)
def create_cohort(
    context: Annotated[AsOperator, Audited("cohort.created")],
    hospital: HospitalId,
    response: Response,
    body: CohortBody | None = None,
) -> CohortView:
    """Create a cohort. Scans are then added one by one. It expires."""
    with context.database.write() as session:
        cohort = cohorts.create(
            session, context.settings, hospital, body.note if body else None, body.name if body else None
        )
    response.headers["Location"] = f"/hospitals/{hospital}/cohorts/{cohort.id}"
    return _view(cohort, (0, 0))


@router.get("/hospitals/{hospital}/cohorts", responses=problem_responses(404, 422))
def list_cohorts(
    context: AsOperator,
    hospital: HospitalId,
    after: Annotated[
        str | None, Query(pattern=COHORT_ID, description="Id of a cohort: list those made before it.")
    ] = None,
    limit: Limit = 200,
) -> CohortList:
    """List the cohorts that still have their scans."""
    with context.database.read() as session:
        found = cohorts.listed(session, hospital, limit + 1, after)
        page = found[:limit]
        totals = cohorts.totals(session, [cohort.id for cohort in page])
    return CohortList(
        cohorts=[_view(cohort, totals.get(cohort.id, (0, 0))) for cohort in page],
        next=page[-1].id if len(found) > limit else None,
    )


@router.get("/hospitals/{hospital}/cohorts/{cohort}", responses=problem_responses(404, 422))
def get_cohort(context: AsOperator, hospital: HospitalId, cohort: CohortId) -> CohortView:
    """Return one cohort, also after its scans were deleted."""
    with context.database.read() as session:
        found = cohorts.get(session, hospital, cohort)
        return _view(found, cohorts.totals(session, [cohort]).get(cohort, (0, 0)))


@router.patch("/hospitals/{hospital}/cohorts/{cohort}", responses=problem_responses(400, 404, 408, 413, 422))
def describe_cohort(
    context: Annotated[AsOperator, Audited("cohort.described")],
    hospital: HospitalId,
    cohort: CohortId,
    body: CohortChange,
) -> CohortView:
    """Change a cohort's name or note, or whether a job may learn from it.

    A field that is not sent stays; null removes a name or note.
    """
    with context.database.write() as session:
        found = cohorts.describe(session, hospital, cohort, body.model_dump(exclude_unset=True))
        return _view(found, cohorts.totals(session, [cohort]).get(cohort, (0, 0)))


@router.delete(
    "/hospitals/{hospital}/cohorts/{cohort}", status_code=204, responses=problem_responses(404, 409, 422)
)
def delete_cohort(
    context: Annotated[AsOperator, Audited("cohort.deleted")], hospital: HospitalId, cohort: CohortId
) -> None:
    """Delete every scan of a cohort now. Rejected while a job needs them."""
    cohorts.remove(context.database, context.settings, hospital, cohort)


@router.get("/hospitals/{hospital}/cohorts/{cohort}/scans", responses=problem_responses(404, 410, 422))
def list_scans(
    context: Annotated[AsOperator, Audited("cohort.listed")],
    hospital: HospitalId,
    cohort: CohortId,
    after: Annotated[
        str | None,
        Query(min_length=1, max_length=200, pattern=PRINTABLE, description="List the names after this."),
    ] = None,
    limit: Limit = MOST_LISTED,
) -> ScanList:
    """List the received scans with their digests."""
    with context.database.read() as session:
        cohorts.usable(session, hospital, cohort)
        found = cohorts.scans(session, cohort, limit + 1, after)
        page = found[:limit]
        drawn = of_scans(session, page)
        ranks = doubts(session, hospital, {f"sha256:{row.sha256}" for row in page})
    return ScanList(
        cohort=cohort,
        scans=[_scan_view(row, drawn.get(row.id), ranks.get(f"sha256:{row.sha256}")) for row in page],
        next=page[-1].name if len(found) > limit else None,
    )


@router.put(
    "/hospitals/{hospital}/cohorts/{cohort}/scans/{name:path}",
    responses={
        201: {"model": ScanView, "description": "Added and written to disk."},
        **problem_responses(404, 408, 409, 410, 413, 415, 422, 507),
    },
    openapi_extra={"requestBody": _SCAN_BODY},
)
async def put_scan(
    request: Request,
    context: Annotated[AsOperator, Audited("scan.stored")],
    hospital: HospitalId,
    cohort: CohortId,
    name: ScanName,
    response: Response,
    series: Annotated[str | None, Query(pattern=DICOM_SERIES, max_length=64, description=SERIES)] = None,
    repr_digest: Annotated[str | None, Header(description="RFC 9530; `sha-256` is checked.")] = None,
) -> ScanView:
    """Add a scan. Sending the same bytes under the same name again changes nothing, so a client can resume.

    The service decodes it now and rejects a file that it cannot read.
    """

    async def admit() -> None:
        refuse_form(request.headers.get("content-type"))
        await to_thread.run_sync(_check_room, context, hospital, cohort, name, declared_length(request) or 0)

    limits = UploadLimits(context.settings.max_upload_bytes)
    with await receive_body(request, context.settings.spool, limits, admit=admit) as upload:
        check_digest(repr_digest, upload)
        concerns(request, scan=upload.sha256)
        (scan_format,) = await take_in([upload], context.settings, context.admission, series)
        concerns(request, scan=upload.sha256)  # that of the stored bytes

        def add() -> tuple[CohortScan, bool]:
            return cohorts.add_scan(
                context.database, context.settings, hospital, cohort, name, upload, scan_format
            )

        row, created = await to_thread.run_sync(add)
        mask = await to_thread.run_sync(_mask_of, context, row)
    response.status_code = 201 if created else 200
    return _scan_view(row, mask)


@router.get(
    "/hospitals/{hospital}/cohorts/{cohort}/scans/{name:path}",
    response_class=Response,
    responses={**STORED, **problem_responses(404, 410, 422)},
)
async def get_scan(
    request: Request,
    context: Annotated[AsOperator, Audited("scan.read")],
    hospital: HospitalId,
    cohort: CohortId,
    name: ScanName,
    output: Output = "stored",
) -> Response:
    """Return a scan. That of a DICOM upload is the zip of its de-identified files."""

    def find() -> CohortScan:
        with context.database.read() as session:
            cohorts.usable(session, hospital, cohort)
            return cohorts.named(session, cohort, name)

    row = await to_thread.run_sync(find)
    concerns(request, scan=f"sha256:{row.sha256}")

    def read() -> Response:
        content = cohorts.file_of(context.settings, row, name).read()
        if output == "display":
            return displayed(content, cohort_limits(context.settings))
        return Response(content, media_type="application/octet-stream")

    async with context.admission.turn():
        return await to_thread.run_sync(read)


@router.delete(
    "/hospitals/{hospital}/cohorts/{cohort}/scans/{name:path}",
    status_code=204,
    responses=problem_responses(404, 409, 410, 422),
)
def delete_scan(
    context: Annotated[AsOperator, Audited("scan.deleted")],
    hospital: HospitalId,
    cohort: CohortId,
    name: ScanName,
) -> None:
    """Delete one scan and its mask now. Rejected while a job needs it."""
    cohorts.remove_scan(context.database, context.settings, hospital, cohort, name)


def _check_room(context: ServiceContext, hospital: str, cohort: str, name: str, size: int) -> None:
    with context.database.read() as session:
        cohorts.check_room(session, context.settings, hospital, cohort, name, size)


def _mask_of(context: ServiceContext, scan: CohortScan) -> CohortMask | None:
    with context.database.read() as session:
        return session.get(CohortMask, scan.id)


def _view(cohort: Cohort, totals: tuple[int, int]) -> CohortView:
    return CohortView(
        id=cohort.id,
        hospital=cohort.hospital,
        name=cohort.name,
        note=cohort.note,
        scans=totals[0],
        bytes=totals[1],
        corrections_of=cohort.corrections_of,
        may_train=cohort.may_train,
        created_at=cohort.created_at,
        expires_at=cohort.expires_at,
        deleted_at=cohort.deleted_at,
    )


def _scan_view(row: CohortScan, mask: CohortMask | None, review: float | None = None) -> ScanView:
    return ScanView(
        name=row.name,
        sha256=f"sha256:{row.sha256}",
        bytes=row.size,
        format=row.format,
        created_at=row.created_at,
        mask=None if mask is None else mask_view(mask),
        review=review,
    )
