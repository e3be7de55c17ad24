"""Authenticate a request by its `Authorization` header, as `LOCUM_AUTH` says.

none         every client is anonymous, with every role; on loopback only
keys, both   `Bearer locum_...` is an API key
oidc, both   any other bearer token is a JWT of the identity provider
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread
from sqlalchemy.exc import SQLAlchemyError

from service.database import ANONYMOUS, ApiKey, Caller, Database
from service.errors import CredentialMissing
from service.identity import keys, sessions
from service.settings import Settings

if TYPE_CHECKING:
    from service.identity.oidc import Verifier

_log = logging.getLogger("locum.service")
_THREADS = 4
_MOST_REMEMBERED = 1024

REMEMBERED_SECONDS = 1.0
"""How long another process may go on accepting a credential that was revoked."""


class Authenticator:
    """Who sent a request. Safe to share between requests; opened in the event loop."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.mode = settings.auth
        self._database = database
        # Not the threads that requests wait for: a busy service rejects a wrong key at once.
        self._threads = CapacityLimiter(_THREADS)
        # Others, since these may wait for the provider.
        self._verifying = CapacityLimiter(_THREADS)
        self._verifier = _verifier(settings) if settings.auth in ("oidc", "both") else None
        self._seen: dict[bytes, tuple[float, Caller]] = {}

    async def authenticate_session(self, cookie: str) -> Caller:
        """Return the caller of a browser's session. Raises SessionOver."""
        return await self._remembered(self._session, cookie, self._threads)

    def forget(self) -> None:
        """Look up every credential again: one was revoked here."""
        self._seen.clear()

    async def _remembered(
        self, look_up: Callable[[str], Caller], credential: str, threads: CapacityLimiter
    ) -> Caller:
        """The caller of a credential, looked up in a thread at most once in `REMEMBERED_SECONDS`."""
        digest = hashlib.sha256(credential.encode()).digest()
        now = time.monotonic()
        until, caller = self._seen.get(digest, (0.0, ANONYMOUS))
        if now < until and (caller.until is None or caller.until > datetime.now(UTC)):
            return caller
        caller = await to_thread.run_sync(look_up, credential, limiter=threads)
        if len(self._seen) >= _MOST_REMEMBERED:
            self._seen.clear()
        self._seen[digest] = now + REMEMBERED_SECONDS, caller
        return caller

    def _session(self, cookie: str) -> Caller:
        with self._database.read() as session:
            return sessions.find(session, cookie)

    async def authenticate(self, authorization: str | None) -> Caller:
        """Return the caller of the request with this header.

        Raises:
            CredentialMissing: there is no bearer token of a kind that is taken here.
            KeyNotValid: the API key is unknown, expired or revoked.
            TokenNotValid: the access token does not verify.
            ProviderUnavailable: the keys to verify it with cannot be fetched.
        """
        if self.mode == "none":
            return ANONYMOUS
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise CredentialMissing(f"send the header `Authorization: Bearer ...` with {self._taken()}")
        if token.startswith(keys.PREFIX) and self.mode in ("keys", "both"):
            return await self._remembered(self._key, token, self._threads)
        if self._verifier is not None and not token.startswith(keys.PREFIX):
            return await self._remembered(self._verifier.caller, token, self._verifying)
        raise CredentialMissing(f"the bearer token is not {self._taken()}")

    def _taken(self) -> str:
        taken = {"keys": "an API key", "oidc": "an access token of the identity provider"}
        return " or ".join(taken.values()) if self.mode == "both" else taken[self.mode]

    def _key(self, token: str) -> Caller:
        with self._database.read() as session:
            row = keys.find(session, token)
        now = datetime.now(UTC)
        if row.last_used_at is None or now - row.last_used_at >= keys.USE_NOTED_EVERY:
            self._note_use(row.id, now)
        return keys.caller_with(row)

    def _note_use(self, key_id: str, now: datetime) -> None:
        try:
            with self._database.write() as session:
                if (row := session.get(ApiKey, key_id)) is not None:
                    row.last_used_at = now
        except SQLAlchemyError as error:
            # A request is not rejected because its key's last use cannot be written.
            _log.warning("the use of key %s was not noted: %s", key_id, type(error).__name__)


def _verifier(settings: Settings) -> Verifier:
    # Its client and its cryptography are imported only where there is a provider.
    from service.identity.oidc import Verifier

    return Verifier(settings)
