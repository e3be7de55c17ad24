"""`/pacs`: the configured PACS, and jobs on their series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, Field

from service.adaptation.card.reading import read_view
from service.context import ServiceContext
from service.database.hospitals import visible_hospitals
from service.http.audit import Audited, AuditedRoute, concerns
from service.http.dependencies import AsOperator
from service.http.parameters import IDEMPOTENT, CohortId, HospitalId, IdempotencyKey
from service.http.problems import problem_responses
from service.jobs.views import JobView
from service.pacs.configuration import load_servers
from service.pacs.requests import CohortFill, EditedSearch, FollowUp, PacsSubmission, SeriesSegmentation
from service.validation import HOSPITAL_ID

router = APIRouter(tags=["pacs"], route_class=AuditedRoute)

PacsName = Annotated[str, Path(pattern=HOSPITAL_ID, description="Name of a PACS in the operator's file.")]


class PacsView(BaseModel):
    """A configured PACS."""

    name: str
    hospitals: list[str] = Field(description="Those of the caller's hospitals that may use it.")
    store: bool = Field(description="Whether segmentations may be stored there.")


class PacsList(BaseModel):
    """The PACS that the caller's hospitals may use, by name."""

    pacs: list[PacsView]


@router.get("/pacs")
def list_pacs(context: AsOperator) -> PacsList:
    """List the configured PACS. Their addresses are the operator's."""
    if context.settings.pacs is None:
        return PacsList(pacs=[])
    with context.database.read() as session:
        visible = {hospital.id for hospital in visible_hospitals(session)}
    found = []
    for name, server in sorted(load_servers(context.settings.pacs).items()):
        if own := sorted(visible & {*server.hospitals}):
            found.append(PacsView(name=name, hospitals=own, store=server.store))
    return PacsList(pacs=found)


@router.post(
    "/pacs/{pacs}/segment",
    status_code=202,
    responses={202: IDEMPOTENT, **problem_responses(400, 404, 408, 409, 410, 413, 422, 503, 507)},
)
async def segment_series(
    request: Request,
    context: Annotated[AsOperator, Audited("job.started")],
    pacs: PacsName,
    body: SeriesSegmentation,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Fetch a series from a PACS and segment it, in the background.

    The SEG is stored in the PACS, or the answer is the job's result. The job waits while the PACS does not
    answer. The same series, version and options make the same instance, so that the PACS keeps one however
    often it is asked for. The UIDs are deleted at the job's end.
    """
    concerns(request, hospital=body.hospital, pacs=pacs)
    submission = PacsSubmission(context, pacs, idempotency_key, request.state.request_id)
    return await to_thread.run_sync(_accepted, context, response, lambda: submission.segment(body))


@router.post(
    "/pacs/{pacs}/follow-up",
    status_code=202,
    responses={202: IDEMPOTENT, **problem_responses(400, 404, 408, 409, 410, 413, 422, 503, 507)},
)
async def follow_up(
    request: Request,
    context: Annotated[AsOperator, Audited("job.started")],
    pacs: PacsName,
    body: FollowUp,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Compare a series with earlier ones of the same patient, all read by one version, in the background.

    The answer, `GET /jobs/{job}/result`, has the volume of each label at each time, the change up to this
    series, and each figure that the PACS has in a SEG or SR, with a warning where another version made it.
    With `repeats` it has that version's scan-to-rescan spread. The PACS says which series are the patient's;
    the UIDs are in the result alone, which expires.
    """
    concerns(request, hospital=body.hospital, pacs=pacs)
    submission = PacsSubmission(context, pacs, idempotency_key, request.state.request_id)
    return await to_thread.run_sync(_accepted, context, response, lambda: submission.follow_up(body))


@router.post(
    "/hospitals/{hospital}/cohorts/{cohort}/pacs",
    status_code=202,
    responses={202: IDEMPOTENT, **problem_responses(400, 404, 408, 409, 410, 413, 422, 503, 507)},
)
async def fill_cohort(
    request: Request,
    context: Annotated[AsOperator, Audited("job.started")],
    hospital: HospitalId,
    cohort: CohortId,
    body: CohortFill,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Add the series of a PACS that a query finds to a cohort, in the background.

    Each is de-identified before it is stored, and named by keyed hashes of its patient and its UID. A series
    that the cohort has, or that is no scan, is skipped and counted. The query is deleted at the job's end.
    """
    concerns(request, pacs=body.pacs)
    submission = PacsSubmission(context, body.pacs, idempotency_key, request.state.request_id)
    return await to_thread.run_sync(
        _accepted, context, response, lambda: submission.fill(hospital, cohort, body)
    )


@router.post(
    "/hospitals/{hospital}/corrections/pacs",
    status_code=202,
    responses={202: IDEMPOTENT, **problem_responses(400, 404, 408, 409, 410, 413, 422, 503, 507)},
)
async def find_edited(
    request: Request,
    context: Annotated[AsOperator, Audited("job.started")],
    hospital: HospitalId,
    body: EditedSearch,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Take segmentations in a PACS that a person edited for corrections, in the background.

    A SEG counts that names one of the hospital's versions as a device, is of a series which that version
    answered, and has other voxels than the answer. The query is deleted at the job's end.
    """
    concerns(request, pacs=body.pacs)
    submission = PacsSubmission(context, body.pacs, idempotency_key, request.state.request_id)
    return await to_thread.run_sync(
        _accepted, context, response, lambda: submission.find_edited(hospital, body)
    )


def _accepted(context: ServiceContext, response: Response, submit: Callable[[], tuple[str, bool]]) -> JobView:
    job, created = submit()
    response.headers["Location"] = f"/jobs/{job}"
    if not created:
        response.headers["Idempotency-Replayed"] = "true"
    return read_view(context.store, context.database, job)
