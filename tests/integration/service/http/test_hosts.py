"""The Host header, and headers without an end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service.__main__ import _server
from service.http.hosts import without_port
from service.settings import Settings
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


def test_a_port_is_cut_off_a_host() -> None:
    found = [without_port(host) for host in ("A.example:80", "[::1]:8000", "[::1]", "a.example", "a:b")]
    assert found == ["a.example", "[::1]", "[::1]", "a.example", "a:b"]


def test_the_server_takes_no_header_beyond_its_limit(tmp_path: Path) -> None:
    """httptools would go on reading, on the event loop."""

    settings = Settings(
        store=tmp_path / "store", state_dir=tmp_path / "state", port=0, redis_url="redis://127.0.0.1:1"
    )
    server = _server(settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
            sent = 0
            while sent < 2**26:
                try:
                    sent += connection.send(b"x" * 2**16)
                except OSError:
                    break
            assert sent < 2**24
    finally:
        server.should_exit = True
        thread.join(30)
