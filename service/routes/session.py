"""`/session`: sign a browser in and out."""

from __future__ import annotations

from datetime import datetime, timedelta

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from service.context import ServiceContext
from service.database import Caller
from service.http.dependencies import InCatalogue
from service.http.problems import problem_responses
from service.identity import sessions
from service.validation import is_loopback

router = APIRouter(tags=["session"])


class SessionView(BaseModel):
    """Who the caller is, and what it may do."""

    actor: str
    authenticated: bool = Field(description="false where LOCUM_AUTH is none: every client has every role.")
    roles: list[str]
    hospitals: list[str] | None = Field(description="The hospitals that it sees; null for all.")
    expires_at: datetime | None = Field(None, description="When its session ends; null without one.")
    csrf: str | None = Field(
        None,
        description="A request that changes anything sends it in `Locum-CSRF`; null without a session.",
    )


@router.get("/session", responses=problem_responses(422))
def get_session(context: InCatalogue, request: Request) -> SessionView:
    """Return who the caller is."""
    return _view(context.database.caller, _cookie(request))


@router.post("/session", responses=problem_responses(422))
def begin_session(context: InCatalogue, request: Request, response: Response) -> SessionView:
    """Exchange the bearer token of this request for a session: a cookie, and the token for `Locum-CSRF`.

    Without authentication there is nothing to exchange, and no cookie is set.
    """
    caller = context.database.caller
    if not caller.authenticated or _cookie(request) is not None:
        return _view(caller, _cookie(request))
    lifetime = timedelta(hours=context.settings.session_hours)
    with context.database.write() as session:
        row, cookie = sessions.begin(session, caller, lifetime)
        expires_at = row.expires_at
    response.set_cookie(
        sessions.COOKIE,
        cookie,
        expires=expires_at,
        httponly=True,
        samesite="strict",
        path=_path(request),
        # Not over plain HTTP, other than to this machine.
        secure=request.url.scheme == "https" or not is_loopback(request.url.hostname or ""),
    )
    return _view(caller, cookie, expires_at)


@router.delete("/session", status_code=204, responses=problem_responses(422))
def end_session(context: InCatalogue, request: Request, response: Response) -> None:
    """End the session of this request's cookie."""
    if (cookie := _cookie(request)) is not None:
        _end(context, cookie)
        response.delete_cookie(sessions.COOKIE, httponly=True, samesite="strict", path=_path(request))


def _end(context: ServiceContext, cookie: str) -> None:
    with context.database.write() as session:
        sessions.end(session, cookie)
    context.authenticator.forget()


def _path(request: Request) -> str:
    """Other services at the same host, beside a prefix, do not receive the cookie."""
    return request.scope.get("root_path") or "/"


def _cookie(request: Request) -> str | None:
    """The cookie that authenticated this request; None where a bearer token did, or nothing."""
    found: str | None = request.state.session
    return found


def _view(caller: Caller, cookie: str | None, expires_at: datetime | None = None) -> SessionView:
    return SessionView(
        actor=caller.actor,
        authenticated=caller.authenticated,
        roles=sorted(caller.roles),
        hospitals=None if caller.hospitals is None else sorted(caller.hospitals),
        expires_at=expires_at or (caller.until if cookie is not None else None),
        csrf=None if cookie is None else sessions.csrf_token(cookie),
    )
