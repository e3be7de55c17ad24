"""The API's view of a job. `service.adaptation.card.reading` adds its sections, which need the store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from service.about import NOTICE
from service.database import Job
from service.database.job_states import JobState
from service.job_kinds import KindName
from service.jobs import records
from service.jobs.presence import presence
from service.jobs.sections import Section
from service.jobs.status import Status, passed, status


class CandidateView(BaseModel):
    """The version that a job published. It serves no hospital until it is assigned."""

    reference: str = Field(description="`name@version`; `/segment` and `/classify` accept it for review.")
    name: str
    version: int
    digest: str


class JobSummary(BaseModel):
    """A job, in a list."""

    id: str
    kind: KindName
    state: JobState
    status: Status
    hospital: str | None
    model: str | None = Field(description="Null for a job that needs none.")
    cohort: str | None = Field(description="The cohort that it works on; null for a job that needs none.")
    attempt: int = Field(
        description="Number of workers that have started it; more than one if a worker was lost."
    )
    queue_position: int | None = Field(
        description="Number of jobs of the same hospital that workers take before it; null if it does not "
        "wait. A job of no hospital counts those of its maker."
    )
    progress: dict[str, Any] = Field(
        description="`stage`, and the progress within it: `epoch` of `epochs`, or `window` of `windows`, "
        "those of a volume that are done; `seconds_left`, an estimate of adapting and judging, or of "
        "segmenting, where there is one. A job that waits for a PACS has `why` and `retry_at`."
    )
    passed: bool | None = Field(
        None, description="Whether the gate, or masks, accepted the job's candidate; null without a verdict."
    )
    reason: str | None = Field(description="Why the job ended as it did; null if nothing went wrong.")
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class JobView(JobSummary):
    """A job. `fell_back`: the adaptation was stopped or no epoch was better, so step 0 was kept."""

    parent: str | None = Field(description="Digest of the artefact to adapt, or that answers.")
    options: dict[str, Any]
    epochs: list[dict[str, Any]] = Field(description="Each epoch's losses, and whether it was safe.")
    coefficients: dict[str, Any] | None = Field(
        description="`values[layer][model]` for `layers` and `models`: the share of each "
        "model in each layer, in the published version or the latest epoch."
    )
    candidate: CandidateView | None
    gate: dict[str, Any] | None = Field(description="The verdict on the candidate, check by check.")
    result: dict[str, Any] | None
    sections: list[Section] = Field(
        description="What its card says, also while it runs: the gate, the epochs, and what the kind of the "
        "model has."
    )
    warnings: list[str] = Field(description="Warnings about the candidate.")
    no_worker: str | None = Field(
        description="Why no worker takes a job that waits: none is running, or the last went silent. Null "
        "otherwise."
    )
    device_class: Literal["cpu", "cuda"] | None = Field(
        None,
        description="Only workers on this device take the job: `LOCUM_JOBS_ON` when it was made. Null: any. "
        "`result.computed_on` says where it ran.",
    )
    files_expire_at: datetime = Field(description="When pictures, checkpoint and result expire.")
    request: str | None = Field(description="`Locum-Request` of the request that created the job.")
    notice: str = NOTICE


def summary(session: Session, job: Job) -> JobSummary:
    """Build the summary, with the job's position in the queue."""
    return JobSummary(**_common(session, job))


def fields(session: Session, job: Job, epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields of its `JobView` but `sections`; `epochs` are the data of its events."""
    candidate = None
    if job.candidate_name is not None and job.candidate_version is not None:
        candidate = CandidateView(
            reference=f"{job.candidate_name}@{job.candidate_version}",
            name=job.candidate_name,
            version=job.candidate_version,
            digest=job.candidate_digest or "",
        )
    return _common(session, job) | {
        "parent": job.parent or None,
        "options": job.options,
        "epochs": _epochs(epochs),
        "coefficients": _coefficients(job, epochs),
        "candidate": candidate,
        "gate": job.gate,
        "result": job.result,
        "warnings": records.warnings_of(session, job.id),
        "no_worker": presence(session, job.device_class).absence if job.state == "queued" else None,
        "device_class": job.device_class,
        "files_expire_at": job.expires_at,
        "request": job.request_id,
    }


def _common(session: Session, job: Job) -> dict[str, Any]:
    position = records.queue_position(session, job)
    return {
        "id": job.id,
        "kind": job.kind,
        "state": job.state,
        "status": status(job, position),
        "hospital": job.hospital,
        "model": job.model or None,
        "cohort": job.cohort,
        "attempt": job.attempt,
        "queue_position": position,
        "progress": job.progress,
        "passed": passed(job),
        "reason": job.reason,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
    }


def _epochs(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    # An epoch that was repeated, because the attempt before was lost before its checkpoint, counts once.
    by_number = {data.get("epoch"): data for data in found}
    return [
        {name: value for name, value in data.items() if name != "coefficients"} for data in by_number.values()
    ]


def _coefficients(job: Job, found: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    sources = (data.get("coefficients") for data in (job.result or {}, *reversed(found)))
    return next((each for each in sources if each and isinstance(each, dict)), None)
