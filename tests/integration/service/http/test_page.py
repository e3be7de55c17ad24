"""The page's files: what browsers may do with them, and that the committed build is current."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers import web
from tests.integration.service.conftest import Api


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Api]) -> Api:
    return start(tmp_path_factory.mktemp("store"), auth="keys")


def test_page_needs_no_credential_and_loads_its_own_files_alone(api: Api) -> None:
    page = api.client.get("/")
    assert page.status_code == 200
    loaded = re.findall(r'(?:src|href)="\./([^"]+)"', page.text)
    assert {name.rpartition(".")[2] for name in loaded} == {"js", "css", "svg"}
    for name in loaded:
        assert api.client.get(f"/{name}").status_code == 200
    assert re.search(r"(?:src|href)=\"(?:https?:)?//", page.text) is None
    assert re.search(r"<script(?![^>]*src=)", page.text) is None


def test_policy_of_the_page_is_strict(api: Api) -> None:
    found = api.client.get("/").headers
    policy = dict(part.split(" ", 1) for part in found["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["style-src"] == "'self'"
    assert "unsafe" not in found["content-security-policy"]
    assert "http" not in found["content-security-policy"]
    assert found["x-frame-options"] == "DENY"
    assert found["referrer-policy"] == "no-referrer"


def test_unchanged_file_is_not_sent_again(api: Api) -> None:
    first = api.client.get("/page/index.js")
    assert first.headers["cache-control"] == "no-cache"
    again = api.client.get("/page/index.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = api.client.get("/page/index.js", headers={"If-None-Match": 'W/"0"'})
    assert (other.status_code, other.content) == (200, first.content)


def test_file_is_compressed_for_a_client_that_unpacks(api: Api) -> None:
    plain = api.client.get("/page/index.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    with api.client.stream("GET", "/page/index.js", headers={"Accept-Encoding": "gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(b"".join(answer.iter_raw())) == plain.content


@pytest.mark.parametrize("name", ["build.json", "..%2Fsettings.py", "nothing.js", "%2e%2e/app.py"])
def test_only_files_of_the_build_are_served(api: Api, name: str) -> None:
    assert api.client.get(f"/page/{name}").status_code in (401, 404)


def test_page_can_be_switched_off(
    tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]
) -> None:
    off = start(tmp_path_factory.mktemp("store"), page=False)
    assert off.client.get("/").status_code == 404
    assert off.client.get("/page/index.js").status_code == 404
    assert off.client.get("/health/live").status_code == 200


def test_build_is_of_these_sources() -> None:
    stamp = json.loads(web.STAMP.read_text(encoding="utf-8"))
    assert stamp["sources"] == web.digest_of_sources(), "run `make web` and commit service/static"
    assert stamp["files"] == web.built_files(), "service/static was edited by hand: run `make web`"


def test_page_is_small_as_it_is_sent() -> None:
    sent = {name: len(gzip.compress((web.STATIC / name).read_bytes(), mtime=0)) for name in web.built_files()}
    niivue = sent.pop("page/niivue.js")
    assert niivue < 400_000
    assert sum(sent.values()) < 120_000
    # What the first paint waits for.
    assert sent["index.html"] + sent["page/index.css"] < 8_000


def test_types_of_the_page_are_of_this_description() -> None:
    """Only of the operations that the page uses."""
    assert web.signed_operations() == web.digest_of_operations(), (
        "run `make web` (Node) and commit web/src/api"
    )
