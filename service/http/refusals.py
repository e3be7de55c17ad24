"""Which problem each of the service's own errors becomes, and a database that cannot be had."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from sqlalchemy.exc import OperationalError
from starlette.responses import Response

from service import errors
from service.http.problems import Problem, respond

_log = logging.getLogger("locum.service")
_DATABASE_RETRY_SECONDS = 5

_PROBLEMS: dict[type[errors.ServiceError], tuple[int, str, str]] = {
    errors.HospitalUnknown: (404, "hospital-unknown", "No such hospital"),
    errors.AssignmentStale: (412, "assignment-stale", "The serving log has moved on"),
    errors.NothingToRollBack: (409, "nothing-to-roll-back", "There is no earlier assignment"),
    errors.CohortUnknown: (404, "cohort-unknown", "No such cohort or scan"),
    errors.CohortDeleted: (410, "cohort-gone", "The scans of the cohort were deleted"),
    errors.CohortInUse: (409, "cohort-in-use", "A job needs the scans of the cohort"),
    errors.ScanNameTaken: (409, "scan-name-taken", "Another scan has this name"),
    errors.MaskTaken: (409, "mask-taken", "The scan has another mask"),
    errors.CohortFull: (507, "cohort-full", "No room for another scan"),
    errors.JobUnknown: (404, "job-unknown", "No such job"),
    errors.JobStillRunning: (409, "job-not-over", "The job is not over"),
    errors.QueueFull: (503, "queue-full", "Too many jobs wait for a worker"),
    errors.IdempotencyConflict: (422, "idempotency-key-reused", "The key belongs to another request"),
    errors.BrokerError: (503, "queue-unavailable", "The job queue is not available"),
}


def install(app: FastAPI) -> None:
    """Answer each of these errors with its problem, wherever in a request it was raised."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, errors.ServiceError)
        status, slug, title = _PROBLEMS[type(error)]
        return respond(request, Problem(status, slug, title, str(error)))

    for kind in _PROBLEMS:
        app.add_exception_handler(kind, refuse)

    async def unavailable(request: Request, error: Exception) -> Response:
        # Its words hold statements and values; the log has the kind, and readiness says the rest.
        _log.error("the database is not available: %s", getattr(error, "orig", None))
        return respond(
            request,
            Problem(
                503,
                "database-unavailable",
                "The database is not available",
                "It is away, or another process holds it: ask again when /health/ready says that it works.",
                {"Retry-After": str(_DATABASE_RETRY_SECONDS)},
            ),
        )

    app.add_exception_handler(OperationalError, unavailable)
