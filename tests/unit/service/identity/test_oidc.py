"""Tokens of an issuer that answers over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from joserfc import jwt
from joserfc.jwk import OctKey

from service.database import Caller, Database
from service.errors import ProviderUnavailable, TokenNotValid
from service.identity import oidc
from service.identity.authentication import Authenticator
from service.settings import Settings
from tests.helpers.service.issuer import AUDIENCE, Issuer, running_issuer


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with running_issuer() as found:
        yield found


def settings_of(issuer: Issuer, **settings: str) -> Settings:
    return Settings(auth="oidc", oidc_issuer=issuer.url, oidc_audience=AUDIENCE, **settings)  # type: ignore[arg-type]


def verifier(issuer: Issuer, **settings: str) -> oidc.Verifier:
    return oidc.Verifier(settings_of(issuer, **settings))


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


@pytest.mark.parametrize(
    "exp",
    [10**12, 10**30, -(10**30), 1e300, float("inf"), float("nan"), True, "soon", [1], {}, 2**63],
    ids=lambda exp: str(exp)[:12],
)
def test_odd_expiry_is_an_ordinary_rejection(issuer: Issuer, exp: object) -> None:
    """A token of the provider itself, which an error of the service must not become."""
    with pytest.raises(TokenNotValid):
        verifier(issuer).caller(issuer.token(exp=exp))


@pytest.mark.parametrize("claim", ["nbf", "iat"])
def test_other_odd_instants_are_rejected_or_ignored(issuer: Issuer, claim: str) -> None:
    for value in (10**30, -(10**30), float("inf"), "soon"):
        with suppress(TokenNotValid):
            verifier(issuer).caller(issuer.token(**{claim: value}))


def test_token_with_a_deep_header_is_rejected(issuer: Issuer) -> None:
    deep = b'{"alg":"RS256","kid":"rsa-1","x":' + b"[" * 5000 + b"]" * 5000 + b"}"
    header = base64.urlsafe_b64encode(deep).rstrip(b"=").decode()
    with pytest.raises(TokenNotValid):
        verifier(issuer).caller(".".join([header, *issuer.token().split(".")[1:]]))


BAD_KEYS: dict[str, object] = {
    "toy": {"kty": "RSA", "kid": "bad", "use": "sig", "n": "wSNFZ4mrze8", "e": "AQAB"},
    "short": {"kty": "RSA", "kid": "bad", "n": "w" + "A" * 170, "e": "AQAB"},
    "symmetric": {"kty": "oct", "kid": "bad", "k": "c2VjcmV0"},
    "symmetric as RSA": {"kty": "RSA", "kid": "bad", "k": "c2VjcmV0"},
    "number": {"kty": "RSA", "kid": "bad", "n": 5, "e": "AQAB"},
    "unknown curve": {"kty": "EC", "kid": "bad", "crv": "P-999", "x": "AA", "y": "AA"},
    "point off its curve": {"kty": "EC", "kid": "bad", "crv": "P-256", "x": "AA", "y": "AA"},
    "no object": "key",
    "null": None,
    "id of another type": {"kty": "RSA", "kid": ["bad"], "n": "w" + "A" * 350, "e": "AQAB"},
}


@pytest.mark.parametrize("bad", list(BAD_KEYS.values()), ids=list(BAD_KEYS))
def test_bad_key_of_the_provider_spoils_no_good_one(issuer: Issuer, bad: object) -> None:
    issuer.more_keys.append(bad)
    issuer.add("ec", "EC")
    checked = verifier(issuer)
    assert checked.caller(issuer.token()).actor == "oidc:ada"
    assert checked.caller(issuer.token("ec")).actor == "oidc:ada"
    with pytest.raises(TokenNotValid, match="has not"):
        checked.caller(issuer.token(header={"kid": "bad"}))


def test_provider_with_bad_keys_alone_is_503(issuer: Issuer) -> None:
    token = issuer.token()
    issuer.keys.clear()
    issuer.more_keys += BAD_KEYS.values()
    with pytest.raises(ProviderUnavailable):
        verifier(issuer).caller(token)


def test_unknown_keys_hold_up_no_valid_token_while_the_provider_hangs(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "COOLDOWN", 0.0)
    monkeypatch.setattr(oidc, "_TIMEOUT_SECONDS", 120.0)
    database = Database(f"sqlite:///{tmp_path / 'none.db'}")

    async def scenario() -> None:
        authenticator = Authenticator(settings_of(issuer), database)
        await authenticator.authenticate(f"Bearer {issuer.token()}")
        issuer.answering.clear()
        unknown = [
            asyncio.create_task(authenticator.authenticate(f"Bearer {issuer.token(header={'kid': f'{n}'})}"))
            for n in range(20)
        ]
        # All but the one that waits for the provider are rejected.
        async with asyncio.timeout(60):
            while sum(task.done() for task in unknown) < 19:
                await asyncio.sleep(0.01)
        # A token that was not seen before, and then one while the keys are due to be fetched again.
        assert (await authenticator.authenticate(f"Bearer {issuer.token(sub='eve')}")).actor == "oidc:eve"
        monkeypatch.setattr(oidc, "_REFRESH_SECONDS", 0.0)
        assert (await authenticator.authenticate(f"Bearer {issuer.token(sub='mia')}")).actor == "oidc:mia"
        assert not issuer.answering.is_set()
        issuer.answering.set()
        outcomes = await asyncio.gather(*unknown, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {TokenNotValid, ProviderUnavailable}

    asyncio.run(scenario())
    database.dispose()


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
