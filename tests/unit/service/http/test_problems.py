"""Refusals and failures as RFC 9457 problem details."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid

import httpx
import pytest
from fastapi import FastAPI, Form

from model_store import errors
from service.http import problems
from service.http.problems import Problem, from_store_error, problem_responses

MEMBERS = {"type", "title", "status", "detail", "instance"}


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    problems.install(app)

    @app.get("/teapot", responses=problem_responses(418))
    def teapot() -> None:
        raise Problem(418, "teapot", "A teapot", "Short and stout.", {"Retry-After": "3"}, spout=1)

    @app.get("/store")
    def store() -> None:
        raise errors.ArtefactWithdrawn("'brain@2' was withdrawn")

    @app.get("/bug")
    def bug() -> None:
        raise KeyError("/home/somebody/mueller_anna.nii")

    @app.post("/form")
    def form(count: int = Form()) -> int:
        return count

    return app


def ask(app: FastAPI, method: str, path: str, **arguments: object) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **arguments)  # type: ignore[arg-type]

    return asyncio.run(send())


def problem_of(response: httpx.Response) -> dict[str, object]:
    assert response.headers["content-type"] == "application/problem+json"
    content = response.json()
    assert content.keys() >= MEMBERS
    assert content["status"] == response.status_code
    assert content["type"].startswith("urn:locum:problem:")
    assert content["instance"] == f"urn:uuid:{response.headers['locum-request']}"
    uuid.UUID(response.headers["locum-request"])
    return content


def test_a_problem_carries_its_headers_and_extensions(app: FastAPI) -> None:
    response = ask(app, "GET", "/teapot")
    content = problem_of(response)
    assert (response.status_code, content["type"], content["spout"]) == (418, "urn:locum:problem:teapot", 1)
    assert response.headers["retry-after"] == "3"


def test_an_error_of_the_store_keeps_its_words(app: FastAPI) -> None:
    content = problem_of(ask(app, "GET", "/store"))
    assert (content["status"], content["detail"]) == (410, "'brain@2' was withdrawn")


def test_every_error_of_the_store_has_a_status() -> None:
    def below(cls: type[Exception]) -> list[type[Exception]]:
        return [cls, *(found for child in cls.__subclasses__() for found in below(child))]

    statuses = {cls: from_store_error(cls("why")).status for cls in below(errors.LocumStoreError)}
    scans = {status for cls, status in statuses.items() if issubclass(cls, errors.ScanError)}
    assert scans == {413, 415, 422}
    assert statuses[errors.ReferenceNotFound] == 404
    assert statuses[errors.ArtefactDamaged] == 503
    assert 500 not in statuses.values()


def test_the_most_specific_class_decides() -> None:
    class Odd(errors.ScanTooLarge):
        pass

    assert from_store_error(Odd("big")).status == 413


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("PUT", "/teapot", 405)])
def test_the_frameworks_own_errors_are_problems(app: FastAPI, method: str, path: str, status: int) -> None:
    response = ask(app, method, path)
    assert response.status_code == status
    problem_of(response)


def test_an_invalid_field_is_named_but_its_value_is_not_echoed(app: FastAPI) -> None:
    response = ask(app, "POST", "/form", data={"count": "mueller_anna"})
    content = problem_of(response)
    assert content["errors"][0]["field"] == "body.count"  # type: ignore[index]
    assert "mueller" not in response.text


def test_a_bug_becomes_a_500_that_tells_nothing(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "locum.service"):
        response = ask(app, "GET", "/bug")
    assert response.status_code == 500
    problem_of(response)
    assert "mueller" not in response.text
    assert "KeyError" not in response.text
    assert any("KeyError" in record.message for record in caplog.records)


def test_ids_differ_and_are_not_taken_from_the_client(app: FastAPI) -> None:
    given = str(uuid.uuid4())
    seen = {
        ask(app, "GET", "/teapot", headers={"Locum-Request": given}).headers["locum-request"] for _ in "ab"
    }
    assert len(seen) == 2
    assert given not in seen


def test_the_description_shows_problems_and_no_other_validation_error(app: FastAPI) -> None:
    description = app.openapi()
    text = json.dumps(description)
    assert "HTTPValidationError" not in text
    answer = description["paths"]["/form"]["post"]["responses"]["422"]["content"]
    assert list(answer) == ["application/problem+json"]
    assert set(description["components"]["schemas"]["ProblemDetails"]["required"]) == MEMBERS
