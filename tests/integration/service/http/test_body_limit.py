"""What is no upload is small: a large body of JSON is refused while it arrives, not collected and parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from service.http.uploads.body_limit import MAX_BODY_BYTES

JSON = {"content-type": "application/json"}
BODY = b'{"name": "North"}'


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    running = start(tmp_path_factory.mktemp("store"))
    assert running.client.put("/hospitals/north", content=BODY, headers=JSON).status_code == 201
    return running


def large() -> Iterator[bytes]:
    """Of no announced length."""
    yield BODY
    for _ in range(64):
        yield b" " * 65536


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=b", "text/plain"])
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/hospitals/north"),
        ("POST", "/hospitals/north/cohorts"),
        ("PUT", "/hospitals/north/serving/brain"),
        ("POST", "/hospitals/north/serving/brain/rollback"),
    ],
)
def test_large_body_is_a_413_problem(api: Any, method: str, path: str, announced: bool, kind: str) -> None:
    content = b"".join(large()) if announced else large()
    answer = api.client.request(method, path, content=content, headers={"content-type": kind})
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:locum:problem:body-too-large")


def test_large_adaptation_request_is_a_413_problem(api: Any) -> None:
    answer = api.client.post("/hospitals/north/adaptations", content=large(), headers=JSON)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:locum:problem:body-too-large")


@pytest.mark.parametrize(("size", "status"), [(MAX_BODY_BYTES, 200), (MAX_BODY_BYTES + 1, 413)])
def test_body_of_exactly_the_limit_is_accepted(api: Any, size: int, status: int) -> None:
    answer = api.client.put("/hospitals/north", content=BODY.ljust(size), headers=JSON)
    assert answer.status_code == status


def test_scan_uploads_may_exceed_the_body_limit(api: Any, make_png: Callable[..., bytes]) -> None:
    scan = make_png(np.random.default_rng(0).integers(0, 255, (300, 300), np.uint8))
    assert len(scan) > MAX_BODY_BYTES
    cohort = api.client.post("/hospitals/north/cohorts").headers["location"]
    assert api.client.put(f"{cohort}/scans/a", content=scan).status_code == 201
    # There is no model: what is refused is not the form.
    assert api.segment(scan, model="brain").status_code == 404
