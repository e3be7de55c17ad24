"""Sessions of browsers: a credential is exchanged for a cookie that no script can read.

    POST /session, Authorization: Bearer ...   ->  Set-Cookie: locum_session=..., and a token against forgery

A request with the cookie that changes anything sends the token in `Locum-CSRF`. A page of another site has
neither: browsers send the cookie for this site alone, and the token is a digest of the cookie, which only
the answers of `/session` have. The database has another digest of it. Functions take a session of the
database, so that the caller chooses the transaction.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete
from sqlalchemy.orm import Session

from service.audit import trail
from service.database import ApiKey, BrowserSession, Caller, Role
from service.errors import SessionOver
from service.identity import keys

COOKIE = "locum_session"
CSRF_HEADER = "Locum-CSRF"


def begin(session: Session, caller: Caller, lifetime: timedelta) -> tuple[BrowserSession, str]:
    """Add a session of this caller; return its row and the cookie, which is not stored.

    It ends with the caller's credential, if that is earlier.
    """
    now = datetime.now(UTC)
    session.execute(delete(BrowserSession).where(BrowserSession.expires_at <= now))
    cookie = secrets.token_urlsafe(32)
    until = now + lifetime
    row = BrowserSession(
        digest=_digest("session", cookie),
        actor=caller.actor,
        roles=sorted(caller.roles),
        hospitals=None if caller.hospitals is None else sorted(caller.hospitals),
        key=caller.key,
        expires_at=until if caller.until is None else min(until, caller.until),
    )
    session.add(row)
    session.flush()
    trail.append(session, "session.begun")
    return row, cookie


def find(session: Session, cookie: str) -> Caller:
    """Return the caller of a session.

    Raises:
        SessionOver: there is no such session, it has ended, or its key is not valid any more.
    """
    row = session.get(BrowserSession, _digest("session", cookie))
    now = datetime.now(UTC)
    if row is None or row.expires_at <= now:
        raise SessionOver("the session has ended: sign in again")
    if row.key is None:
        hospitals = None if row.hospitals is None else frozenset(row.hospitals)
        roles: frozenset[Role] = frozenset(row.roles)  # type: ignore[arg-type]
        return Caller(row.actor, roles, hospitals, until=row.expires_at)
    key = session.get_one(ApiKey, row.key)
    if (why := keys.refusal(key, now)) is not None:
        raise SessionOver(why)
    # The key may have a shorter life than at the beginning: it was rotated.
    until = row.expires_at if key.expires_at is None else min(row.expires_at, key.expires_at)
    return replace(keys.caller_with(key), until=until)


def end(session: Session, cookie: str) -> None:
    """Forget a session, if there is one."""
    session.execute(delete(BrowserSession).where(BrowserSession.digest == _digest("session", cookie)))


def csrf_token(cookie: str) -> str:
    """The token against forgery of a session."""
    return _digest("csrf", cookie)


def is_csrf_token(cookie: str, found: str) -> bool:
    """Whether this is the session's token, compared in constant time."""
    return hmac.compare_digest(csrf_token(cookie).encode(), found.encode())


def _digest(purpose: str, cookie: str) -> str:
    return hashlib.sha256(f"{purpose}:{cookie}".encode()).hexdigest()
