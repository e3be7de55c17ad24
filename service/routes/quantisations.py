"""`POST /hospitals/{hospital}/quantisations`: start a job that makes a graph in int8 or float16."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response

from service.adaptation.card.reading import read_view
from service.adaptation.quantisation import QuantisationBody, QuantisationRequest
from service.http.audit import Audited, AuditedRoute
from service.http.dependencies import AsOperator
from service.http.parameters import IDEMPOTENT, HospitalId, IdempotencyKey
from service.http.problems import problem_responses
from service.jobs.views import JobView

router = APIRouter(tags=["jobs"], route_class=AuditedRoute)


@router.post(
    "/hospitals/{hospital}/quantisations",
    status_code=202,
    responses={202: IDEMPOTENT, **problem_responses(404, 409, 410, 422, 503)},
)
def quantise(
    request: Request,
    context: Annotated[AsOperator, Audited("job.started")],
    hospital: HospitalId,
    body: QuantisationBody,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Make another graph of the network that answers a hospital, in the background, and judge it on a cohort.

    Its masks are compared with those of the float32 graph, without labels. Where they agree, the graph is
    published (`result.version` of the job), and serves once a version is assigned with its `precision`; else
    the job falls back to the float32 graph. `gate` has the checks, and the patients as numbers.
    """
    asked = QuantisationRequest(context, hospital, body, idempotency_key, request.state.request_id)
    job, created = asked.make()
    response.headers["Location"] = f"/jobs/{job}"
    if not created:
        response.headers["Idempotency-Replayed"] = "true"
    return read_view(context.store, context.database, job)
