"""Hosts, pages of other sites, headers of answers, and connections that never become a request."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import trustme
from pydantic import ValidationError

from service.http import connections
from service.http.origins import without_port
from service.settings import Settings
from tests.helpers.service.api import serving
from tests.integration.service.conftest import Api


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Api]) -> Api:
    return start(tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:9", "[::1]:8000", "[::1]"])
def test_a_host_that_is_allowed_is_served(api: Api, host: str) -> None:
    assert api.client.get("/health/live", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", ""]
)
def test_another_host_is_rejected_before_any_route(api: Api, host: str) -> None:
    """DNS rebinding: a foreign page resolves its own name to this address."""
    for path in ("/health/live", "/hospitals", "/nowhere"):
        answer = api.client.get(path, headers={"Host": host})
        assert (answer.status_code, answer.json()["type"]) == (421, "urn:locum:problem:host-not-allowed")
    answer = api.client.post("/hospitals", headers={"Host": host}, json={"id": "dune", "name": "Dune"})
    assert answer.status_code == 421
    assert api.client.get("/hospitals").json()["hospitals"] == []


def test_two_host_headers_are_rejected(api: Api) -> None:
    request = b"GET /hospitals HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    with socket.create_connection((api.client.base_url.host, api.client.base_url.port), 10) as connection:
        connection.sendall(request)
        assert connection.recv(100).split()[1] in (b"400", b"421")


def test_the_operator_s_hosts_replace_the_default(tmp_path: Path, start: Callable[..., Api]) -> None:
    own = start(tmp_path / "store", allowed_hosts="locum.hospital.example, 127.0.0.1")
    for host, status in (("locum.hospital.example", 200), ("localhost", 421)):
        assert own.client.get("/health/live", headers={"Host": host}).status_code == status
    every = start(tmp_path / "store", allowed_hosts="*")
    assert every.client.get("/health/live", headers={"Host": "any.example"}).status_code == 200


FORM = {"name": "North"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://other.localhost"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
    ],
)
def test_page_of_another_site_changes_nothing(api: Api, headers: dict[str, str]) -> None:
    answer = api.client.post("/hospitals/north/cohorts", headers={**headers, "Host": "localhost:8000"})
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:locum:problem:cross-site")
    answer = api.client.put("/hospitals/north", json=FORM, headers={**headers, "Host": "localhost:8000"})
    assert answer.status_code == 403
    assert api.client.get("/hospitals", headers=headers).json()["hospitals"] == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:8000"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://localhost:8000"},
    ],
)
def test_own_page_and_other_clients_are_served(
    start: Callable[..., Api], tmp_path: Path, headers: dict[str, str]
) -> None:
    own = start(tmp_path / "store")
    answer = own.client.put("/hospitals/north", json=FORM, headers={**headers, "Host": "localhost:8000"})
    assert answer.status_code == 201


def test_page_of_an_allowed_origin_is_served_with_cors(start: Callable[..., Api], tmp_path: Path) -> None:
    viewer = "https://viewer.example"
    own = start(tmp_path / "store", allowed_origins=viewer)
    asked = {"Origin": viewer, "Sec-Fetch-Site": "cross-site"}
    preflight = own.client.options(
        "/hospitals/north",
        headers={
            **asked,
            "Access-Control-Request-Method": "PUT",
            "Access-Control-Request-Headers": "if-match",
        },
    )
    assert preflight.headers["access-control-allow-origin"] == viewer
    answer = own.client.put("/hospitals/north", json=FORM, headers=asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (201, viewer)
    assert answer.headers["cross-origin-resource-policy"] == "cross-origin"
    other = own.client.put("/hospitals/north", json=FORM, headers={"Origin": "https://other.example"})
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


def test_without_allowed_origins_no_page_reads_an_answer(api: Api) -> None:
    answer = api.client.get("/hospitals", headers={"Origin": "https://viewer.example"})
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize("path", ["/hospitals", "/nowhere", "/health/live", "/openapi.json"])
def test_every_answer_binds_the_browser(api: Api, path: str) -> None:
    found = api.client.get(path).headers
    assert found["cache-control"] == "no-store"
    assert found["content-security-policy"].startswith("default-src 'none'")
    assert found["x-content-type-options"] == "nosniff"
    assert found["x-frame-options"] == "DENY"
    assert found["cross-origin-resource-policy"] == "same-origin"
    assert "strict-transport-security" not in found


def test_docs_load_nothing_from_elsewhere(api: Api) -> None:
    page = api.client.get("/docs")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert loaded
    for address in loaded:
        assert address.startswith("/")
        assert api.client.get(address).status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]


def test_a_port_is_cut_off_a_host() -> None:
    found = [without_port(host) for host in ("A.example:80", "[::1]:8000", "[::1]", "a.example", "a:b")]
    assert found == ["a.example", "[::1]", "[::1]", "a.example", "a:b"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        store=tmp_path / "store", state_dir=tmp_path / "state", port=0, redis_url="redis://127.0.0.1:1"
    )


def test_the_server_takes_no_header_beyond_its_limit(settings: Settings) -> None:
    """httptools would go on reading, on the event loop."""
    with serving(settings) as port, socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        sent = 0
        while sent < 2**26:
            try:
                sent += connection.send(b"x" * 2**16)
            except OSError:
                break
        assert sent < 2**24


def closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection; fails by the socket's timeout."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_headers_that_take_too_long_close_the_connection(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    with serving(settings) as port:
        silent, half, later = (socket.create_connection(("127.0.0.1", port), 10) for _ in range(3))
        half.sendall(b"GET /health/live HTTP/1.1\r\nHost: ")
        later.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += later.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200")
        later.sendall(b"GET /health/live HTTP/1.1\r\nHost: ")
        for connection in (silent, half, later):
            with connection:
                assert closed(connection)


def test_connections_above_the_limit_are_closed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
    with serving(settings) as port, ExitStack() as held:
        first, second, third = (
            held.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(3)
        )
        assert closed(third)
        for connection in (first, second):
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_certificate_turns_tls_on(settings: Settings, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(chain)
    certificate.private_key_pem.write_to_path(key)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    secured = Settings(**settings.model_dump(exclude_unset=True), tls_certificate=chain, tls_key=key)
    with serving(secured) as port:
        answer = httpx.get(f"https://127.0.0.1:{port}/health/live", verify=context)
    assert answer.status_code == 200
    assert answer.headers["strict-transport-security"].startswith("max-age=")
    with pytest.raises(ValidationError, match="together"):
        Settings(**settings.model_dump(exclude_unset=True), tls_key=key)
    with pytest.raises(ValidationError, match="cannot be used"):
        Settings(**settings.model_dump(exclude_unset=True), tls_certificate=key, tls_key=chain)
