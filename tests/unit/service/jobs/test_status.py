"""The words of a job's state: what it does or waits for, and what it has made."""

from __future__ import annotations

from typing import Any

import pytest

from service.database import Job
from service.jobs.status import passed, status


def job(state: str, *, kind: str = "adaptation", made: str | None = None, **progress: Any) -> Job:
    return Job(kind=kind, state=state, progress=progress, candidate_name=made)


@pytest.mark.parametrize(
    ("found", "ahead", "doing"),
    [
        (job("queued"), 3, "3 ahead of it"),
        (job("queued"), 0, "waiting for a worker"),
        (job("running"), None, "waiting for a worker"),
        (
            job("running", stage="joining", epoch=2, epochs=9, seconds_left=40),
            None,
            "learning from the masks, epoch 2 of 9, about 40 s left",
        ),
        (job("running", stage="judging", seconds_left=600), None, "judging the candidate, about 10 min left"),
        (job("running", stage="adapting", seconds_left=9000), None, "adapting, about 2.5 h left"),
        (
            job("running", stage="measuring"),
            None,
            "measuring how far the scans are from the federation's, and adapting",
        ),
        (
            job("running", kind="pacs-cohort", stage="fetching", series=2, of=5),
            None,
            "fetching from the PACS, series 2 of 5",
        ),
        (
            job("queued", kind="pacs-segment", stage="waiting", why="it is down"),
            0,
            "waiting for the PACS: it is down",
        ),
        # It has no PACS to wait for.
        (
            job("queued", stage="waiting", why="the files cannot be reached"),
            0,
            "waiting: the files cannot be reached",
        ),
        # Of another version of the worker, and with fields that are none.
        (job("running", stage="weighing", epoch="two", epochs=9, seconds_left="few"), None, "weighing"),
        (job("succeeded", stage="publishing"), None, None),
    ],
)
def test_status_says_what_the_job_does(found: Job, ahead: int | None, doing: str | None) -> None:
    assert status(found, ahead).doing == doing


def test_only_a_job_that_made_a_candidate_says_so() -> None:
    made, scan = status(job("succeeded", made="brain.at-dune"), None), status(job("succeeded"), None)
    assert (made.words, scan.words) == ("Made a candidate", "Finished")
    assert made.tone == "plain"


@pytest.mark.parametrize(
    ("verdict", "words", "tone"),
    [(True, "Candidate passed", "good"), (False, "Candidate rejected", "bad")],
)
def test_list_says_the_verdict_on_a_candidate(verdict: bool, words: str, tone: str) -> None:
    found = job("succeeded", made="brain.at-dune")
    found.gate = {"passed": verdict, "checks": []}
    assert (status(found, None).words, status(found, None).tone) == (words, tone)
    assert passed(found) is verdict
