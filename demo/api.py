"""Client of the service's HTTP API, as a hospital's own program would call it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

# The routing space (IOP-FL) is adapted without masks; the FedOAP model is joined with masks.
MODEL, ANY_ORGAN = "phantom", "any-organ"


@dataclass(frozen=True)
class SegmentedMask:
    """A mask, the personalization that made it, and the model's `name@version`."""

    mask: bytes
    personalization: str
    model: str


def register(client: httpx.Client, hospital: str, site: str | None) -> None:
    """Register a hospital; a member of the federation names its site."""
    body = {"name": hospital.capitalize()} | ({"site": site} if site else {})
    client.put(f"/hospitals/{hospital}", json=body).raise_for_status()


def segment(
    client: httpx.Client, scan: bytes, fields: Mapping[str, str], prefer: str | None = None
) -> httpx.Response:
    """Post a scan with the form's `fields`. Raises httpx.HTTPStatusError when the service rejects it."""
    answer = client.post(
        "/segment",
        files={"scan": ("scan.nii.gz", scan)},
        data=dict(fields),
        headers={"Prefer": prefer} if prefer else None,
    )
    return answer.raise_for_status()


def mask_of(
    client: httpx.Client, scan: bytes, fields: Mapping[str, str], prefer: str | None = None
) -> SegmentedMask:
    """Post a scan and return its mask. Raises RuntimeError when the service answers with a pending job."""
    answer = segment(client, scan, fields, prefer)
    if answer.status_code == httpx.codes.ACCEPTED:
        raise RuntimeError(f"the mask was not ready in time; it will be at {answer.headers['Location']}")
    return SegmentedMask(
        answer.content, answer.headers["Locum-Personalization"], answer.headers["Locum-Model"]
    )


def send_cohort(
    client: httpx.Client,
    hospital: str,
    scans: Mapping[str, bytes],
    masks: Mapping[str, bytes] | None = None,
    model: str = MODEL,
) -> str:
    """Upload scans one at a time, and masks drawn for `model`; return the cohort's id."""
    answer = client.post(f"/hospitals/{hospital}/cohorts").raise_for_status()
    cohort = str(answer.json()["id"])
    for name, scan in scans.items():
        client.put(f"/hospitals/{hospital}/cohorts/{cohort}/scans/{name}", content=scan).raise_for_status()
    for name, mask in (masks or {}).items():
        path = f"/hospitals/{hospital}/cohorts/{cohort}/scans/{name}/mask"
        client.put(path, content=mask, params={"model": model}).raise_for_status()
    return cohort


def start_adaptation(
    client: httpx.Client, hospital: str, cohort: str, epochs: int | None, model: str = MODEL
) -> str:
    """Start an adaptation job and return its id. Every option but `epochs` keeps its default."""
    options = {} if epochs is None else {"epochs": epochs}
    body = {"cohort": cohort, "model": model, "options": options}
    answer = client.post(f"/hospitals/{hospital}/adaptations", json=body).raise_for_status()
    return answer.headers["Location"].rsplit("/", 1)[-1]


def events(client: httpx.Client, job: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (type, data) of each event of a job until the job ends."""
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
    """Return the job's record."""
    record: dict[str, Any] = client.get(f"/jobs/{job_id}").raise_for_status().json()
    return record


def assign(client: httpx.Client, hospital: str, model: str, version: str, reason: str) -> httpx.Response:
    """Assign `version` to the hospital for `model`: 200, or 409 when the version's gate did not pass.

    `If-Match` names the entry of the serving log that the caller saw, so that no decision in between is lost.
    """
    serving = f"/hospitals/{hospital}/serving/{model}"
    seen = client.get(serving).raise_for_status().headers["ETag"]
    body = {"version": version, "actor": "ada", "reason": reason}
    answer = client.put(serving, json=body, headers={"If-Match": seen})
    if answer.status_code != httpx.codes.CONFLICT:
        answer.raise_for_status()
    return answer
