"""Problem details (RFC 9457): the one form of every rejection and failure.

    ServiceError               the status, slug and title of its class, its message, further members
    └── Problem                the same, for what only HTTP can reject: raised in `http/` and `routes/`
    model_store errors         mapped by `_STORE_STATUS`: the message already says what to do
    a database that fails      503 `database-unavailable` or `database-damaged`, 507 `disk-full`
    request validation         422 `invalid-request`, naming the fields, never echoing their values
    404, 405 and other HTTP    `not-found`, `method-not-allowed` with every method of the path, ...

`install(app)` puts the handlers and the request scope in place; `problem_responses(...)` documents problems
on a route.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import DatabaseError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from model_store import errors as store_errors
from service.database import DATABASE_ERRORS, database_failure
from service.errors import MemoryShort, RequestInvalid, ServiceError
from service.http.request_id import RequestIdMiddleware
from service.validation import MOST_ENTRIES, place, reason

_log = logging.getLogger("locum.service")

# Seconds after which a scan that found no memory may be sent again.
_MEMORY_RETRY = "10"

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:locum:problem:"


class ProblemDetails(BaseModel):
    """The answer to a rejected request, as `application/problem+json`."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="The kind of problem for programs: `urn:locum:problem:<slug>`.")
    title: str = Field(description="The kind of problem for people.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What was expected, what was found, and what to do.")
    instance: str = Field(description="This occurrence: `urn:uuid:` and the request's id.")


class Problem(ServiceError):
    """A rejected header, condition or body; status, slug and title are arguments."""

    def __init__(
        self,
        status: int,
        slug: str,
        title: str,
        detail: str,
        headers: Mapping[str, str] | None = None,
        **extensions: Any,
    ) -> None:
        super().__init__(detail, headers=headers, **extensions)
        self.status, self.slug, self.title = status, slug, title


# The most specific class of an error decides. A damaged artefact is the service's error, not the caller's.
_STORE_STATUS: dict[type[Exception], tuple[int, str, str]] = {
    store_errors.ReferenceInvalid: (422, "invalid-reference", "Not a reference to an artefact"),
    store_errors.ReferenceNotFound: (404, "artefact-not-found", "No such artefact"),
    store_errors.ArtefactDamaged: (503, "artefact-damaged", "The artefact is damaged"),
    store_errors.ArtefactWithdrawn: (410, "artefact-withdrawn", "The version was withdrawn"),
    store_errors.ArtefactUntrusted: (503, "artefact-untrusted", "No trusted key signed the version"),
    store_errors.GraphRefused: (503, "graph-refused", "The model's graph was refused"),
    store_errors.UnknownKind: (422, "unknown-kind", "An artefact of a kind that is not known here"),
    store_errors.PublishRefused: (409, "publish-refused", "The artefact was refused"),
    store_errors.StoreUnavailable: (503, "store-unavailable", "The model store does not answer"),
    store_errors.StoreError: (422, "store-error", "The model store refused"),
    store_errors.TaskError: (422, "task-error", "Does not fit the model's task"),
    store_errors.UnsupportedScan: (415, "unsupported-scan", "Not a scan that can be read here"),
    store_errors.DamagedScan: (422, "damaged-scan", "The scan is damaged"),
    store_errors.ScanTooLarge: (413, "scan-too-large", "The scan is too large"),
    store_errors.ScanMismatch: (422, "scan-mismatch", "The scan does not fit the model"),
    store_errors.MaskMismatch: (422, "mask-mismatch", "The mask does not fit its scan"),
    store_errors.ScanError: (422, "scan-error", "The scan was refused"),
    store_errors.LocumStoreError: (422, "refused", "Refused"),
}


def from_store_error(error: Exception) -> Problem:
    """Convert an error of `model_store` to a problem."""
    for cls in type(error).__mro__:
        if cls in _STORE_STATUS:
            status, slug, title = _STORE_STATUS[cls]
            return Problem(status, slug, title, str(error) or title)
    raise TypeError(f"{type(error).__name__} is not an error of model_store") from error


def respond(request: Request, error: ServiceError) -> Response:
    """The error as a response, tied to its request by `instance`."""
    content = {
        "type": TYPE_PREFIX + error.slug,
        "title": error.title,
        "status": error.status,
        "detail": str(error),
        "instance": f"urn:uuid:{getattr(request.state, 'request_id', '')}",
        **error.extensions,
    }
    body = json.dumps(content, default=str, ensure_ascii=False)
    return Response(body, status_code=error.status, headers=error.headers, media_type=MEDIA_TYPE)


def from_database_error(error: DatabaseError | PoolTimeout) -> ServiceError:
    """The problem for a database that does not work. Any other error of the database is raised."""
    found = database_failure(error)
    if found is None:
        raise error
    # The error's text has statements and values; the log has its kind, and readiness says the rest.
    _log.error("%s: %s", found.title, error.orig if isinstance(error, DatabaseError) else error)
    return found


def from_validation_error(error: RequestValidationError, content_type: str | None) -> RequestInvalid:
    """Make one entry per field, without values: they can be large, or a patient's."""
    return RequestInvalid([_describe_field(item, content_type) for item in error.errors()[:MOST_ENTRIES]])


def _describe_field(item: Mapping[str, Any], content_type: str | None) -> dict[str, str]:
    """Make `field` and `reason` of one field that FastAPI rejected."""
    location = list(item["loc"])
    if item["type"] == "json_invalid" and isinstance(location[-1], int):
        # FastAPI puts the position where a field's name would be.
        at = location.pop()
        return {
            "field": place(location),
            "reason": f"not JSON at character {at}: {item.get('ctx', {}).get('error', 'unreadable')}",
        }
    if item["type"] in ("model_attributes_type", "dict_type") and location == ["body"]:
        if content_type is not None and content_type.lower().startswith("application/json"):
            return {"field": "body", "reason": "expected a JSON object"}
        found = "none" if content_type is None else ascii(content_type[:64])[1:-1]
        expected = "a JSON object and the header Content-Type: application/json"
        return {"field": "body", "reason": f"expected {expected}, found Content-Type: {found}"}
    return {"field": place(location), "reason": reason(item)}


def from_http_exception(error: HTTPException, request: Request) -> Problem:
    """The problem for an error of the framework: an unknown path, a wrong method, a broken body."""
    phrase = HTTPStatus(error.status_code).phrase
    headers = dict(error.headers or {})
    details = {404: "Nothing is served at this path; /docs lists what is."}
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The framework's own header knows the first route of this path alone, and each method is a route.
        headers["Allow"] = ", ".join(_methods(request))
        details[405] = f"The path exists, but not with this method; it takes {headers['Allow']}."
    stated = str(error.detail or "")
    # The framework's own words for a status are just its name; anything else was said on purpose.
    detail = details.get(error.status_code, phrase) if stated in ("", phrase) else stated
    return Problem(error.status_code, phrase.lower().replace(" ", "-"), phrase, detail, headers)


def _methods(request: Request) -> list[str]:
    """Every method with which something is served at the request's path."""
    return [
        method
        for method in ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
        if any(
            # HEAD is answered wherever GET is.
            route.matches({**request.scope, "method": "GET" if method == "HEAD" else method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]


def install(app: FastAPI) -> None:
    """Make every rejection and failure of the app a problem, and give every request its id."""

    async def on_service_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            # A fault of the service: the request id's middleware logs it, and answers without its message.
            raise error
        return respond(request, error)

    async def on_store_error(request: Request, error: Exception) -> Response:
        return respond(request, from_store_error(error))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return respond(request, from_validation_error(error, request.headers.get("content-type")))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # FastAPI answers 400 for any error while it reads a body; a rejection keeps its own reason.
        cause = error.__cause__
        problem = cause if isinstance(cause, Problem) else from_http_exception(error, request)
        return respond(request, problem)

    async def on_memory_error(request: Request, error: Exception) -> Response:
        # The frames of the error hold what the request had allocated, until Python's collector finds them.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__context__ = None
        _log.error("no memory for a request: %s", error)
        words = (
            "The service has no memory for this scan or its answer now: send it again when others are done, "
            "or a smaller one. If that happens often, give the machine more memory, or lower the limits "
            "(docs/how-to/deploy.md, Memory)."
        )
        return respond(request, MemoryShort(words, headers={"Retry-After": _MEMORY_RETRY}))

    async def on_database_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, DATABASE_ERRORS)
        return respond(request, from_database_error(error))

    app.add_exception_handler(ServiceError, on_service_error)
    app.add_exception_handler(MemoryError, on_memory_error)
    app.add_exception_handler(store_errors.LocumStoreError, on_store_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    for kind in DATABASE_ERRORS:
        app.add_exception_handler(kind, on_database_error)
    app.add_middleware(RequestIdMiddleware)
    _describe(app)


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the problems of a route, for its `responses=`."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def _describe(app: FastAPI) -> None:
    """Add the schema of problems to the API's description.

    FastAPI would file a response's model under `application/json`, which a problem is not, so routes refer to
    the schema by name and it is added here.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        description = generate()
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        schemas.setdefault("ProblemDetails", ProblemDetails.model_json_schema())
        # A problem takes the place of FastAPI's own answer to an invalid request.
        for path in description.get("paths", {}).values():
            for operation in path.values():
                # What the middleware answers before the route.
                early: tuple[int, ...] = (401, 403, 421, 429, 503) if "security" in operation else (421,)
                # Codings of a body are looked at while it is read.
                early += (415,) if "requestBody" in operation else ()
                operation["responses"].update(
                    {str(status): text for status, text in problem_responses(*early).items()}
                )
                answer = operation.get("responses", {}).get("422", {}).get("content", {})
                if "HTTPValidationError" in str(answer):
                    operation["responses"]["422"] = problem_responses(422)[422]
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        return description

    app.openapi = openapi  # type: ignore[method-assign]
