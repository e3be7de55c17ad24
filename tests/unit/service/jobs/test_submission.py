from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database import Database, Job
from service.errors import IdempotencyConflict, QueueFull
from service.jobs import records, submission
from service.jobs.records import Asked
from service.runtime.queue import DEVICE_CLASSES, QUEUE, RUN_JOB, Queue, queue_of
from service.settings import Settings
from tests.helpers.service.queued import queued


def submit(
    database: Database, key: str | None, fingerprint: str, hospital: str = "north", **settings: Any
) -> tuple[Job, bool]:
    asked = Asked(None, key, fingerprint)

    def create(session: Session) -> Job:
        return queued(session, Settings(**settings), asked, kind="scan", hospital=hospital)

    return submission.create_once(database, hospital, asked, create)


def test_fingerprint_ignores_member_order_and_differs_by_value() -> None:
    assert submission.fingerprint({"a": 1, "b": [2]}) == submission.fingerprint({"b": [2], "a": 1})
    assert submission.fingerprint({"a": 1}) != submission.fingerprint({"a": 2})


def test_idempotency_key_with_another_request_is_rejected(database: Database) -> None:
    first, created = submit(database, "k", "f1")
    again, created_again = submit(database, "k", "f1")
    assert (created, created_again, again.id) == (True, False, first.id)
    with pytest.raises(IdempotencyConflict, match=first.id):
        submit(database, "k", "f2")
    other, created = submit(database, "k", "f2", "south")
    assert created
    assert other.id != first.id


def test_concurrent_requests_with_one_key_make_one_job(database: Database) -> None:
    workers = 6
    barrier = threading.Barrier(workers)
    found: list[tuple[str, bool]] = []
    failures: list[BaseException] = []

    def submit_at_once() -> None:
        barrier.wait(60)
        try:
            job, created = submit(database, "k", "f")
            found.append((job.id, created))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=submit_at_once) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len({job_id for job_id, _ in found}) == 1
    assert sorted(created for _, created in found) == [False] * (workers - 1) + [True]
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(Job)) == 1


@pytest.mark.parametrize(
    ("jobs_on", "queue"), [("any", QUEUE), ("cpu", "adaptation.cpu"), ("cuda", "adaptation.cuda")]
)
def test_job_is_sent_to_the_workers_of_its_device(jobs_on: str, queue: str, database: Database) -> None:
    job, _ = submit(database, None, "f", jobs_on=jobs_on)
    sent: list[tuple[Any, ...]] = []

    class Sent:
        def send(self, *arguments: Any, device_class: str | None) -> None:
            sent.append((*arguments, queue_of(device_class)))

    assert submission.send(database, cast("Queue", Sent()), job.id)
    assert sent == [(RUN_JOB, job.id, queue)]
    with database.read() as session:
        for device_class in (None, *DEVICE_CLASSES):
            assert (job.id in records.turns(session, device_class)) == (queue_of(device_class) == queue)


def test_job_above_max_waiting_jobs_is_rejected(database: Database) -> None:
    def submitted(key: str) -> str:
        return submit(database, key, key, max_waiting_jobs=2)[0].id

    first, second = submitted("1"), submitted("2")
    with pytest.raises(QueueFull, match="2 jobs of hospital 'north' wait"):
        submitted("3")
    # What was accepted before is found again, and who runs or is over does not wait.
    assert submitted("2") == second
    with database.write() as session:
        records.transition(session, records.get(session, first, lock=True), "running")
    third = submitted("3")
    with pytest.raises(QueueFull):
        submitted("4")
    with database.write() as session:
        records.cancel(session, third)
    submitted("4")


def test_jobs_of_a_hospital_that_wait_for_its_pacs_delay_no_other_hospital(database: Database) -> None:
    def submitted(key: str, hospital: str) -> str:
        return submit(database, key, key, hospital, max_waiting_jobs=2)[0].id

    postponed = [submitted(key, "north") for key in ("1", "2")]
    with database.write() as session:
        for job_id in postponed:
            records.get(session, job_id).retry_at = datetime.now(UTC) + timedelta(days=1)
    with pytest.raises(QueueFull):
        submitted("3", "north")
    submitted("3", "south")
