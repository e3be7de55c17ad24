"""Jobs followed over server-sent events. The worker here is the test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from service.jobs.leases import finish
from tests.helpers.service.asking import note, problem, submitted, take


def follow(api: Any, job: str, last: str | None = None) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(id, type, data) of each server-sent event."""
    headers = {} if last is None else {"Last-Event-ID": last}
    with api.client.stream("GET", f"/jobs/{job}/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        event: dict[str, str] = {}
        for line in answer.iter_lines():
            if line == "" and "data" in event:
                yield int(event["id"]), event["event"], json.loads(event["data"])
                event = {}
            elif line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                event[name] = value


def test_job_events_stream_to_the_end_and_resume_after_an_id(api: Any, cohort: str) -> None:
    job = submitted(api, cohort)
    stream = follow(api, job)
    assert next(stream)[2]["state"] == "queued"
    lease = take(api, job)
    assert next(stream)[2]["state"] == "running"
    note(api, lease, "epoch", {"epoch": 1, "loss": 0.5})
    at, kind, data = next(stream)
    assert (kind, data["epoch"], data["loss"]) == ("epoch", 1, 0.5)
    stream.close()

    # The connection is lost here, and things go on.
    note(api, lease, "epoch", {"epoch": 2, "loss": 0.4})
    resumed = follow(api, job, last=str(at))
    assert next(resumed)[2]["epoch"] == 2
    finish(api.context.database, lease, "fell_back", reason="nothing better was found")
    last, kind, data = next(resumed)
    assert (kind, data["state"], data["reason"]) == ("state", "fell_back", "nothing better was found")
    assert next(resumed, None) is None

    # Later, the whole story, or what is left of it.
    states = [data.get("state", data.get("epoch")) for _, _, data in follow(api, job)]
    assert states == ["queued", "running", 1, 2, "fell_back"]
    assert list(follow(api, job, last=str(last))) == []


def test_job_events_with_unknown_job_or_invalid_id_are_rejected(api: Any, cohort: str) -> None:
    assert problem(api.client.get(f"/jobs/{'0' * 32}/events")) == (404, "job-unknown")
    place = f"/jobs/{submitted(api, cohort)}/events"
    assert problem(api.client.get(place, headers={"Last-Event-ID": "abc"})) == (422, "invalid-request")
