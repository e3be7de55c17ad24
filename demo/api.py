"""The service's HTTP API, called as a hospital's own program would call it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

MODEL = "phantom"


@dataclass(frozen=True)
class Answer:
    """What a segmented scan came back with: mask, whose model made it, and that model's `name@version`."""

    mask: bytes
    whose: str
    model: str


def register(client: httpx.Client, hospital: str, site: str | None) -> None:
    """Tell the service who a hospital is; a member of the federation names its site there."""
    body = {"name": hospital.capitalize()} | ({"site": site} if site else {})
    client.put(f"/hospitals/{hospital}", json=body).raise_for_status()


def segment(
    client: httpx.Client, scan: bytes, fields: Mapping[str, str], prefer: str | None = None
) -> httpx.Response:
    """Post a scan; `fields` are those of the form. Raises httpx.HTTPStatusError when it is refused."""
    answer = client.post(
        "/segment",
        files={"scan": ("scan.nii.gz", scan)},
        data=dict(fields),
        headers={"Prefer": prefer} if prefer else None,
    )
    return answer.raise_for_status()


def mask_of(
    client: httpx.Client, scan: bytes, fields: Mapping[str, str], prefer: str | None = None
) -> Answer:
    """The same, for a mask. Raises RuntimeError when there is only a job so far."""
    answer = segment(client, scan, fields, prefer)
    if answer.status_code == httpx.codes.ACCEPTED:
        raise RuntimeError(f"the mask was not there in time; it will be at {answer.headers['Location']}")
    return Answer(answer.content, answer.headers["Locum-Personalization"], answer.headers["Locum-Model"])


def send_cohort(client: httpx.Client, hospital: str, scans: Mapping[str, bytes]) -> str:
    """Upload scans one at a time, as a client does that may be cut off between two; gives the cohort's id."""
    answer = client.post(f"/hospitals/{hospital}/cohorts").raise_for_status()
    cohort = str(answer.json()["id"])
    for name, scan in scans.items():
        client.put(f"/hospitals/{hospital}/cohorts/{cohort}/scans/{name}", content=scan).raise_for_status()
    return cohort


def start_adaptation(client: httpx.Client, hospital: str, cohort: str, epochs: int | None) -> str:
    """Ask for a model of the hospital's own; gives the job's id. Without `epochs`, every default."""
    options = {} if epochs is None else {"epochs": epochs}
    body = {"cohort": cohort, "model": MODEL, "options": options}
    answer = client.post(f"/hospitals/{hospital}/adaptations", json=body).raise_for_status()
    return answer.headers["Location"].rsplit("/", 1)[-1]


def events(client: httpx.Client, job: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(type, data) of each thing that happens in a job, as it happens, until it is over."""
    with client.stream("GET", f"/jobs/{job}/events") as stream:
        stream.raise_for_status()
        event_type = ""
        for line in stream.iter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                event_type = value
            elif field == "data":
                yield event_type, json.loads(value)


def job(client: httpx.Client, job_id: str) -> dict[str, Any]:
    """Everything that is known of a job."""
    found: dict[str, Any] = client.get(f"/jobs/{job_id}").raise_for_status().json()
    return found


def assign(
    client: httpx.Client, hospital: str, version: str, reason: str, *, override: bool = False
) -> httpx.Response:
    """Decide that `version` serves the hospital from now on: 200, or 409 when its gate refused it.

    `override` decides against the gate, which the serving log keeps. The `ETag` says what the decision
    replaces: nobody's decision in between is lost.
    """
    serving = f"/hospitals/{hospital}/serving/{MODEL}"
    seen = client.get(serving).raise_for_status().headers["ETag"]
    body = {"version": version, "actor": "ada", "reason": reason} | ({"override": True} if override else {})
    answer = client.put(serving, json=body, headers={"If-Match": seen})
    if answer.status_code != httpx.codes.CONFLICT:
        answer.raise_for_status()
    return answer
