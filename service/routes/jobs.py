"""`/jobs`: list, follow and cancel jobs; their results, files and cards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.responses import HTMLResponse

from service.adaptation.card.reading import read_card, read_view
from service.context import ServiceContext
from service.database.job_states import TERMINAL, JobState
from service.errors import JobStillRunning, RoleMissing
from service.http.audit import Audited, AuditedRoute
from service.http.dependencies import AsOperator, AsReader
from service.http.origins import self_contained
from service.http.parameters import JobId, Limit, Page
from service.http.problems import Problem, problem_responses
from service.job_kinds import KINDS
from service.jobs import records, submission
from service.jobs.files import JobFolder
from service.jobs.followers import Follower
from service.jobs.results import read_result
from service.jobs.views import JobSummary, JobView, summary
from service.validation import HOSPITAL_ID, JOB_ID

router = APIRouter(tags=["jobs"], route_class=AuditedRoute)

_BINARY = {"schema": {"type": "string", "format": "binary"}}


class JobList(Page):
    """Jobs, newest first."""

    jobs: list[JobSummary]


@router.get("/jobs", responses=problem_responses(404, 422))
def list_jobs(
    context: AsReader,
    hospital: Annotated[str | None, Query(pattern=HOSPITAL_ID)] = None,
    state: Annotated[JobState | None, Query()] = None,
    after: Annotated[
        str | None, Query(pattern=JOB_ID, description="Id of a job: list those before it in time.")
    ] = None,
    limit: Limit = 100,
) -> JobList:
    """List the newest jobs, optionally of one hospital or in one state."""
    with context.database.read() as session:
        found = records.listed(session, hospital, state, limit + 1, after)
        page = found[:limit]
        more = len(found) > limit
        return JobList(jobs=[summary(session, job) for job in page], next=page[-1].id if more else None)


@router.get("/jobs/{job}", responses=problem_responses(404, 422))
def get_job(context: AsReader, job: JobId) -> JobView:
    """Return a job's state, progress and result."""
    return read_view(context.store, context.database, job)


@router.delete(
    "/jobs/{job}",
    responses={
        202: {"model": JobView, "description": "The worker was asked to stop."},
        **problem_responses(404, 422),
    },
)
def cancel_job(
    context: Annotated[AsReader, Audited("job.cancelled")], job: JobId, response: Response
) -> JobView:
    """Cancel a job: at once if it waits, within seconds if it runs. A finished job stays as it ended.

    A reader cancels only the jobs that its own scans were sent to.
    """
    _require_operator_or_maker(context, job)
    found = submission.cancel(context.database, context.settings, job)
    response.status_code = 202 if found.state == "cancelling" else 200
    return read_view(context.store, context.database, job)


@router.get(
    "/jobs/{job}/result",
    response_class=Response,
    responses={
        200: {
            "description": "The answer that `POST /segment` would have given. For research use only.",
            "content": {
                "application/gzip": _BINARY,
                "image/png": _BINARY,
                "application/dicom": _BINARY,
                "application/json": {},
            },
        },
        **problem_responses(404, 409, 410, 422),
    },
)
def get_result(context: Annotated[AsReader, Audited("result.read")], job: JobId) -> Response:
    """Return the answer of a job of kind `scan`, `segment` or `pacs-segment`, until it expires.

    After a segmentation was stored in a PACS, it is a JSON object with the UIDs of the stored instance.
    """
    stored = read_result(context.database, context.settings.open_files(), job)
    return Response(stored.body, headers=dict(stored.headers), media_type=stored.media_type)


@router.delete("/jobs/{job}/files", status_code=204, responses=problem_responses(404, 409, 422))
def delete_files(context: Annotated[AsReader, Audited("files.deleted")], job: JobId) -> None:
    """Delete a job's pictures and result now. Its published version and its record stay.

    A reader deletes only the results of its own scans.
    """
    _require_operator_or_maker(context, job)
    with context.database.write() as session:
        found = records.get(session, job, lock=True)
        if found.state not in TERMINAL:
            raise JobStillRunning(
                f"job {job} is {found.state} and needs its files: DELETE /jobs/{job} stops it first"
            )
        records.expire_files_now(found)
    JobFolder(context.settings.open_files(), job).delete()


def _require_operator_or_maker(context: ServiceContext, job: str) -> None:
    """Raise RoleMissing if the caller is no operator, and the job is not on a scan that it sent."""
    caller = context.database.caller
    with context.database.read() as session:
        found = records.get(session, job)
    if not (caller.has("operator") or (KINDS[found.kind].of_its_maker and found.actor == caller.actor)):
        raise RoleMissing(
            f"this needs the role operator, or a job on a scan that {caller.actor} sent; it has the role "
            f"reader, and the job is another's or of kind {found.kind}: ask an operator"
        )


async def _follower(context: AsReader, job: JobId) -> AsyncIterator[Follower]:
    share = context.database.caller.share
    # Before the stream begins: once it has, no problem can be answered any more.
    context.followers.refuse_if_full(share)
    await asyncio.to_thread(_known, context, job)
    async with context.followers.following(job, share) as follower:
        yield follower


def _known(context: ServiceContext, job: str) -> None:
    with context.database.read() as session:
        records.get(session, job)


@router.get(
    "/jobs/{job}/events",
    response_class=EventSourceResponse,
    responses=problem_responses(404, 422, 503),
)
async def follow_job(
    follower: Annotated[Follower, Depends(_follower)],
    last_event_id: Annotated[
        int,
        Header(ge=0, le=2**53, description="Id of the last event received: the stream continues after it."),
    ] = 0,
) -> AsyncIterator[ServerSentEvent]:
    """Stream a job's events (server-sent events): `state`, `progress`, `epoch`, `gate`, `warning`.

    The stream begins with the job's first event and closes after its last state. A client that the service
    lets go returns with `Last-Event-ID`.
    """
    async for event in follower.after(last_event_id):
        data = {"at": event.at, **event.data}
        yield ServerSentEvent(id=str(event.id), event=event.type, data=data)


@router.get("/jobs/{job}/card", response_class=HTMLResponse, responses=problem_responses(404, 422))
def get_card(context: Annotated[AsOperator, Audited("card.read")], job: JobId) -> HTMLResponse:
    """Return the job's card: curves, gate, coefficients, pictures, lineage. It is available while the job
    runs.

    One self-contained HTML page. It may show pictures of patients and must not be cached.
    """
    # Its templates are imported for the first card.
    from service.adaptation.card.page import render

    card = read_card(context.store, context.database, context.settings.open_files(), job)
    return self_contained(render(card))


@router.get(
    "/jobs/{job}/preview",
    response_class=Response,
    responses={200: {"content": {"image/png": _BINARY}}, **problem_responses(404, 422)},
)
def get_preview(
    context: Annotated[AsOperator, Audited("card.read")],
    job: JobId,
    epoch: Annotated[  # noqa: ARG001
        int | None, Query(ge=0, description="Ignored: it lets a browser ask again after each epoch.")
    ] = None,
) -> Response:
    """Return a picture of a running job: the masks of a few slices after its latest epoch.

    It shows patients, and is deleted at the job's end. The job's `progress` has `preview` while there is one.
    """
    with context.database.read() as session:
        records.get(session, job)
    folder = JobFolder(context.settings.open_files(), job)
    content = folder.read(folder.PREVIEW)
    if content is None:
        raise Problem(
            404,
            "no-preview",
            "This job has no preview",
            f"Job {job} has no picture of its present masks: a job has one while it learns, epoch by epoch.",
        )
    return Response(content, media_type="image/png")
