"""Middleware that authenticates every request before its body is read.

Only the paths of `OPEN` need no credential. An unknown path needs one too, so that a client without a
credential learns nothing of the others.
"""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address

from fastapi import Request
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Receive, Scope, Send

from service.context import ServiceContext
from service.database import DATABASE_ERRORS, PUBLIC, Caller
from service.errors import CsrfTokenMissing, NotOnLoopback, ServiceError
from service.http import problems
from service.http.semantics import path_below_prefix
from service.identity import sessions
from service.validation import is_loopback

READY = "/health/ready"
"""Open, with details for an admin."""

OPEN = frozenset(
    {
        *("/", "/health/live", READY, "/docs", "/docs/oauth2-redirect", "/openapi.json"),
        "/monailabel/auth/",
    }
)
"""The page, which signs in; liveness, readiness, and the description of the API, which is the same
everywhere; and the 404 by which a viewer learns that it does not sign in."""

# The scripts and styles of the page and of /docs.
_OPEN_FOLDERS = ("/page/", "/static-offline-docs/")


class AuthenticationMiddleware:
    """ASGI middleware: sets `request.state.caller`, or answers with a problem."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate the request and pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        # The cookie, where it is what authenticates.
        request.state.session = None
        try:
            path = path_below_prefix(scope)
            if path == READY:
                request.state.caller = await _caller_or_public(request)
            else:
                request.state.caller = PUBLIC if _is_open(path) else await _caller(request)
        except ServiceError as error:
            await problems.respond(request, error)(scope, receive, send)
        except DATABASE_ERRORS as error:
            await problems.respond(request, problems.from_database_error(error))(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN or path.startswith(_OPEN_FOLDERS)


async def _caller_or_public(request: Request) -> Caller:
    """The caller of readiness: one that is not known, or cannot be now, gets less of the answer."""
    try:
        return await _caller(request)
    except (ServiceError, SQLAlchemyError):
        return PUBLIC


async def _caller(request: Request) -> Caller:
    context: ServiceContext = request.app.state.locum
    # The socket's own address. A server that was started with another --host than the settings know, as
    # uvicorn's command line does, must not answer other machines either.
    address = (request.scope.get("server") or ("localhost", None))[0]
    if context.authenticator.mode == "none" and _is_address(address) and not is_loopback(address):
        raise NotOnLoopback(
            "This service authenticates no caller (LOCUM_AUTH=none) and answers its own machine only: set "
            "LOCUM_AUTH=keys, and create the first key: python -m service keys create first --role admin"
        )
    authorization, cookie = request.headers.get("authorization"), request.cookies.get(sessions.COOKIE)
    if authorization is not None or cookie is None or context.authenticator.mode == "none":
        found = await context.authenticator.authenticate(authorization)
    else:
        found = await context.authenticator.authenticate_session(cookie)
        token = request.headers.get(sessions.CSRF_HEADER, "")
        if request.method not in ("GET", "HEAD", "OPTIONS") and not sessions.is_csrf_token(cookie, token):
            raise CsrfTokenMissing(
                f"a request by cookie that changes something sends the `csrf` of GET /session in "
                f"{sessions.CSRF_HEADER}"
            )
        request.state.session = cookie
    if context.rates is not None:
        await context.rates.count(found.actor)
    return found


def _is_address(server: str) -> bool:
    """Not the path of a Unix socket, which only this machine can open."""
    with suppress(ValueError):
        return bool(ip_address(server))
    return False
