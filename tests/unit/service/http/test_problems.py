"""Refusals and failures as RFC 9457 problem details."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import uuid
import weakref

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Form

from model_store import errors
from service.errors import LeaseLost, RequestInvalid, ServiceBusy, ServiceError
from service.http import problems
from service.http.problems import Problem, from_store_error, problem_responses

MEMBERS = {"type", "title", "status", "detail", "instance"}


# What requests held.
kept: list[weakref.ref[np.ndarray]] = []


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

    @app.get("/busy")
    def busy() -> None:
        raise ServiceBusy("2 scans wait.", headers={"Retry-After": "7"}, retry_after=7)

    @app.get("/invalid")
    def invalid() -> None:
        raise RequestInvalid([{"field": "a", "reason": "too long"}, {"field": "b", "reason": "not a number"}])

    @app.get("/fault")
    def fault() -> None:
        raise LeaseLost("the lease of /home/somebody/mueller_anna.nii")

    @app.get("/bug")
    def bug() -> None:
        raise KeyError("/home/somebody/mueller_anna.nii")

    @app.get("/hungry")
    def hungry() -> None:
        held = np.zeros(2**20, np.uint8)
        kept.append(weakref.ref(held))
        raise MemoryError("Unable to allocate 4.83 GiB")

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


def test_problem_response_has_headers_and_extensions(app: FastAPI) -> None:
    response = ask(app, "GET", "/teapot")
    content = problem_of(response)
    assert (response.status_code, content["type"], content["spout"]) == (418, "urn:locum:problem:teapot", 1)
    assert response.headers["retry-after"] == "3"


def test_service_error_response_has_type_title_and_status_of_its_class(app: FastAPI) -> None:
    response = ask(app, "GET", "/busy")
    content = problem_of(response)
    del content["instance"]
    assert content == {
        "type": "urn:locum:problem:busy",
        "title": "Every slot is taken",
        "status": 503,
        "detail": "2 scans wait.",
        "retry_after": 7,
    }
    assert response.headers["retry-after"] == "7"


def test_invalid_fields_raised_in_a_route_are_listed(app: FastAPI) -> None:
    content = problem_of(ask(app, "GET", "/invalid"))
    assert (content["status"], content["type"]) == (422, "urn:locum:problem:invalid-request")
    assert content["detail"] == "a: too long; b: not a number"
    assert content["errors"] == [
        {"field": "a", "reason": "too long"},
        {"field": "b", "reason": "not a number"},
    ]


def test_a_service_error_without_a_status_is_a_500_without_its_message(
    app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "locum.service"):
        response = ask(app, "GET", "/fault")
    assert problem_of(response)["type"] == "urn:locum:problem:internal-error"
    assert "mueller" not in response.text
    assert any("LeaseLost" in record.message for record in caplog.records)


def test_every_kind_of_service_error_has_its_own_name() -> None:
    leaves = [cls for cls in _below(ServiceError) if cls.status != 500 and not cls.__subclasses__()]
    kinds = {(cls.status, cls.slug, cls.title) for cls in leaves}
    assert len(kinds) == len(leaves) > 30
    for cls in leaves:
        assert 400 <= cls.status < 600, cls
        assert cls.slug != ServiceError.slug, cls
        assert cls.title != ServiceError.title, cls


def _below(cls: type[ServiceError]) -> list[type[ServiceError]]:
    # A Problem's kind is given where it is raised.
    children = [child for child in cls.__subclasses__() if child is not Problem]
    return [cls, *(found for child in children for found in _below(child))]


def test_store_error_response_keeps_its_message(app: FastAPI) -> None:
    content = problem_of(ask(app, "GET", "/store"))
    assert (content["status"], content["detail"]) == (410, "'brain@2' was withdrawn")


def test_every_store_error_has_a_status() -> None:
    def below(cls: type[Exception]) -> list[type[Exception]]:
        return [cls, *(found for child in cls.__subclasses__() for found in below(child))]

    statuses = {cls: from_store_error(cls("why")).status for cls in below(errors.LocumStoreError)}
    scans = {status for cls, status in statuses.items() if issubclass(cls, errors.ScanError)}
    assert scans == {413, 415, 422}
    assert statuses[errors.ReferenceNotFound] == 404
    assert statuses[errors.ArtefactDamaged] == 503
    assert 500 not in statuses.values()


def test_store_error_subclass_gets_the_status_of_its_base() -> None:
    class Odd(errors.ScanTooLarge):
        pass

    assert from_store_error(Odd("big")).status == 413


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("PUT", "/teapot", 405)])
def test_framework_errors_are_problem_responses(app: FastAPI, method: str, path: str, status: int) -> None:
    response = ask(app, method, path)
    assert response.status_code == status
    problem_of(response)


def test_invalid_field_is_named_without_its_value(app: FastAPI) -> None:
    response = ask(app, "POST", "/form", data={"count": "mueller_anna"})
    content = problem_of(response)
    assert content["errors"][0]["field"] == "body.count"  # type: ignore[index]
    assert "mueller" not in response.text


def test_unexpected_error_is_a_500_without_details(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "locum.service"):
        response = ask(app, "GET", "/bug")
    assert response.status_code == 500
    problem_of(response)
    assert "mueller" not in response.text
    assert "KeyError" not in response.text
    assert any("KeyError" in record.message for record in caplog.records)


def test_request_ids_are_unique_and_not_taken_from_the_client(app: FastAPI) -> None:
    given = str(uuid.uuid4())
    seen = {
        ask(app, "GET", "/teapot", headers={"Locum-Request": given}).headers["locum-request"] for _ in "ab"
    }
    assert len(seen) == 2
    assert given not in seen


def test_description_declares_problems_as_the_only_validation_error(app: FastAPI) -> None:
    description = app.openapi()
    text = json.dumps(description)
    assert "HTTPValidationError" not in text
    answer = description["paths"]["/form"]["post"]["responses"]["422"]["content"]
    assert list(answer) == ["application/problem+json"]
    assert set(description["components"]["schemas"]["ProblemDetails"]["required"]) == MEMBERS


def test_a_request_without_memory_is_told_to_come_back_and_holds_nothing(app: FastAPI) -> None:
    gc.disable()
    try:
        answer = ask(app, "GET", "/hungry")
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:locum:problem:memory-short")
        assert answer.headers["retry-after"] == "10"
        assert "GiB" not in answer.text
        # At once, not when Python's collector comes.
        assert kept.pop()() is None
    finally:
        gc.enable()
