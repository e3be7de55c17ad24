"""Problem details (RFC 9457): the one shape in which the service says no.

    Problem                    raised by routes: status, type slug, title, detail, further members
    model_store errors         mapped by `_STORE_STATUS`: the message already says what to do
    request validation         422 `invalid-request`, naming the fields, never echoing their values
    404, 405 and other HTTP    `not-found`, `method-not-allowed` with every method of the path, ...

`install(app)` puts the handlers and the request scope in place; `problem_responses(...)` documents problems
on a route.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from model_store import errors as store_errors
from service.http.request_id import RequestIdMiddleware
from service.http.validation import describe_error

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:locum:problem:"


class ProblemDetails(BaseModel):
    """What a refused request receives, as `application/problem+json`."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="What kind of problem: `urn:locum:problem:<slug>`, made to be compared.")
    title: str = Field(description="The kind of problem in words.")
    status: int = Field(description="The HTTP status, again.")
    detail: str = Field(description="What was expected, what was found, and what to do.")
    instance: str = Field(description="This one occurrence: `urn:uuid:` and the request's id.")


class Problem(Exception):
    """A refusal to answer, with its reason.

    `type_slug` names the kind of problem and never changes its meaning; `extensions` are further members of
    the JSON object that a program can use (for example `choices`).
    """

    def __init__(
        self,
        status: int,
        type_slug: str,
        title: str,
        detail: str,
        headers: Mapping[str, str] | None = None,
        **extensions: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.type_slug = type_slug
        self.title = title
        self.detail = detail
        self.headers = dict(headers or {})
        self.extensions = extensions


# The most specific class of an error decides. A damaged artefact is the service's trouble, not the caller's.
_STORE_STATUS: dict[type[Exception], tuple[int, str, str]] = {
    store_errors.ReferenceInvalid: (422, "invalid-reference", "Not a reference to an artefact"),
    store_errors.ReferenceNotFound: (404, "artefact-not-found", "No such artefact"),
    store_errors.ArtefactDamaged: (503, "artefact-damaged", "The artefact is damaged"),
    store_errors.ArtefactWithdrawn: (410, "artefact-withdrawn", "The version was withdrawn"),
    store_errors.UnknownKind: (422, "unknown-kind", "An artefact of a kind that is not known here"),
    store_errors.PublishRefused: (409, "publish-refused", "The artefact was refused"),
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
    """The problem that an error of `model_store` becomes."""
    for cls in type(error).__mro__:
        if cls in _STORE_STATUS:
            status, slug, title = _STORE_STATUS[cls]
            return Problem(status, slug, title, str(error) or title)
    raise TypeError(f"{type(error).__name__} is not an error of model_store") from error


def respond(request: Request, problem: Problem) -> Response:
    """The problem as a response, tied to its request by `instance`."""
    content = {
        "type": TYPE_PREFIX + problem.type_slug,
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
        "instance": f"urn:uuid:{getattr(request.state, 'request_id', '')}",
        **problem.extensions,
    }
    body = json.dumps(content, default=str, ensure_ascii=False)
    return Response(body, status_code=problem.status, headers=problem.headers, media_type=MEDIA_TYPE)


def from_validation_error(error: RequestValidationError, content_type: str | None) -> Problem:
    """422 with one entry per field. Values are not echoed: they can be large, and they can be a patient's."""
    return invalid([describe_error(item, content_type) for item in error.errors()[:20]])


def invalid(entries: list[dict[str, str]]) -> Problem:
    """422 with the `field` and `reason` of each that does not fit."""
    detail = "; ".join(f"{entry['field']}: {entry['reason']}" for entry in entries)
    return Problem(422, "invalid-request", "The request is not valid", detail, errors=entries)


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
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]


def install(app: FastAPI) -> None:
    """Make every refusal and failure of the app a problem, and give every request its id."""

    async def on_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return respond(request, error)

    async def on_store_error(request: Request, error: Exception) -> Response:
        return respond(request, from_store_error(error))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return respond(request, from_validation_error(error, request.headers.get("content-type")))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # Whatever goes wrong while FastAPI reads a body it calls a 400; what was refused keeps its reason.
        refused = error.__cause__
        problem = refused if isinstance(refused, Problem) else from_http_exception(error, request)
        return respond(request, problem)

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(store_errors.LocumStoreError, on_store_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_middleware(RequestIdMiddleware)
    _describe(app)


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses=`: the problems it can answer with, in the API's description."""
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
                answer = operation.get("responses", {}).get("422", {}).get("content", {})
                if "HTTPValidationError" in str(answer):
                    operation["responses"]["422"] = problem_responses(422)[422]
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        return description

    app.openapi = openapi  # type: ignore[method-assign]
