"""`/jobs/{job}/checks`: check a candidate with a few masks that a person draws."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from service.adaptation.card.reading import read_view
from service.adaptation.mask_checks import MaskCheck, MaskCheckBody
from service.context import ServiceContext
from service.http.audit import Audited, AuditedRoute
from service.http.dependencies import AsOperator, AsReader
from service.http.parameters import IDEMPOTENT, IdempotencyKey, JobId
from service.http.problems import problem_responses
from service.jobs.views import JobView

router = APIRouter(tags=["jobs"], route_class=AuditedRoute)


class MaskChecks(BaseModel):
    """The checks of a candidate (`mask-check`) and their verdicts (`mask-verdict`), newest first."""

    checks: list[JobView]


@router.post(
    "/jobs/{job}/checks",
    status_code=202,
    responses={202: IDEMPOTENT, **problem_responses(404, 409, 410, 422, 503)},
)
def start_check(
    request: Request,
    context: Annotated[AsOperator, Audited("job.started")],
    job: JobId,
    response: Response,
    body: MaskCheckBody | None = None,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Choose the scans that a person should draw to check a job's candidate, in the background.

    Patients are drawn at random, more often where the candidate's answers differ more from those of the
    global model. `result.draws` of the job has the scans, by digest: each needs a mask in the cohort.
    """
    asking = MaskCheck(context, job, idempotency_key, request.state.request_id)
    return _accepted(context, response, *asking.choose(body or MaskCheckBody()))


@router.get("/jobs/{job}/checks", responses=problem_responses(404, 422))
def list_checks(request: Request, context: AsReader, job: JobId) -> MaskChecks:
    """List the checks of a job's candidate, and their verdicts."""
    found = MaskCheck(context, job, None, request.state.request_id).listed()
    return MaskChecks(checks=[read_view(context.store, context.database, each.id) for each in found])


@router.post(
    "/jobs/{job}/checks/{check}/verdict",
    status_code=202,
    responses={202: IDEMPOTENT, **problem_responses(404, 409, 410, 422, 503)},
)
def start_verdict(
    request: Request,
    context: Annotated[AsOperator, Audited("job.started")],
    job: JobId,
    check: JobId,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Bound the change of Dice by the masks of a check's scans, in the background.

    Where a loss is excluded with 95 % certainty the masks accept the candidate, where a gain is they refuse
    it; the gate of the job then says so (`gate.masks`), whatever its checks say. Else it stays as it was.
    """
    asking = MaskCheck(context, job, idempotency_key, request.state.request_id)
    return _accepted(context, response, *asking.measure(check))


@router.delete("/jobs/{job}/checks/verdict", responses=problem_responses(404, 409, 422))
def take_back_verdict(
    request: Request, context: Annotated[AsOperator, Audited("gate.restored", refused_only=True)], job: JobId
) -> JobView:
    """Take back what masks decided: the gate says again what its checks say. What serves does not change."""
    MaskCheck(context, job, None, request.state.request_id).take_back()
    return read_view(context.store, context.database, job)


def _accepted(context: ServiceContext, response: Response, job: str, created: bool) -> JobView:
    response.headers["Location"] = f"/jobs/{job}"
    if not created:
        response.headers["Idempotency-Replayed"] = "true"
    return read_view(context.store, context.database, job)
