"""Tokens of an issuer that answers over HTTP."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator

import pytest
from joserfc import jwt
from joserfc.jwk import OctKey

from service.database import Caller
from service.errors import ProviderUnavailable, TokenNotValid
from service.identity import oidc
from service.settings import Settings
from tests.helpers.service.issuer import AUDIENCE, Issuer, running_issuer


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with running_issuer() as found:
        yield found


def verifier(issuer: Issuer, **settings: str) -> oidc.Verifier:
    return oidc.Verifier(
        Settings(auth="oidc", oidc_issuer=issuer.url, oidc_audience=AUDIENCE, **settings)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("kind", ["RSA", "EC"])
def test_token_identifies_its_caller(issuer: Issuer, kind: str) -> None:
    issuer.add("k", kind)
    found = verifier(issuer).caller(issuer.token("k"))
    assert found == Caller("oidc:ada", frozenset({"operator"}), frozenset({"north"}))


def test_roles_and_hospitals_come_from_the_configured_claims(issuer: Issuer) -> None:
    token = issuer.token(realm={"roles": ["admin", "uma"]}, **{"https://x.example/at": "*"})
    claims = {"oidc_role_claim": "realm.roles", "oidc_hospital_claim": "https://x.example/at"}
    found = verifier(issuer, **claims).caller(token)
    assert (found.roles, found.hospitals) == (frozenset({"admin"}), None)


@pytest.mark.parametrize("claims", [{"locum_roles": None}, {"locum_roles": 7}, {"locum_roles": ["root"]}])
def test_token_without_a_known_role_has_none(issuer: Issuer, claims: dict[str, object]) -> None:
    found = verifier(issuer).caller(issuer.token(**claims, locum_hospitals=None))
    assert (found.roles, found.hospitals) == (frozenset(), frozenset())


NOW = int(time.time())
WRONG = {
    "expired": {"exp": NOW - 60},
    "without expiry": {"exp": None},
    "not yet valid": {"nbf": NOW + 86_400},
    "another audience": {"aud": "billing"},
    "another audience in a list": {"aud": ["billing", "mail"]},
    "no audience": {"aud": None},
    "another issuer": {"iss": "https://login.example"},
    "no subject": {"sub": None},
    "long subject": {"sub": "x" * 191},
    "subject with a line break": {"sub": "a\nb"},
}


@pytest.mark.parametrize("claims", list(WRONG.values()), ids=list(WRONG))
def test_token_with_a_wrong_claim_is_rejected(issuer: Issuer, claims: dict[str, object]) -> None:
    with pytest.raises(TokenNotValid):
        verifier(issuer).caller(issuer.token(**claims))


@pytest.mark.parametrize("claims", [{"exp": NOW - 5}, {"aud": ["mail", AUDIENCE]}])
def test_small_clock_skew_and_a_list_of_audiences_are_accepted(
    issuer: Issuer, claims: dict[str, object]
) -> None:
    if "exp" in claims:
        claims = {"exp": int(time.time()) - 5}
    assert verifier(issuer).caller(issuer.token(**claims)).actor == "oidc:ada"


def test_forged_tokens_are_rejected(issuer: Issuer) -> None:
    checked, token = verifier(issuer), issuer.token()
    header, payload, signature = token.split(".")

    def packed(content: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()

    public = json.dumps(issuer.keys["rsa-1"].as_dict(private=False)).encode()
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    symmetric = {"alg": "HS256", "kid": "rsa-1", "typ": "at+jwt"}
    forged = {
        "no signature": f"{packed({'alg': 'none', 'kid': 'rsa-1'})}.{payload}.",
        "other claims": f"{header}.{packed({**claims, 'locum_roles': ['admin']})}.{signature}",
        "symmetric": jwt.encode(symmetric, claims, OctKey.import_key(public)),
        "cut": token[:-4],
        "junk": "junk",
        "dots": "a.b.c",
        "not text": "\u00e4.\u00e4.\u00e4",
        "long": token + "A" * 20_000,
        "another type": issuer.token(header={"typ": "logout+jwt"}),
        "no key id": issuer.token(header={"kid": ""}),
    }
    for name, one in forged.items():
        with pytest.raises(TokenNotValid):
            print(name, checked.caller(one))


def test_rotated_key_is_fetched_and_a_withdrawn_one_is_rejected(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, old = verifier(issuer), issuer.token()
    assert checked.caller(old).actor == "oidc:ada"
    monkeypatch.setattr(oidc, "COOLDOWN", 0.0)
    issuer.add("rsa-2")
    assert checked.caller(issuer.token("rsa-2")).actor == "oidc:ada"
    assert checked.caller(old).actor == "oidc:ada"
    del issuer.keys["rsa-1"]
    issuer.add("ec-3", "EC")
    assert checked.caller(issuer.token("ec-3")).actor == "oidc:ada"
    with pytest.raises(TokenNotValid, match="has not"):
        checked.caller(old)


def test_tokens_with_unknown_keys_cause_one_fetch_per_cooldown(issuer: Issuer) -> None:
    checked = verifier(issuer)
    checked.caller(issuer.token())
    for number in range(50):
        with pytest.raises(TokenNotValid):
            checked.caller(issuer.token(header={"kid": f"unknown-{number}"}))
    assert issuer.fetched["/jwks"] == 1


def test_provider_that_is_down_is_503_at_first_and_no_harm_later(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "COOLDOWN", 0.0)
    issuer.status = 500
    checked, token = verifier(issuer), issuer.token()
    with pytest.raises(ProviderUnavailable):
        checked.caller(token)
    issuer.status = 200
    assert checked.caller(token).actor == "oidc:ada"
    issuer.status = 500
    monkeypatch.setattr(oidc, "_REFRESH_SECONDS", 0.0)
    assert checked.caller(token).actor == "oidc:ada"
    monkeypatch.setattr(oidc, "_STALE_SECONDS", 0.0)
    with pytest.raises(ProviderUnavailable):
        checked.caller(token)


def test_description_of_another_issuer_is_rejected(issuer: Issuer) -> None:
    issuer.claimed = "https://login.example"
    with pytest.raises(ProviderUnavailable):
        verifier(issuer).caller(issuer.token())
    assert issuer.fetched["/jwks"] == 0
