"""Addresses of the configuration, and their signatures against the library that verifies them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

from service.webhooks import read_webhooks

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def read(url: object = "https://a.example/x", secret: object = SECRET, **more: object) -> Any:
    return read_webhooks(json.dumps([{"url": url, "secret": secret, **more}]))


def test_headers_are_verified_by_the_library_and_not_for_another_body() -> None:
    (hook,) = read()
    headers = dict(hook.headers("msg_1", '{"a": 1}', datetime.now(UTC)))
    assert Verifier(SECRET).verify('{"a": 1}', headers) == {"a": 1}
    for changed in (
        {"webhook-id": "msg_2"},
        {"webhook-timestamp": str(int(headers["webhook-timestamp"]) + 1)},
    ):
        with pytest.raises(WebhookVerificationError):
            Verifier(SECRET).verify('{"a": 1}', headers | changed)
    with pytest.raises(WebhookVerificationError):
        Verifier(SECRET).verify('{"a": 2}', headers)


def test_signature_is_that_of_the_standard_s_example() -> None:
    """standardwebhooks.com, section "Signature": of the test vector of the specification's libraries."""
    (hook,) = read()
    at = datetime.fromtimestamp(1614265330, UTC)
    headers = hook.headers("msg_p5jXN8AQM9LWM0D4loKWxJek", '{"test": 2432232314}', at)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert headers["webhook-timestamp"] == "1614265330"


@pytest.mark.parametrize(
    "url",
    [
        *("https://a.example", "https://10.0.0.1:8443/hooks?team=a", "http://127.0.0.1:9000/x"),
        *("http://localhost/x", "http://[::1]/x", "http://10.2.3.4/x", "http://192.168.0.9/x"),
    ],
)
def test_address_is_taken(url: str) -> None:
    (hook,) = read(url)
    assert hook.url == url
    assert hook.url not in repr(hook)


@pytest.mark.parametrize(
    "url",
    [
        *("http://a.example/x", "http://8.8.8.8/x", "http://2130706433.example", "ftp://10.0.0.1", "//a", ""),
        *("https://", "https://user:word@a.example", "https://a.example/#x", "https://a.example/ x"),
        *("https://a.example:port/", "https://[::1/", "file:///etc/passwd", "https://ä.example", 7, None),
    ],
)
def test_address_is_refused_without_being_repeated(url: object) -> None:
    with pytest.raises(ValueError, match=r"^webhook 1: expected ") as refused:
        read(url)
    assert not url or str(url) not in str(refused.value).replace("https://,", "")


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "whsec_c2hvcnQ=",
        "whsec_" + "A" * 88,
        "whsec_ä" * 30,
        1,
    ],
)
def test_secret_is_refused(secret: object) -> None:
    with pytest.raises(ValueError, match=r"^webhook 1: expected "):
        read(secret=secret)


def test_lists_of_another_form_are_refused() -> None:
    for text in ("", "no json", "{}", "[[]]", '["https://a.example"]', "[" * 100_000):
        with pytest.raises(ValueError, match="expected "):
            read_webhooks(text)
    with pytest.raises(ValueError, match="and no more"):
        read(header="x")
    hook = {"url": "https://a.example", "secret": SECRET}
    with pytest.raises(ValueError, match="found one twice"):
        read_webhooks(json.dumps([hook, hook]))
    assert read_webhooks("[]") == ()
