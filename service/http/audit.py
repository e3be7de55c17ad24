"""Rows of the audit trail for what arrives over HTTP: decisions, and accesses to a patient's data.

    router = APIRouter(route_class=AuditedRoute)     a row per request to the operations of `ACTIONS`
    concerns(request, scan=..., version=...)         what the row says of it

The row is committed before the answer is sent: without a row there is no mask, card or result. A request that
the authentication rejects has no row, since it has no caller; the access log has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from anyio import to_thread
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from model_store.errors import LocumStoreError
from service.audit.trail import Row, request_of_row
from service.context import ServiceContext
from service.database import DATABASE_ERRORS, Caller, Database, Job, database_failure
from service.errors import ServiceError
from service.http.problems import from_store_error

_log = logging.getLogger("locum.service")
_CLIENT_GONE = 499

_COHORT = "/hospitals/{hospital}/cohorts/{cohort}"
_SCAN = f"{_COHORT}/scans/{{name:path}}"
_VIEWERS = "/monailabel"
_SERVING = "/hospitals/{hospital}/serving/{model}"

ACTIONS: dict[tuple[str, str], str] = {
    ("POST", "/segment"): "scan.segmented",
    ("POST", "/classify"): "scan.classified",
    ("POST", "/display"): "scan.displayed",
    ("POST", f"{_VIEWERS}/infer/{{model}}"): "scan.segmented",
    ("PUT", f"{_VIEWERS}/session/"): "scan.stored",
    ("DELETE", f"{_VIEWERS}/session/{{session}}"): "scan.deleted",
    ("GET", f"{_VIEWERS}/datastore/"): "scan.listed",
    ("PUT", f"{_VIEWERS}/datastore/"): "scan.stored",
    ("PUT", f"{_VIEWERS}/datastore/image"): "scan.stored",
    ("DELETE", f"{_VIEWERS}/datastore/"): "scan.deleted",
    ("DELETE", f"{_VIEWERS}/datastore/image"): "scan.deleted",
    ("POST", "/hospitals/{hospital}/cohorts"): "cohort.created",
    ("PATCH", _COHORT): "cohort.described",
    ("DELETE", _COHORT): "cohort.deleted",
    ("GET", f"{_COHORT}/scans"): "cohort.listed",
    ("GET", _SCAN): "scan.read",
    ("PUT", _SCAN): "scan.stored",
    ("DELETE", _SCAN): "scan.deleted",
    ("GET", f"{_SCAN}/mask"): "mask.read",
    ("PUT", f"{_SCAN}/mask"): "mask.stored",
    ("DELETE", f"{_SCAN}/mask"): "mask.deleted",
    ("POST", "/hospitals/{hospital}/adaptations"): "job.started",
    ("POST", "/hospitals/{hospital}/quantisations"): "job.started",
    ("POST", "/pacs/{pacs}/segment"): "job.started",
    ("POST", f"{_COHORT}/pacs"): "job.started",
    ("POST", "/jobs/{job}/checks"): "job.started",
    ("POST", "/jobs/{job}/checks/{check}/verdict"): "job.started",
    ("DELETE", "/jobs/{job}"): "job.cancelled",
    ("GET", "/jobs/{job}/result"): "result.read",
    ("GET", "/jobs/{job}/card"): "card.read",
    ("GET", "/jobs/{job}/preview"): "card.read",
    ("DELETE", "/jobs/{job}/files"): "files.deleted",
}
"""One row per request, whatever its outcome."""

REFUSALS: dict[tuple[str, str], str] = {
    ("PUT", "/hospitals/{hospital}"): "hospital.changed",
    ("PUT", _SERVING): "version.assigned",
    ("POST", f"{_SERVING}/rollback"): "version.rolled-back",
    ("DELETE", "/jobs/{job}/checks/verdict"): "gate.restored",
    ("POST", "/keys"): "key.created",
    ("POST", "/keys/{key}/rotate"): "key.rotated",
    ("DELETE", "/keys/{key}"): "key.revoked",
}
"""One row per rejected request: an accepted one has its row from the transaction that made the change."""

REFUSED = ".refused"
"""The end of the action in such a row."""


def concerns(request: Request, **found: str | None) -> None:
    """Say what the request is about: `hospital`, `version` (digest), `scan` (digest), or a detail."""
    request.scope.setdefault("audit", {}).update(found)


class AuditedRoute(APIRoute):
    """A route with rows of the audit trail, if `ACTIONS` or `REFUSALS` name it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, and a row after it."""
        handle = super().get_route_handler()
        operation = (min(self.methods or ()), self.path)
        action, refusal = ACTIONS.get(operation), REFUSALS.get(operation)
        if action is None and refusal is None:
            return handle

        async def audited(request: Request) -> Response:
            try:
                response = await handle(request)
            except Exception as error:
                try:
                    await _append(request, action or f"{refusal}{REFUSED}", _status(error))
                except SQLAlchemyError as failed:
                    # The request is rejected in any case, with the first reason.
                    _log.error("a rejected request has no row: %s", type(failed).__name__)
                raise
            if action is not None:
                if "location" in response.headers:
                    concerns(request, made=response.headers["location"])
                await _append(request, action, response.status_code)
            return response

        return audited


async def _append(request: Request, action: str, outcome: int) -> None:
    context: ServiceContext = request.app.state.locum
    caller: Caller = request.state.caller
    ids = {
        name: value
        for name, value in request.path_params.items()
        if name in ("hospital", "cohort", "job", "model", "key")
    }
    found = {**ids, **request.scope.get("audit", {})}
    columns = {name: found.pop(name, None) for name in ("hospital", "version", "scan")}
    if columns["hospital"] is not None:
        # A rejected path may have any text there.
        columns["hospital"] = columns["hospital"][:64]
    elif (job := found.get("job")) is not None:
        columns["hospital"] = await to_thread.run_sync(_hospital_of, context.database.for_caller(caller), job)
    details = {name: value[:200] for name, value in found.items() if value is not None}
    await context.rows.append(
        Row(action, caller.actor, outcome=outcome, request=request_of_row(), details=details, **columns)
    )


def _hospital_of(database: Database, number: str) -> str | None:
    """The hospital of a job; None for one that the caller may not see."""
    with database.read() as session:
        job = session.get(Job, number)
        return None if job is None else job.hospital


def _status(error: Exception) -> int:
    """The status of the answer that the handlers of `problems` make of an error."""
    if isinstance(error, LocumStoreError):
        error = from_store_error(error)
    if isinstance(error, HTTPException):
        cause = error.__cause__
        return cause.status if isinstance(cause, ServiceError) else error.status_code
    if isinstance(error, DATABASE_ERRORS):
        error = database_failure(error) or error
    if isinstance(error, ServiceError):
        return error.status
    statuses = {
        RequestValidationError: HTTPStatus.UNPROCESSABLE_ENTITY,
        ClientDisconnect: _CLIENT_GONE,
    }
    return next(
        (int(status) for kind, status in statuses.items() if isinstance(error, kind)),
        int(HTTPStatus.INTERNAL_SERVER_ERROR),
    )
