"""`/hospitals/{hospital}/answers` and `…/report`: what answered, by which decision, and a period."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from service import history
from service.context import ServiceContext
from service.database.hospitals import require_hospital
from service.errors import RequestInvalid
from service.history import AnswerAccount, PeriodReport, Sought
from service.http.audit import AuditedRoute
from service.http.dependencies import AsReader
from service.http.origins import self_contained
from service.http.parameters import HospitalId
from service.http.problems import problem_responses
from service.validation import DICOM_UID, DIGEST

router = APIRouter(tags=["history"], route_class=AuditedRoute)

_MOST_DAYS, _USUAL = 366, timedelta(days=30)

First = Annotated[
    date | None, Query(alias="from", description="The first day, in UTC; 30 days before the last by default.")
]
Last = Annotated[
    date | None, Query(alias="to", description=f"The last day, today by default. {_MOST_DAYS} days at most.")
]


class AnswerList(BaseModel):
    """Answers that are sought, newest first, at most 100."""

    answers: list[AnswerAccount]


@router.get("/hospitals/{hospital}/answers", responses=problem_responses(404, 422))
def account_for_answers(
    context: AsReader,
    hospital: HospitalId,
    series: Annotated[
        str | None, Query(pattern=DICOM_UID, max_length=64, description="SeriesInstanceUID of the scan.")
    ] = None,
    scan: Annotated[
        str | None, Query(pattern=DIGEST, description="Digest of the scan's bytes as they were sent.")
    ] = None,
    request: Annotated[
        str | None, Query(max_length=64, description="Id of the answered request (`Locum-Request`).")
    ] = None,
    day: Annotated[date | None, Query(description="Only answers of this day, in UTC.")] = None,
) -> AnswerList:
    """Say which version answered for a series, a scan or a request, by which decision and on what evidence.

    Series and scans are stored as keyed digests, which are computed here. Observations are deleted after
    `LOCUM_OBSERVATION_DAYS`.
    """
    with context.database.read() as session:
        require_hospital(session, hospital)
        if [series, scan, request].count(None) != 2:
            raise RequestInvalid([{"field": "query", "reason": "expected one of series, scan and request"}])
        found = history.answers(session, context.store, hospital, Sought(series, scan, request, day))
    return AnswerList(answers=found)


@router.get("/hospitals/{hospital}/report", responses=problem_responses(404, 422))
def get_report(
    context: AsReader, hospital: HospitalId, first: First = None, last: Last = None
) -> PeriodReport:
    """Report a period of a hospital: versions, arrivals, alarms, corrections, decisions and changes.

    It has no pixel, and no name of a patient or scan. API keys are listed for an admin, without secrets.
    """
    return _report(context, hospital, first, last)


@router.get(
    "/hospitals/{hospital}/report.html", response_class=HTMLResponse, responses=problem_responses(404, 422)
)
def get_report_page(
    context: AsReader, hospital: HospitalId, first: First = None, last: Last = None
) -> HTMLResponse:
    """Return the same report as one self-contained HTML page."""
    # Its templates are imported for the first page.
    from service.history.page import render

    return self_contained(render(_report(context, hospital, first, last)))


def _report(context: ServiceContext, hospital: str, first: date | None, last: date | None) -> PeriodReport:
    with context.database.snapshot() as session:
        require_hospital(session, hospital)
        end = datetime.now(UTC).date() if last is None else last
        begin = max(end, date.min + _USUAL) - _USUAL if first is None else first
        if not timedelta(0) <= end - begin < timedelta(days=_MOST_DAYS) or end == date.max:
            reason = f"expected 1 to {_MOST_DAYS} days, found {begin} to {end}"
            raise RequestInvalid([{"field": "query.to", "reason": reason}])
        return history.report(session, context.store, hospital, begin, end)
