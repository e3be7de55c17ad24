"""`GET /jobs/{id}/card`: an adaptation, for a person to look at before somebody decides."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from service.card.page import CONTENT_POLICY, render
from service.card.reading import read_card
from service.context import InContext
from service.problems import problem_responses
from service.routes.parameters import JobId

router = APIRouter(tags=["jobs"])


@router.get("/jobs/{job}/card", response_class=HTMLResponse, responses=problem_responses(404, 422))
def get_card(context: InContext, job: JobId) -> HTMLResponse:
    """The job's card: curves, gate, coefficients, pictures, lineage. It can be looked at while the job runs.

    One HTML page that needs nothing else. It may show pictures of patients: it is not to be cached.
    """
    headers = {
        "Content-Security-Policy": CONTENT_POLICY,
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return HTMLResponse(render(read_card(context, job)), headers=headers)
