"""What a running API holds: built once in the lifespan, found by every route at `request.app.state.locum`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from service.settings import Settings

if TYPE_CHECKING:
    from anyio import CapacityLimiter

    from model_store.store import Store
    from service.database import Database
    from service.inference.admission import Admission
    from service.inference.sessions import SessionCache
    from service.runtime.metrics import Metrics
    from service.runtime.queue import Queue
    from service.runtime.readiness import Readiness


@dataclass(frozen=True)
class ServiceContext:
    """The parts of one API process.

    `sessions` and `admission` bound what inference may cost, `decoding` how many scans to be kept are read at
    once; `readiness` is refreshed in the background, so that asking for health waits for nobody;
    `queue` is where long work goes.
    """

    settings: Settings
    store: Store
    database: Database
    sessions: SessionCache
    admission: Admission
    metrics: Metrics
    readiness: Readiness
    queue: Queue
    decoding: CapacityLimiter


async def context_of(request: Request) -> ServiceContext:
    """The context of the app that received this request.

    A coroutine, though it waits for nothing: a plain function would be run in a thread, and health must not
    need one.
    """
    context: ServiceContext = request.app.state.locum
    return context


InContext = Annotated[ServiceContext, Depends(context_of)]
"""A route parameter: `def route(context: InContext) -> ...`."""
