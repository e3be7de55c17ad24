"""Rows of the audit trail for what arrives over HTTP: decisions, and accesses to a patient's data.

    router = APIRouter(route_class=AuditedRoute)
    def route(context: Annotated[AsReader, Audited("scan.segmented")])     a row per request
    concerns(request, scan=..., version=...)                               what the row says of it
    observes(request, observed)                                            what is stored of the answer

The row is committed before the answer is sent: without a row there is no mask, card or result. A request that
the authentication rejects has no row, since it has no caller; the access log has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, get_type_hints

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
from service.observation import Answer, Observed, Way

_log = logging.getLogger("locum.service")
_CLIENT_GONE = 499


@dataclass(frozen=True)
class Audited:
    """A part of the type of a route's context, beside the role: the action of the row that a request leaves.

    `refused_only`: one per rejected request. An accepted one has its row from the transaction that made the
    change. `way` is how an answer leaves by this route.
    """

    action: str
    refused_only: bool = False
    way: Way = "http"

    @property
    def refusal(self) -> str:
        """The action of a rejected request's row."""
        return f"{self.action}.refused" if self.refused_only else self.action

    @classmethod
    def of(cls, endpoint: Callable[..., Any]) -> Audited | None:
        """What the context of a route's function says; None for a route without rows."""
        hints = get_type_hints(endpoint, include_extras=True).values()
        said = (part for hint in hints for part in getattr(hint, "__metadata__", ()))
        return next((part for part in said if isinstance(part, cls)), None)


def concerns(request: Request, **found: str | None) -> None:
    """Say what the request is about: `hospital`, `version` (digest), `scan` (digest), or a detail."""
    request.scope.setdefault("audit", {}).update(found)


def observes(request: Request, observed: Observed) -> None:
    """Say what is stored of the answer, with the row of the request."""
    request.scope["observed"] = observed


class AuditedRoute(APIRoute):
    """A route with rows of the audit trail, if its context is `Audited`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, and a row after it."""
        handle, declared = super().get_route_handler(), Audited.of(self.endpoint)
        if declared is None:
            return handle

        async def audited(request: Request) -> Response:
            try:
                response = await handle(request)
            except Exception as error:
                try:
                    await _append(request, declared.refusal, _status(error))
                except SQLAlchemyError as failed:
                    # The request is rejected in any case, with the first reason.
                    _log.error("a rejected request has no row: %s", type(failed).__name__)
                raise
            if not declared.refused_only:
                if "location" in response.headers:
                    concerns(request, made=response.headers["location"])
                await _append(request, declared.action, response.status_code, declared.way)
            return response

        return audited


async def _append(request: Request, action: str, outcome: int, way: Way = "http") -> None:
    context: ServiceContext = request.app.state.locum
    caller: Caller = request.state.caller
    ids = {
        name: value
        for name, value in request.path_params.items()
        if name in ("hospital", "cohort", "job", "model", "key", "observation", "request")
    }
    found = {**ids, **request.scope.get("audit", {})}
    columns = {name: found.pop(name, None) for name in ("hospital", "version", "scan")}
    if columns["hospital"] is not None:
        # A rejected path may have any text there.
        columns["hospital"] = columns["hospital"][:64]
    elif (job := found.get("job")) is not None:
        columns["hospital"] = await to_thread.run_sync(_hospital_of, context.database.for_caller(caller), job)
    details = {name: value[:200] for name, value in found.items() if value is not None}
    row = Row(action, caller.actor, outcome=outcome, request=request_of_row(), details=details, **columns)
    answer = None
    if outcome == HTTPStatus.OK and "observed" in request.scope:
        observed: Observed = request.scope["observed"]
        answer = Answer(observed, columns["hospital"], caller.actor, request.state.request_id, way)
    await context.rows.append(row, answer)


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
