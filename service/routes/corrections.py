"""`/hospitals/{hospital}/corrections`: what people made of answers, and what they changed."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from model_store.scan import MOST_FILES, list_formats
from service import corrections
from service.context import ServiceContext
from service.corrections import CorrectionFigures, CorrectionView, Desk, Found, Kept, Sent, kept_answers
from service.database.hospitals import require_hospital
from service.http.audit import Audited, AuditedRoute, concerns
from service.http.dependencies import AsApprover, AsOperator, AsReader, actor_of
from service.http.parameters import HospitalId, Limit, Page, Reason, Text
from service.http.problems import problem_responses
from service.http.uploads.receive import UploadForm, UploadLimits, receive
from service.jobs import submission
from service.prediction.options import SERIES
from service.runtime.spool import pack
from service.validation import DICOM_SERIES, MODEL_NAME, PRINTABLE, parse

router = APIRouter(tags=["corrections"], route_class=AuditedRoute)

OfModel = Annotated[str | None, Query(pattern=MODEL_NAME, description="Only answers of this model.")]
RequestOfAnswer = Annotated[
    str, Path(alias="request", max_length=64, description="Id of the answered request (`Locum-Request`).")
]
# The largest number of a row that is asked for: every database and JSON has it.
_LARGEST = 2**53 - 1
_BINARY = {"type": "string", "format": "binary"}


class CorrectionForm(BaseModel):
    """The text fields that come with a mask."""

    model_config = ConfigDict(extra="forbid")

    accepted: bool = Field(False, description="The answer is right as it is; then no mask is sent.")
    seconds: FiniteFloat | None = Field(None, ge=0, le=86400, description="How long the person worked on it.")
    note: str | None = Field(None, min_length=1, max_length=200, pattern=PRINTABLE)
    name: str | None = Field(
        None,
        min_length=1,
        max_length=150,
        pattern=PRINTABLE,
        description="The scan's name in the cohort, as in `PUT …/scans/NAME`, which tells its patient. By "
        "default a digest.",
    )
    series: str | None = Field(None, pattern=DICOM_SERIES, max_length=64, description=SERIES)


_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "mask": {
                            **_BINARY,
                            "description": f"{list_formats('or')}: the whole mask as it should be, on the "
                            "scan's own grid.",
                        },
                        "scan": {
                            **_BINARY,
                            "description": "The scan as it was sent to /segment; the files of a DICOM series "
                            "each in a field. Not needed while a cohort of the hospital, or the caller's "
                            "viewer, has it here, or the hospital keeps the answered mask.",
                        },
                        **CorrectionForm.model_json_schema()["properties"],
                    },
                    "additionalProperties": False,
                }
            }
        },
    }
}


class CorrectionList(Page):
    """Corrections of a hospital, newest first."""

    corrections: list[CorrectionView]


class CorrectionSummary(BaseModel):
    """Corrections by version, scanner and month.

    Bad masks are corrected more often than good ones: these are not the figures of all answers.
    """

    groups: list[CorrectionFigures]


class KeepingBody(BaseModel):
    """Whether answered masks are kept, for how long and in how much room."""

    model_config = ConfigDict(extra="forbid")

    days: Annotated[int, Field(ge=1, le=3650)] | None = Field(
        description="Days until a mask is deleted, at most LOCUM_OBSERVATION_DAYS. Null: keep none, and "
        "delete those that are kept."
    )
    quota_bytes: int = Field(
        2**30, ge=1, le=_LARGEST, description="Bytes of all of them; the oldest are deleted for the newest."
    )
    reason: Reason
    actor: Text | None = Field(None, description="As in an assignment.")


class KeptAnswers(BaseModel):
    """What a hospital chose, and what is kept now."""

    days: int | None = Field(description="Null where none is kept.")
    quota_bytes: int | None
    actor: str | None
    reason: str | None
    since: datetime | None
    count: int = Field(description="Masks that are kept now.")
    bytes: int


@router.get("/hospitals/{hospital}/kept-answers", responses=problem_responses(404, 422))
def get_kept_answers(context: AsReader, hospital: HospitalId) -> KeptAnswers:
    """Say whether the hospital keeps answered masks, and how many there are."""
    with context.database.read() as session:
        require_hospital(session, hospital)
        rule = kept_answers.rule_of(session, hospital)
        count, size = kept_answers.size_of(session, hospital)
    return KeptAnswers(
        days=None if rule is None else rule.days,
        quota_bytes=None if rule is None else rule.quota_bytes,
        actor=None if rule is None else rule.actor,
        reason=None if rule is None else rule.reason,
        since=None if rule is None else rule.at,
        count=count,
        bytes=size,
    )


@router.put("/hospitals/{hospital}/kept-answers", responses=problem_responses(400, 403, 404, 408, 413, 422))
def keep_answers(
    context: Annotated[AsApprover, Audited("answers.chosen", refused_only=True)],
    hospital: HospitalId,
    body: KeepingBody,
) -> KeptAnswers:
    """Keep the masks of the hospital's answers from now on, or none.

    A correction is then compared with the mask that was served, and needs no scan. Without it the version
    that answered answers again. What is beyond a smaller choice is deleted at once.
    """
    with context.database.write() as session:
        require_hospital(session, hospital)
        actor = actor_of(context.database.caller, body.actor)
        kept_answers.choose(
            session, context.settings, hospital, body.days, body.quota_bytes, actor, body.reason
        )
    kept_answers.trim(context.database, context.settings, hospital)
    return get_kept_answers(context, hospital)


@router.get("/hospitals/{hospital}/corrections", responses=problem_responses(404, 422))
def list_corrections(
    context: AsReader,
    hospital: HospitalId,
    model: OfModel = None,
    after: Annotated[
        int | None, Query(ge=1, le=_LARGEST, description="List those before this one in time.")
    ] = None,
    limit: Limit = 100,
) -> CorrectionList:
    """List the corrections of a hospital's answers with what they changed, newest first."""
    with context.database.read() as session:
        require_hospital(session, hospital)
        found = corrections.page(session, hospital, model, before=after, limit=limit + 1)
    more = str(found[limit - 1].id) if len(found) > limit else None
    return CorrectionList(corrections=found[:limit], next=more)


@router.get("/hospitals/{hospital}/corrections/summary", responses=problem_responses(404, 422))
def sum_up_corrections(context: AsReader, hospital: HospitalId, model: OfModel = None) -> CorrectionSummary:
    """Sum up the newest 5,000 corrections by version, scanner and month."""
    with context.database.read() as session:
        require_hospital(session, hospital)
        return CorrectionSummary(groups=corrections.summary(session, hospital, model))


@router.get("/hospitals/{hospital}/corrections/{request}", responses=problem_responses(404, 422))
def get_correction(context: AsReader, hospital: HospitalId, of: RequestOfAnswer) -> CorrectionView:
    """Return the correction of a request's answer."""
    with context.database.read() as session:
        require_hospital(session, hospital)
        return corrections.get(session, hospital, of)


@router.put(
    "/hospitals/{hospital}/corrections/{request}",
    responses={
        201: {"model": CorrectionView, "description": "Stored."},
        **problem_responses(404, 408, 409, 413, 415, 422, 503, 507),
    },
    openapi_extra=_FORM,
)
async def put_correction(
    request: Request,
    context: Annotated[AsReader, Audited("correction.stored")],
    hospital: HospitalId,
    of: RequestOfAnswer,
    response: Response,
) -> CorrectionView:
    """Correct a request's answer by a mask, or say that it was right.

    The mask of a later correction takes the place of the earlier one; the same again changes nothing. A mask
    that equals the answer counts as accepted. Scan and mask are kept, without the patient, in a cohort of the
    hospital's own, from which no model learns until the hospital agrees (`may_train`); without the scan the
    mask is kept beside the answered one, as long. A worker then compares the mask with the answer.
    """
    answers: list[Found] = []

    async def admit() -> None:
        answers.extend(await to_thread.run_sync(_answers, context, hospital, of))

    limits = UploadLimits(context.settings.max_upload_bytes, MOST_FILES)
    with await receive(
        request,
        context.settings.spool,
        limits,
        file_fields=("mask", "scan"),
        repeated_fields=("scan",),
        admit=admit,
    ) as form:
        said = parse(CorrectionForm, form.fields, "body")
        await to_thread.run_sync(_pack, form, context)
        sent = Sent("http", form.files.get("mask"), form.files.get("scan"), **said.model_dump())
        async with context.admission.turn():
            kept = await to_thread.run_sync(keep_and_send, context, hospital, answers, sent)
    concerns(request, version=kept.view.version, mask=kept.view.mask)
    response.status_code = 201 if kept.created else 200
    return kept.view


@router.delete(
    "/hospitals/{hospital}/corrections/{request}", status_code=204, responses=problem_responses(404, 422)
)
def delete_correction(
    context: Annotated[AsOperator, Audited("correction.deleted")], hospital: HospitalId, of: RequestOfAnswer
) -> None:
    """Delete a correction and its figures. Scan and mask stay in the cohort, which has routes of its own."""
    with context.database.write() as session:
        require_hospital(session, hospital)
        corrections.remove(session, hospital, of)


def keep_and_send(context: ServiceContext, hospital: str, answers: list[Found], sent: Sent) -> Kept:
    """Store a correction, and send the job that measures it on. Blocking. Raises as `corrections.keep`."""
    kept = corrections.keep(desk_of(context), hospital, answers, sent)
    assert kept is not None
    if kept.job is not None:
        submission.send(context.database, context.queue, kept.job)
    return kept


def desk_of(context: ServiceContext) -> Desk:
    """The parts of the API that take a correction in."""
    return Desk(context.database, context.settings, context.store)


def _answers(context: ServiceContext, hospital: str, of: str) -> list[Found]:
    with context.database.read() as session:
        require_hospital(session, hospital)
        return corrections.find_answer(session, hospital, of)


def _pack(form: UploadForm, context: ServiceContext) -> None:
    """Make one file of those of a DICOM series."""
    parts = form.repeated.pop("scan", [])
    if len(parts) == 1:
        form.files["scan"] = parts[0]
    elif parts:
        form.files["scan"] = pack(parts, context.settings.spool)
