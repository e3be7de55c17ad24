from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect

from service.http import problems
from service.runtime.access_log import AccessLogMiddleware
from service.runtime.logs import JsonFormatter, PlainFormatter
from service.runtime.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def app(metrics: Metrics) -> FastAPI:
    app = FastAPI()

    @app.get("/patients/{name}")
    async def patient(name: str) -> str:
        if name == "broken":
            raise RuntimeError("secret-of-the-inside")
        if name == "impatient":
            raise ClientDisconnect
        return "fine"

    @app.get("/health/live")
    async def live() -> str:
        return "live"

    app.add_middleware(AccessLogMiddleware, metrics=metrics)
    problems.install(app)
    return app


def ask(app: FastAPI, path: str, method: str = "GET") -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path)

    return asyncio.run(send())


def samples(metrics: Metrics) -> dict[tuple[str, str, str], float]:
    return {
        (s.labels["method"], s.labels["route"], s.labels["status"]): s.value
        for family in metrics.registry.collect()
        for s in family.samples
        if s.name == "locum_requests_total"
    }


def test_responses_are_counted_by_route_template(app: FastAPI, metrics: Metrics) -> None:
    for path in ("/patients/jane?birth=1970", "/patients/john", "/patients/broken", "/nowhere/jane"):
        ask(app, path)
    ask(app, "/patients/jane", "BREW")
    with pytest.raises(AssertionError):
        # The client has disconnected, which this test client asserts.
        ask(app, "/patients/impatient")
    assert samples(metrics) == {
        ("GET", "/patients/{name}", "200"): 2,
        ("GET", "/patients/{name}", "500"): 1,
        ("GET", "/patients/{name}", "499"): 1,
        ("GET", "unmatched", "404"): 1,
        ("other", "/patients/{name}", "405"): 1,
    }
    assert b"jane" not in metrics.exposition()[0]


def test_access_log_leaves_out_client_values(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "locum"):
        answer = ask(app, "/patients/jane?birth=1970")
        ask(app, "/nowhere/jane")
        ask(app, "/health/live")
    records = [record for record in caplog.records if record.name == "locum.access"]
    assert [record.getMessage() for record in records] == ["GET /patients/{name} 200", "GET unmatched 404"]
    for record in records:
        line = JsonFormatter().format(record) + PlainFormatter().format(record)
        assert "jane" not in line
        assert "1970" not in line
    assert answer.headers["locum-request"]


def test_access_log_line_has_the_request_id(app: FastAPI) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Keep()
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("locum.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        answer = ask(app, "/patients/jane")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    (line,) = map(json.loads, lines)
    assert line["request"] == answer.headers["locum-request"]
    assert (line["method"], line["route"], line["status"]) == ("GET", "/patients/{name}", 200)
    assert line["milliseconds"] >= 0
    assert line["time"].endswith("Z")


def test_metrics_of_two_apps_are_separate() -> None:
    first, second = Metrics(), Metrics()
    first.requests.labels("GET", "/", "200").inc()
    assert samples(second) == {}
