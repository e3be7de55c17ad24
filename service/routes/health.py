"""`/health` and `/metrics`: liveness and readiness for a supervisor, metrics for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict, Field

from service.context import ServiceContext
from service.http.dependencies import AsPublic, AsReader, caller

router = APIRouter(tags=["health"])


_IN_SHORT = {True: "works", False: "does not work: the service's log says why"}


class Live(BaseModel):
    """The process runs and its event loop turns."""

    status: Literal["live"] = "live"


class PartView(BaseModel):
    """The state of one dependency of the service."""

    model_config = ConfigDict(from_attributes=True)

    ok: bool
    required: bool = Field(description="Whether the service is not ready without it.")
    detail: str = Field(
        description="The finding in words for an admin of every hospital; others get whether it works."
    )


class Ready(BaseModel):
    """Whether the service is ready for requests. `degraded`: ready, but jobs wait, since no worker runs, or
    scans are answered on the CPU beside a GPU that cannot be used."""

    status: Literal["ready", "degraded", "not-ready"]
    parts: dict[str, PartView]


# Both are coroutines on purpose: a plain function would wait for a thread, of which a busy service has none
# to spare.


@router.get("/health/live", dependencies=[Depends(caller)])
async def live() -> Live:
    """Answer while the process is alive; restart it when this fails."""
    return Live()


@router.get("/health/ready", responses={503: {"model": Ready, "description": "A part is not ready."}})
async def ready(context: AsPublic, response: Response) -> Ready:
    """Report whether the store is readable, the database migrated, Redis reachable and a worker running, as
    of a few seconds ago.

    Without a worker the service still answers scans: it is `degraded`, and the status is 200. So it is on a
    machine with a GPU that cannot be used, unless LOCUM_DEVICE demands it.
    """
    states, client = context.readiness.states, context.database.caller
    if not (client.has("admin") and client.hospitals is None):
        # A finding has addresses and folders of the installation.
        states = {name: replace(state, detail=_IN_SHORT[state.ok]) for name, state in states.items()}
    is_ready = all(state.ok or not state.required for state in states.values())
    whole = all(state.ok for state in states.values())
    response.status_code = 200 if is_ready else 503
    return Ready(
        status="ready" if whole else "degraded" if is_ready else "not-ready",
        parts={name: PartView.model_validate(state) for name, state in states.items()},
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus's text format"}},
)
async def metrics(context: AsReader) -> Response:
    """Return metrics of requests, inference, session cache, store verification and key usage's drift."""
    # In a thread, since some are read from the database, and not in one of those that requests wait for.
    body, content_type = await asyncio.to_thread(_exposition, context)
    return Response(body, headers={"Content-Type": content_type})


def _exposition(context: ServiceContext) -> tuple[bytes, str]:
    caller = context.database.caller
    if caller.hospitals is None:
        return context.metrics.exposition()

    def shown(labels: Mapping[str, str]) -> bool:
        # What is counted over all hospitals would tell each of the others' work: their own, and what has no
        # label but the part of the service, remain.
        return caller.sees(labels["hospital"]) if "hospital" in labels else labels.keys() <= {"part"}

    return context.metrics.exposition(shown)
