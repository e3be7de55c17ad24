"""A request with one scan, from its body to its answer: what the routes for scans do alike.

with await receive_scan(request, context, watch) as form:
    scan = scan_in(form)
    return await answer_now(request, context, watch, select, answer)
"""

from __future__ import annotations

from collections.abc import Callable

from anyio import to_thread
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from service.catalog.network import Selection
from service.context import ServiceContext
from service.http.uploads.multipart import missing
from service.http.uploads.receive import UploadForm, UploadLimits, receive
from service.http.uploads.spool import Upload
from service.inference.pipeline import Stopwatch


async def receive_scan(request: Request, context: ServiceContext, watch: Stopwatch) -> UploadForm:
    """The form with the scan, refused before it is read when nobody would have time for it.

    Raises Problem, ClientDisconnect.
    """

    async def admit() -> None:
        context.admission.refuse_if_full()

    with watch.stage("receive"):
        limits = UploadLimits(context.settings.max_upload_bytes)
        return await receive(request, context.settings.spool, limits, admit=admit)


def scan_in(form: UploadForm) -> Upload:
    """The scan's file. Raises Problem 422 where it is missing."""
    scan = form.files.get("scan")
    if scan is None:
        raise missing("scan")
    return scan


async def answer_now(
    request: Request,
    context: ServiceContext,
    watch: Stopwatch,
    select: Callable[[], Selection],
    answer: Callable[[Selection], Response],
) -> Response:
    """Choose the network, wait for a slot and answer in it; `select` and `answer` run in threads.

    Raises what they raise, Problem 503 beyond the queue, and ClientDisconnect for a client that left while it
    waited: nobody works for it.
    """
    with watch.stage("select"):
        selection = await to_thread.run_sync(select)
    async with context.admission.slot() as waited:
        watch.stages["wait"] = waited * 1000
        if await request.is_disconnected():
            raise ClientDisconnect
        return await to_thread.run_sync(answer, selection)
