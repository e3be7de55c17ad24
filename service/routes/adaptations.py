"""`POST /hospitals/{hospital}/adaptations`: start a job that fits a model to the hospital's scans."""

from __future__ import annotations

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic import JsonValue, RootModel

from model_store.scan import list_formats
from personalization.options.masks import MASKS
from service.adaptation.card.reading import read_view
from service.adaptation.requests import AdaptationRequest, AdaptationSubmission, CohortAdaptation, check_place
from service.cohorts.intake import take_in
from service.http.audit import Audited, AuditedRoute
from service.http.dependencies import AsOperator
from service.http.parameters import IDEMPOTENT, HospitalId, IdempotencyKey
from service.http.problems import problem_responses
from service.http.uploads.multipart import missing
from service.http.uploads.receive import UploadLimits, receive
from service.jobs.views import JobView
from service.kinds import ADAPTABLE, BY_MASKS
from service.validation import parse

router = APIRouter(tags=["jobs"], route_class=AuditedRoute)

_SCANS = "scans"


class _Options(RootModel[dict[str, JsonValue]]):
    """Those of a form, before it is known of which kind the model is."""


def _request_body() -> dict[str, Any]:
    scans = {"type": "array", "items": {"type": "string", "format": "binary"}}
    options = {"type": "string", "description": "JSON, as `options` of the JSON body."}
    form = {
        "type": "object",
        "required": [_SCANS],
        "properties": {
            _SCANS: scans | {"description": f"{list_formats('or')}; together as large as one upload."},
            "model": {"type": "string"},
            "options": options,
        },
        "additionalProperties": False,
    }
    body = CohortAdaptation.model_json_schema()
    body["properties"]["options"] = {
        "description": "By the kind of the model.",
        "anyOf": [
            found.options.model_json_schema() | {"title": name}
            for name, found in {**ADAPTABLE, MASKS: BY_MASKS}.items()
        ],
    }
    content = {"application/json": {"schema": body}, "multipart/form-data": {"schema": form}}
    return {"required": True, "content": content}


@router.post(
    "/hospitals/{hospital}/adaptations",
    status_code=202,
    responses={
        202: IDEMPOTENT,
        **problem_responses(404, 408, 409, 410, 413, 415, 422, 503, 507),
    },
    openapi_extra={"requestBody": _request_body()},
)
async def adapt(
    request: Request,
    context: Annotated[AsOperator, Audited("job.started")],
    hospital: HospitalId,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Fit a model of the federation to the hospital, in the background. The job makes a candidate version.

    The scans are those of a cohort, or parts of the form.
    """
    request_id = request.state.request_id

    async def admit() -> None:
        await to_thread.run_sync(check_place, context, hospital, idempotency_key)

    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        settings = context.settings
        limits = UploadLimits(settings.max_upload_bytes, settings.max_cohort_scans)
        with await receive(
            request, settings.spool, limits, file_fields=(_SCANS,), repeated_fields=(_SCANS,), admit=admit
        ) as form:
            uploads = form.repeated.get(_SCANS)
            if not uploads:
                raise missing(_SCANS)
            asked = _read_form(form.fields)
            accepting = AdaptationSubmission(context, hospital, asked, idempotency_key, request_id, uploads)
            formats: list[str] = []
            if await to_thread.run_sync(accepting.is_new):
                formats = await take_in(uploads, settings, context.admission)
            job, created = await to_thread.run_sync(accepting.make, formats)
    else:
        named = parse(CohortAdaptation, await request.body())
        accepting = AdaptationSubmission(context, hospital, named, idempotency_key, request_id)
        job, created = await to_thread.run_sync(accepting.make)
    response.headers["Location"] = f"/jobs/{job}"
    if not created:
        response.headers["Idempotency-Replayed"] = "true"
    return await to_thread.run_sync(read_view, context.store, context.database, job)


def _read_form(fields: dict[str, str]) -> AdaptationRequest:
    """The text fields, of which `options` is JSON; an empty one counts as left out."""
    given: dict[str, Any] = {name: value for name, value in fields.items() if value != ""}
    if "options" in given:
        given["options"] = parse(_Options, given["options"].encode(), "options").root
    return parse(AdaptationRequest, given)
