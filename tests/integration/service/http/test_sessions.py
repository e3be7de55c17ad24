"""Browsers that sign in: the cookie, the token against forgery, and what ends a session."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from service.database import BrowserSession, Hospital
from service.identity import keys, sessions
from tests.helpers.service.asking import problem


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = start(tmp_path_factory.mktemp("store"), auth="keys")
    now = datetime.now(UTC)
    with found.context.database.write() as session:
        for name in ("north", "south"):
            session.add(Hospital(id=name, name=name, site=None, created_at=now, updated_at=now))
    return found


def key(api: Any, name: str, role: str = "operator", hospital: str | None = "north") -> tuple[str, str]:
    """The id of a new key, and the key."""
    with api.context.database.write() as session:
        row, secret = keys.create(session, name, role, hospital)  # type: ignore[arg-type]
        return row.id, secret


@pytest.fixture
def browser(api: Any) -> Any:
    """A client that keeps cookies, as a browser does."""
    with httpx.Client(base_url=api.client.base_url, timeout=60) as client:
        yield client


def sign_in(browser: httpx.Client, secret: str) -> dict[str, Any]:
    answer = browser.post("/session", headers={"Authorization": f"Bearer {secret}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_cookie_takes_the_place_of_the_key(api: Any, browser: httpx.Client) -> None:
    _, secret = key(api, "page")
    answer = browser.post("/session", headers={"Authorization": f"Bearer {secret}"})
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith("locum_session=")
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    signed_in = answer.json()
    assert (signed_in["actor"], signed_in["roles"], signed_in["hospitals"]) == (
        "key:page@north",
        ["operator"],
        ["north"],
    )
    found = browser.get("/session").json()
    assert (found["actor"], found["csrf"]) == ("key:page@north", signed_in["csrf"])
    assert browser.get("/hospitals").json()["hospitals"][0]["id"] == "north"
    assert browser.get("/hospitals/south").status_code == 404
    assert browser.get("/keys").status_code == 403


def test_change_by_cookie_needs_the_token_against_forgery(api: Any, browser: httpx.Client) -> None:
    csrf = sign_in(browser, key(api, "drawing")[1])["csrf"]
    with httpx.Client(base_url=api.client.base_url, timeout=60) as second:
        other = sign_in(second, key(api, "another")[1])["csrf"]
    for found in ({}, {"Locum-CSRF": other}, {"Locum-CSRF": "é"}):
        sent = {name: value.encode() for name, value in found.items()}
        answer = browser.post("/hospitals/north/cohorts", headers=sent)
        assert problem(answer) == (403, "csrf-token-missing")
    assert browser.post("/hospitals/north/cohorts", headers={"Locum-CSRF": csrf}).status_code == 201
    # A program with its key needs none.
    _, secret = key(api, "program")
    made = api.client.post("/hospitals/north/cohorts", headers={"Authorization": f"Bearer {secret}"})
    assert made.status_code == 201


def test_session_ends_by_signing_out(api: Any, browser: httpx.Client) -> None:
    csrf = sign_in(browser, key(api, "leaving")[1])["csrf"]
    cookie = browser.cookies[sessions.COOKIE]
    assert browser.delete("/session", headers={"Locum-CSRF": csrf}).status_code == 204
    assert sessions.COOKIE not in browser.cookies
    kept = {"Cookie": f"{sessions.COOKIE}={cookie}"}
    assert problem(api.client.get("/hospitals", headers=kept)) == (401, "session-over")


def test_session_ends_with_its_key(api: Any, browser: httpx.Client) -> None:
    key_id, secret = key(api, "revoked")
    sign_in(browser, secret)
    with api.context.database.write() as session:
        keys.revoke(session, key_id)
    api.context.authenticator.forget()
    assert problem(browser.get("/hospitals")) == (401, "session-over")


def test_session_ends_with_its_time(api: Any, browser: httpx.Client) -> None:
    sign_in(browser, key(api, "late")[1])
    with api.context.database.write() as session:
        session.execute(
            text("UPDATE browser_session SET expires_at = :at"), {"at": "2020-01-01 00:00:00.000000"}
        )
    api.context.authenticator.forget()
    assert problem(browser.get("/hospitals")) == (401, "session-over")


def test_session_lasts_no_longer_than_its_credential(api: Any, browser: httpx.Client) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    with api.context.database.write() as session:
        _, secret = keys.create(session, "short", "reader", None, until)
    assert datetime.fromisoformat(sign_in(browser, secret)["expires_at"]) == until


def test_session_view_has_the_end_of_the_session_or_of_its_rotated_key(
    api: Any, browser: httpx.Client
) -> None:
    until = datetime.now(UTC) + timedelta(days=7)
    with api.context.database.write() as session:
        row, secret = keys.create(session, "weekly", "reader", None, until)
        key_id = row.id
    ends = sign_in(browser, secret)["expires_at"]
    assert datetime.fromisoformat(ends) < until
    assert browser.get("/session").json()["expires_at"] == ends
    with api.context.database.write() as session:
        keys.rotate(session, key_id, timedelta(hours=1))
        shortened = keys.get(session, key_id).expires_at
    api.context.authenticator.forget()
    assert datetime.fromisoformat(browser.get("/session").json()["expires_at"]) == shortened


def test_database_has_no_cookie(api: Any, browser: httpx.Client) -> None:
    csrf = sign_in(browser, key(api, "secret")[1])["csrf"]
    content = b"".join(path.read_bytes() for path in api.settings.state_dir.glob("locum.db*"))
    for found in (browser.cookies[sessions.COOKIE], csrf):
        assert found.encode() not in content
    with api.context.database.read() as session:
        assert session.query(BrowserSession).count() >= 1


def test_forged_cookie_is_rejected(api: Any) -> None:
    answer = api.client.get("/hospitals", headers={"Cookie": f"{sessions.COOKIE}=forged"})
    assert problem(answer) == (401, "session-over")


def test_without_authentication_there_is_no_session(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    open_api = start(tmp_path_factory.mktemp("store"))
    answer = open_api.client.post("/session")
    assert answer.json()["authenticated"] is False
    assert answer.json()["csrf"] is None
    assert "set-cookie" not in answer.headers
