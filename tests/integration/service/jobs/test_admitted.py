"""An adaptation with its scans is refused, where it is to be, before they are received or decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.helpers.service.asking import problem

NO_SCAN = b"no scan at all"


@pytest.fixture(scope="module")
def full(api: Any, start: Callable[..., Any], scans: list[bytes]) -> Any:
    """An API with `brain` where one job may wait, and one does, under the key `first`."""
    running = start(api.settings.store, max_waiting_jobs=1)
    running.client.put("/hospitals/north", json={"name": "North"})
    assert send(running, scans[:1], "first").status_code == 202
    return running


def send(api: Any, scans: list[bytes], key: str | None = None, **fields: str) -> httpx.Response:
    hospital = fields.pop("hospital", "north")
    answer: httpx.Response = api.client.post(
        f"/hospitals/{hospital}/adaptations",
        files=[("scans", (f"{number}", scan)) for number, scan in enumerate(scans)],
        data={"model": "brain", **fields},
        headers={} if key is None else {"Idempotency-Key": key},
    )
    return answer


def half_sent(api: Any, hospital: str, key: str = "another") -> httpx.Response:
    """A form that ends in the middle, which a reader finds malformed."""
    answer: httpx.Response = api.client.post(
        f"/hospitals/{hospital}/adaptations",
        content=b"--b\r\nContent-Disposition: form-data; name=",
        headers={"Content-Type": "multipart/form-data; boundary=b", "Idempotency-Key": key},
    )
    return answer


def test_unknown_hospital_and_full_queue_are_rejected_before_the_form_is_read(api: Any, full: Any) -> None:
    assert problem(half_sent(api, "north")) == (422, "malformed-form")
    assert problem(half_sent(api, "nobody")) == (404, "hospital-unknown")
    assert problem(half_sent(full, "north")) == (503, "queue-full")


def test_unknown_model_and_option_are_rejected_before_scans_are_decoded(api: Any) -> None:
    assert problem(send(api, [NO_SCAN])) == (415, "unsupported-scan")
    assert problem(send(api, [NO_SCAN], model="heart")) == (404, "artefact-not-found")
    assert problem(send(api, [NO_SCAN], options='{"colour": 1}')) == (422, "invalid-request")


def test_replayed_request_is_answered_when_the_queue_is_full(full: Any, scans: list[bytes]) -> None:
    again = send(full, scans[:1], "first")
    assert (again.status_code, again.headers.get("idempotency-replayed")) == (202, "true")
    assert problem(send(full, [NO_SCAN], "first")) == (422, "idempotency-key-reused")
    assert problem(send(full, scans[:1], "second")) == (503, "queue-full")
    assert problem(send(full, scans[:1])) == (503, "queue-full")
