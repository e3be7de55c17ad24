"""Dependencies of routes: the caller, the parts of the service as the caller may see them, a known query.

    caller ──> AsReader, AsOperator, AsApprover, AsAdmin, InCatalogue, InReports ──> every route
          └──> AsPublic ──> what needs no credential

A route gets at the store and the database through one of these alone, and they are the caller's. The role is
part of the parameter's type, so that no route is without one. The API's description lists it under
`security`.
"""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import Depends, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.security import HTTPBearer, SecurityScopes

from service.context import ServiceContext
from service.database import Caller, Role
from service.errors import RequestInvalid, RoleMissing
from service.http.problems import Problem
from service.http.uploads.body_limit import MAX_BODY_BYTES
from service.http.uploads.receive import declared_length
from service.runtime.reserve import keep_reserve, make_room
from service.settings import Settings
from service.validation import MOST_ENTRIES, place

# Coroutines without an await: FastAPI runs a plain function in a thread, and health must not need one.


# Describes the credential in openapi.yaml; `AuthenticationMiddleware` reads it.
_BEARER = HTTPBearer(
    scheme_name="bearer",
    description="An API key or an access token of the identity provider. The list of each route names the "
    "roles that it takes; one of them is enough. See docs/reference/roles.md.",
    auto_error=False,
)


async def caller(request: Request) -> Caller:
    """Who sent the request, as `AuthenticationMiddleware` found."""
    found: Caller = request.state.caller
    return found


async def public_context(request: Request, caller: Annotated[Caller, Depends(caller)]) -> ServiceContext:
    """The parts of the app that received this request, as its caller may see them."""
    context: ServiceContext = request.app.state.locum
    return context.for_caller(caller)


async def context_of(
    required: SecurityScopes,
    context: Annotated[ServiceContext, Depends(public_context)],
    caller: Annotated[Caller, Depends(caller)],
    _: Annotated[object, Security(_BEARER)],
) -> ServiceContext:
    """The same, for a caller with one of the required roles.

    Raises:
        RoleMissing: it has none of them.
    """
    roles: list[Role] = required.scopes  # type: ignore[assignment]
    if not any(caller.has(role) for role in roles):
        held = " and ".join(sorted(caller.roles)) or "no role"
        raise RoleMissing(
            f"this needs the role {' or '.join(roles)}; {caller.actor} has {held}: ask an admin for a key "
            "with that role"
        )
    return context


AsPublic = Annotated[ServiceContext, Depends(public_context)]
"""A route parameter: `def route(context: AsPublic) -> ...`. No credential is needed."""

AsReader = Annotated[ServiceContext, Security(context_of, scopes=["reader"])]
AsOperator = Annotated[ServiceContext, Security(context_of, scopes=["operator"])]
AsApprover = Annotated[ServiceContext, Security(context_of, scopes=["approver"])]
AsAdmin = Annotated[ServiceContext, Security(context_of, scopes=["admin"])]
InCatalogue = Annotated[ServiceContext, Security(context_of, scopes=["reader", "federation"])]
InReports = Annotated[ServiceContext, Security(context_of, scopes=["operator", "federation"])]


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


async def room_on_disk(request: Request) -> None:
    """Make room for a deletion on a full disk, and receive no file while the reserve for it is missing.

    Raises:
        Problem: 507 for a body that may be a file, while there is no room for the reserve.
    """
    settings: Settings = request.app.state.locum.settings
    if request.method == "DELETE":
        await to_thread.run_sync(make_room, settings)
    elif request.method not in ("GET", "HEAD", "OPTIONS"):
        chunked = "transfer-encoding" in request.headers
        if (chunked or (declared_length(request) or 0) > MAX_BODY_BYTES) and not await to_thread.run_sync(
            keep_reserve, settings
        ):
            raise Problem(
                507,
                "disk-full",
                "The disk is full",
                "The reserve for deletions is in use: delete cohorts that are not needed, or free space in "
                "the state folder, then send the scan again.",
            )


def _taken(dependant: Dependant) -> set[str]:
    own = {field.alias for field in dependant.query_params}
    return own.union(*(_taken(below) for below in dependant.dependencies))


def actor_of(caller: Caller, named: str | None) -> str:
    """Return who decides: the caller where callers are authenticated, else the name in the request.

    Raises RequestInvalid where the request names another than the caller, or where neither is known.
    """
    reason = None
    if caller.authenticated and named not in (None, caller.actor):
        reason = f"the log has the caller, {caller.actor}: leave the actor out"
    elif not caller.authenticated and named is None:
        reason = "required, because this service authenticates no caller (LOCUM_AUTH=none)"
    if reason is not None:
        raise RequestInvalid([{"field": "body.actor", "reason": reason}])
    return caller.actor if caller.authenticated else str(named)
