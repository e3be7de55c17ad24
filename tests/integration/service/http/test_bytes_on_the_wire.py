"""What the server makes of bytes on a connection: where a request ends, and for which host and path it is."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.database import Database
from service.identity import keys
from service.settings import Settings
from tests.helpers.service.api import NO_REDIS, serving

SMUGGLED = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    root = tmp_path_factory.mktemp("wire")
    settings = Settings(store=root / "store", state_dir=root / "state", port=0, redis_url=NO_REDIS)
    with serving(settings) as port:
        yield port


def answers(port: int, sent: bytes) -> list[bytes]:
    """Send the bytes, read until the server closes, and return the status of every answer."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(sent)
        received = b""
        while chunk := connection.recv(4096):
            received += chunk
    return [part.split(b" ", 1)[0] for part in received.split(b"HTTP/1.1 ")[1:]]


def post(*headers: bytes, body: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    lines = [b"POST /hospitals/north/cohorts " + version, b"Host: localhost", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(
            post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"), id="two lengths"
        ),
        pytest.param(
            post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n"), id="other order"
        ),
        pytest.param(post(b"Content-Length: 5", b"Content-Length: 0", body=b""), id="two Content-Length"),
        pytest.param(post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"), id="unknown coding"),
        pytest.param(
            post(b"Transfer-Encoding: chunked", body=b"0\r\n\r\n", version=b"HTTP/1.0"), id="HTTP/1.0"
        ),
        pytest.param(
            post(b"X: a\n", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"), id="a header ended by LF"
        ),
        pytest.param(b"GET /health/live HTTP/1.1\nHost: localhost\n\n", id="LF alone"),
        pytest.param(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\n", id="blank line of LF"),
        pytest.param(b"\nGET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", id="LF first"),
        pytest.param(post(b"Content-Length: 0", b"X: a", b" b: c", body=b""), id="folded line"),
        pytest.param(post(b"Content-Length:", b"\t0", body=b""), id="folded length"),
        pytest.param(post(b"Transfer-Encoding: chunked", body=b"0\r\nX: y\n\n"), id="trailer ended by LF"),
        pytest.param(
            post(b"Transfer-Encoding: chunked", body=b"0\r\nX: y\r\n z\r\n\r\n"), id="folded trailer"
        ),
        pytest.param(post(b"Transfer-Encoding: chunked", body=b"2\nab\r\n0\r\n\r\n"), id="chunk line of LF"),
    ],
)
def test_request_that_may_end_elsewhere_is_rejected_and_the_connection_closed(port: int, sent: bytes) -> None:
    """Nothing behind it is taken for a request."""
    assert answers(port, sent + SMUGGLED) == [b"400"]


def test_bare_line_feed_that_comes_byte_by_byte_is_rejected(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX: a\n":
            connection.send(bytes([byte]))
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")


def test_pipelined_requests_with_bodies_are_answered_each(port: int) -> None:
    """CRLF ends each line; what the body has of LF and folds is not looked at."""
    chunked = post(b"Transfer-Encoding: chunked", body=b"4\r\n\n \n\t\r\n0\r\nX: y\r\n\r\n")
    counted = post(b"Content-Length: 4", body=b"\n \n\t")
    last = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    found = answers(port, chunked + counted + last)
    assert len(found) == 3
    assert found[-1] == b"200"
    assert b"400" not in found


@pytest.mark.parametrize(
    "path", ["/", "/health/live", "/health/ready", "/models", "/hospitals", "/docs", "/nowhere", "/lineage"]
)
def test_head_is_answered_as_get_without_the_body(port: int, path: str) -> None:
    def ask(method: str) -> httpx.Response:
        return httpx.request(method, f"http://127.0.0.1:{port}{path}")

    got, head = ask("GET"), ask("HEAD")
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["content-length"] == got.headers["content-length"] != "0"


def test_head_of_what_has_no_get_is_405_and_allow_names_head(port: int) -> None:
    assert httpx.head(f"http://127.0.0.1:{port}/segment").status_code == 405
    assert httpx.request("PATCH", f"http://127.0.0.1:{port}/models").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("root_path", "headers"),
    [
        ("/locum", {}),
        ("/locum", {"X-Forwarded-Prefix": "/other"}),
        # The client's address replaces the proxy's before the application runs.
        (
            "",
            {"X-Forwarded-Prefix": "/locum/", "X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https"},
        ),
    ],
)
def test_addresses_are_under_the_prefix_of_a_proxy(
    tmp_path: Path, root_path: str, headers: dict[str, str]
) -> None:
    settings = Settings(
        store=tmp_path / "store",
        state_dir=tmp_path / "state",
        port=0,
        redis_url=NO_REDIS,
        root_path=root_path,
        auth="keys",
        monailabel="root",
    )
    with (
        serving(settings) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as client,
    ):
        database = Database(settings.resolved_database_url)
        with database.write() as session:
            secret = keys.create(session, "boss", "admin", None)[1]
        database.dispose()
        # Open paths are open under the prefix too.
        assert client.get("/health/live").status_code == 200
        assert "script-src" in client.get("/docs").headers["content-security-policy"]
        assert client.get("/models").status_code == 401
        client.headers["Authorization"] = f"Bearer {secret}"
        assert client.put("/hospitals/north", json={"name": "North"}).status_code == 201
        made = client.post("/hospitals/north/cohorts")
        assert made.headers["location"] == f"/locum/hospitals/north/cohorts/{made.json()['id']}"
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/locum"}]
        # MONAI Label's paths, below /monailabel and at the root.
        for path in ("/monailabel/info/", "/info/"):
            assert client.get(path).json()["name"] == "Locum"
        assert client.get("/monailabel/datastore/").json()["total"] == 0
        assert client.get("/nowhere/").status_code == 404
        # Another service of the host does not receive the cookie.
        cookie = client.post("/session").headers["set-cookie"]
        assert "; Path=/locum;" in cookie
        del client.headers["Authorization"]
        headers = {
            "Locum-CSRF": client.get("/session", headers=_sent(cookie)).json()["csrf"],
            **_sent(cookie),
        }
        ended = client.delete("/session", headers=headers)
        assert ended.status_code == 204
        assert "; Path=/locum;" in ended.headers["set-cookie"]


def _sent(cookie: str) -> dict[str, str]:
    """The cookie as a browser sends it, which asked below the prefix."""
    return {"Cookie": cookie.partition(";")[0]}


@pytest.mark.parametrize(
    ("trusted", "sent", "expected"),
    [
        ("127.0.0.1", ["/locum"], "/locum"),
        ("127.0.0.0/8", ["/a/b.c-d_e~f/"], "/a/b.c-d_e~f"),
        ("10.0.0.1", ["/locum"], ""),
        ("", ["/locum"], ""),
        ("127.0.0.1", ["/mine", "/locum"], ""),
        ("127.0.0.1", ["//evil.example"], ""),
        ("127.0.0.1", ["https://evil.example"], ""),
        ("127.0.0.1", ["locum"], ""),
        ("127.0.0.1", ["/a, /b"], ""),
        ("127.0.0.1", ["/../a%2f"], ""),
        ("127.0.0.1", ["/" + "a" * 300], ""),
        ("127.0.0.1", ["/"], ""),
    ],
)
def test_prefix_is_taken_from_a_trusted_proxy_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: str, sent: list[str], expected: str
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    settings = Settings(store=tmp_path / "store", state_dir=tmp_path / "state", port=0, redis_url=NO_REDIS)
    with serving(settings) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        client.put("/hospitals/north", json={"name": "North"})
        headers = [("X-Forwarded-Prefix", value) for value in sent]
        made = client.post("/hospitals/north/cohorts", headers=headers)
        assert made.headers["location"] == f"{expected}/hospitals/north/cohorts/{made.json()['id']}"
        # The next request of the connection has a prefix of its own.
        again = client.post("/hospitals/north/cohorts")
        assert again.headers["location"] == f"/hospitals/north/cohorts/{again.json()['id']}"


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://localhost/health/live", b"localhost", b"200"),
        (b"HTTP://LOCALHOST:8000/health/live", b"evil.example", b"200"),
        (b"https://localhost/models?prefix=x", b"localhost", b"422"),
        (b"http://evil.example/health/live", b"localhost", b"421"),
        (b"http://localhost@evil.example/health/live", b"localhost", b"404"),
        (b"http://localhost@evil.example/health/live", b"evil.example", b"421"),
        (b"http://localhost/nowhere", b"localhost", b"404"),
    ],
)
def test_absolute_target_names_host_and_path(port: int, target: bytes, host: bytes, status: bytes) -> None:
    """The host in the target replaces the header's (RFC 9112, section 3.2.2)."""
    sent = b"GET " + target + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
    assert answers(port, sent) == [status]
