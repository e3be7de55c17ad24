"""Dependencies of routes: the caller, the parts of the service as the caller may see them, a known query.

    caller ──> InContext ──> every route

A route gets at the store and the database through `InContext` alone, and these are the caller's. API keys are
added in `caller`; no route changes.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant

from service.context import ServiceContext
from service.database import ANONYMOUS, Caller
from service.errors import RequestInvalid
from service.validation import MOST_ENTRIES, place

# Coroutines without an await: FastAPI runs a plain function in a thread, and health must not need one.


async def caller(request: Request) -> Caller:  # noqa: ARG001 - a key will be one of its headers
    """Who sent the request: anonymous, with every role and all hospitals."""
    return ANONYMOUS


async def context_of(request: Request, caller: Annotated[Caller, Depends(caller)]) -> ServiceContext:
    """The parts of the app that received this request, as its caller may see them."""
    context: ServiceContext = request.app.state.locum
    return context.for_caller(caller)


InContext = Annotated[ServiceContext, Depends(context_of)]
"""A route parameter: `def route(context: InContext) -> ...`."""


async def known_parameters(request: Request) -> None:
    """Reject a misspelt parameter of the query, which the framework would ignore. Not for the health routes.

    `?hopsital=north` would list every hospital's jobs, and `?At=2026-03-01T00:00:00Z` say what serves now.

    Raises:
        RequestInvalid: the query has a parameter that the route does not take.
    """
    known = sorted(_taken(request.scope["route"].dependant))
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if not unknown:
        return
    there = f"there are: {', '.join(known)}" if known else "this path takes none"
    raise RequestInvalid(
        [
            {"field": place(("query", name)), "reason": f"not a parameter; {there}"}
            for name in unknown[:MOST_ENTRIES]
        ]
    )


def _taken(dependant: Dependant) -> set[str]:
    own = {field.alias for field in dependant.query_params}
    return own.union(*(_taken(below) for below in dependant.dependencies))
