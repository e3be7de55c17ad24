"""Verify bearer tokens of an OpenID provider: JWTs, signed with RS256 or ES256.

    issuer ──/.well-known/openid-configuration──> jwks_uri ──> keys, cached

The keys are fetched at the first token, again every hour, and for a token with an unknown key, at most once
in `COOLDOWN` seconds. While the provider is down, tokens with known keys are valid for another day. Nothing
that a token says makes one with a known key wait: the hourly fetch has a thread of its own, and of the tokens
with unknown keys one at a time waits for a fetch.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, get_args

import httpx
from joserfc import jwt
from joserfc.errors import ExpiredTokenError, InvalidClaimError, JoseError, MissingClaimError, SecurityWarning
from joserfc.jwk import ECKey, GuestProtocol, JWKRegistry, Key, RSAKey

from service.database import Caller, Role
from service.errors import ProviderUnavailable, TokenNotValid
from service.settings import Settings

ALGORITHMS = ("RS256", "ES256")
COOLDOWN = 10.0
_REFRESH_SECONDS = 3600.0
_STALE_SECONDS = 24 * 3600.0
_TIMEOUT_SECONDS = 5.0
_MOST_BYTES = 1024 * 1024
_LEAST_RSA_BITS = 2048
_LONGEST_SUBJECT = 190
_LONGEST_TOKEN = 16 * 1024
_TYPES = ("at+jwt", "application/at+jwt", "jwt")
EVERY_HOSPITAL = "*"

_log = logging.getLogger("locum.service")


class Verifier:
    """Tokens of one issuer for one audience. Safe to share between threads."""

    def __init__(self, settings: Settings) -> None:
        assert settings.oidc_issuer is not None
        assert settings.oidc_audience is not None
        self._roles = settings.oidc_role_claim
        self._hospitals = settings.oidc_hospital_claim
        self._keys = _Keys(settings.oidc_issuer)
        self._claims = jwt.JWTClaimsRegistry(
            leeway=settings.oidc_leeway_seconds,
            iss={"essential": True, "value": settings.oidc_issuer},
            aud={"essential": True, "value": settings.oidc_audience},
            exp={"essential": True},
            sub={"essential": True},
        )

    def caller(self, token: str) -> Caller:
        """Return the caller that the token identifies. Blocks while keys are fetched.

        Raises:
            TokenNotValid: says which check failed, and repeats nothing of the token.
            ProviderUnavailable: there are no keys to verify it with.
        """
        if len(token) > _LONGEST_TOKEN:
            raise TokenNotValid(f"expected a token of at most {_LONGEST_TOKEN} characters")
        try:
            decoded = jwt.decode(token, self._key, algorithms=list(ALGORITHMS))
            self._claims.validate(decoded.claims)
        except ExpiredTokenError:
            raise TokenNotValid("the access token has expired: fetch a new one") from None
        except (InvalidClaimError, MissingClaimError) as error:
            raise TokenNotValid(
                f"the claim {error.claim!r} of the access token is missing or not the expected one"
            ) from None
        except (JoseError, ValueError, TypeError, RecursionError):
            # Not a JWT, another algorithm, or a wrong signature. The library's words may quote the token.
            raise TokenNotValid(
                f"expected a JWT of the identity provider, signed with {' or '.join(ALGORITHMS)}"
            ) from None
        if str(decoded.header.get("typ", "jwt")).lower() not in _TYPES:
            raise TokenNotValid("expected the type at+jwt or JWT")
        return self._caller(decoded.claims)

    def _key(self, guest: GuestProtocol) -> Key:
        kid = guest.headers().get("kid")
        found = self._keys.find(kid) if isinstance(kid, str) else None
        if found is None:
            raise TokenNotValid("the access token is signed with a key that the identity provider has not")
        return found

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        subject = claims["sub"]
        if not isinstance(subject, str) or not subject.isprintable() or len(subject) > _LONGEST_SUBJECT:
            raise TokenNotValid(f"expected a printable `sub` of at most {_LONGEST_SUBJECT} characters")
        known: tuple[Role, ...] = get_args(Role)
        given, hospitals = _texts(claims, self._roles), _texts(claims, self._hospitals)
        return Caller(
            f"oidc:{subject}",
            frozenset(role for role in known if role in given),
            None if EVERY_HOSPITAL in hospitals else frozenset(hospitals),
            until=_instant(claims["exp"]),
        )


class _Keys:
    """The keys of an issuer, cached."""

    def __init__(self, issuer: str) -> None:
        self._issuer = issuer
        self._lock = threading.Lock()
        self._set: dict[str, Key] = {}
        self._fetched = self._tried = float("-inf")

    def find(self, kid: str) -> Key | None:
        """Return the key of this id; None where the issuer has none.

        Raises:
            ProviderUnavailable: no keys could be fetched, now or in the last day.
        """
        if self._age() >= _STALE_SECONDS:
            self._refresh(wait=True)
            if self._age() >= _STALE_SECONDS:
                raise self._unavailable()
        elif self._named(kid) is None and not self._refresh(wait=False):
            # Another token waits for the answer already.
            raise self._unavailable()
        elif self._age() >= _REFRESH_SECONDS:
            threading.Thread(target=self._refresh, kwargs={"wait": False}, daemon=True).start()
        return self._named(kid)

    def _age(self) -> float:
        return time.monotonic() - self._fetched

    def _named(self, kid: str) -> Key | None:
        return self._set.get(kid)

    def _unavailable(self) -> ProviderUnavailable:
        return ProviderUnavailable(
            f"the keys of {self._issuer} cannot be fetched: send the request again later",
            headers={"Retry-After": str(int(COOLDOWN))},
        )

    def _refresh(self, *, wait: bool) -> bool:
        """Fetch the keys; return whether no fetch is needed or under way in another thread by now."""
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            # Another thread may have tried while this one waited.
            if time.monotonic() - self._tried >= COOLDOWN:
                self._try()
        finally:
            self._lock.release()
        return True

    def _try(self) -> None:
        try:
            self._set, self._fetched = self._fetch(), time.monotonic()
        except (httpx.HTTPError, ValueError, TypeError, KeyError, RecursionError) as error:
            _log.warning("the keys of %s cannot be fetched: %s", self._issuer, type(error).__name__)
        finally:
            self._tried = time.monotonic()

    def _fetch(self) -> dict[str, Key]:
        """Return the usable keys by id. Raises ValueError where there is none."""
        with httpx.Client(timeout=_TIMEOUT_SECONDS) as client:
            described = _json(client, f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
            if described["issuer"] != self._issuer:
                raise ValueError("another issuer")
            found = _json(client, described["jwks_uri"])
        signing = [_signing_key(each) for each in found["keys"] if isinstance(each, Mapping)]
        usable = {key.kid: key for key in signing if key is not None and key.kid is not None}
        if not usable:
            raise ValueError("no usable key")
        return usable


def _signing_key(found: Mapping[str, Any]) -> Key | None:
    """The key, if tokens may be signed with it; another one spoils no key beside it."""
    kind, kid = found.get("kty"), found.get("kid")
    if kind not in ("RSA", "EC") or found.get("use", "sig") != "sig" or not isinstance(kid, str):
        return None
    try:
        with warnings.catch_warnings():
            # Of short keys, which are not used.
            warnings.simplefilter("ignore", SecurityWarning)
            key = JWKRegistry.import_key({**found})
    except (JoseError, ValueError, TypeError, KeyError):
        key = None
    if isinstance(key, RSAKey) and key.public_key.key_size >= _LEAST_RSA_BITS:
        return key
    if isinstance(key, ECKey) and key.curve_name == "P-256":
        return key
    _log.warning(
        "a key of the identity provider is not used: it is no RSA key of 2048 bits and none of P-256"
    )
    return None


def _instant(seconds: float) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        raise TokenNotValid(
            "the claim 'exp' of the access token is no instant of the years 1 to 9999"
        ) from None


def _json(client: httpx.Client, url: str) -> Any:
    until = time.monotonic() + _TIMEOUT_SECONDS
    with client.stream("GET", url) as answer:
        answer.raise_for_status()
        content = b""
        for chunk in answer.iter_bytes():
            content += chunk
            if len(content) > _MOST_BYTES:
                raise ValueError("too large")
            if time.monotonic() > until:
                raise ValueError("too slow")
    return json.loads(content)


def _texts(claims: Mapping[str, Any], name: str) -> list[str]:
    """The texts of a claim, which is one text or a list of them; dots lead into a claim's members."""
    found: Any = claims.get(name)
    if found is None:
        found = claims
        for step in name.split("."):
            found = found.get(step) if isinstance(found, Mapping) else None
    values = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    return [value for value in values if isinstance(value, str)]
