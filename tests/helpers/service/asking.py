"""What one asks of the API about jobs, and what a worker would do to them."""

from __future__ import annotations

from typing import Any

import httpx

from service.jobs import records
from service.jobs.leases import Lease, claim, fenced


def adapt(api: Any, cohort: str, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    asked = {"cohort": cohort, "model": "brain", **body}
    answer: httpx.Response = api.client.post("/hospitals/north/adaptations", json=asked, headers=headers)
    return answer


def submitted(api: Any, cohort: str) -> str:
    answer = adapt(api, cohort)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def take(api: Any, job: str) -> Lease:
    lease = claim(api.context.database, job, "test", api.settings)
    assert lease is not None
    return lease


def note(api: Any, lease: Lease, kind: records.EventType, data: dict[str, Any]) -> None:
    with fenced(api.context.database, lease) as (session, job):
        if kind == "progress":
            job.progress = data
        records.append_event(session, job, kind, data)


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")
