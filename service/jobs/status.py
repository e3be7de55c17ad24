"""The state of a job in words, for lists and cards; its wire value is `state`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, Field

from service.database import Job
from service.database.job_states import TERMINAL
from service.job_kinds import KINDS
from service.jobs.sections import Tone

_STATES: Final[Mapping[str, tuple[str, Tone, str]]] = {
    "queued": ("Waiting", "plain", "Waiting for a worker."),
    "running": ("Running", "accent", "Under way."),
    "cancelling": ("Stopping", "warn", "Being cancelled."),
    # Plain, where no gate judged what it made.
    "succeeded": ("Finished", "plain", "Finished."),
    "fell_back": (
        "Kept the start",
        "warn",
        "Nothing safer or better than step 0 was found, so step 0 was kept.",
    ),
    "failed": ("Failed", "bad", "Failed."),
    "cancelled": ("Cancelled", "plain", "Cancelled."),
}
# What a job made, by its gate's verdict.
_MADE: Final[Mapping[bool | None, tuple[str, Tone]]] = {
    True: ("Candidate passed", "good"),
    False: ("Candidate rejected", "bad"),
    None: ("Made a candidate", "plain"),
}


def passed(job: Job) -> bool | None:
    """Whether the job's candidate passed its gate; None without a verdict."""
    found = (job.gate or {}).get("passed")
    return found if isinstance(found, bool) else None


class Status(BaseModel):
    """The state of a job in words."""

    words: str = Field(description="A word or two.")
    tone: Tone
    sentence: str
    doing: str | None = Field(description="What the job does or waits for; null once it has finished.")


def status(job: Job, queue_position: int | None) -> Status:
    """The words of a job. A stage that another version of the worker reports is shown by its name."""
    words, tone, sentence = _STATES[job.state]
    if job.state == "succeeded" and job.candidate_name is not None:
        words, tone = _MADE[passed(job)]
    doing = None if job.state in TERMINAL else _doing(job, queue_position)
    return Status(words=words, tone=tone, sentence=sentence, doing=doing)


def _doing(job: Job, queue_position: int | None) -> str:
    progress: Mapping[str, Any] = job.progress
    stage, why = progress.get("stage"), progress.get("why")
    if not stage:
        return f"{queue_position} ahead of it" if queue_position else "waiting for a worker"
    parts = [KINDS[job.kind].stages.get(str(stage), str(stage))]
    for unit, place, total in (
        ("epoch", "epoch", "epochs"),
        ("window", "window", "windows"),
        ("series", "series", "of"),
    ):
        if isinstance(progress.get(place), int) and isinstance(progress.get(total), int):
            parts.append(f"{unit} {progress[place]} of {progress[total]}")
    left = progress.get("seconds_left")
    if isinstance(left, int):
        parts.append(f"about {_about(left)} left")
    return f"{', '.join(parts)}{f': {why}' if why else ''}"


def _about(seconds: int) -> str:
    if seconds < 90:
        return f"{max(1, seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
