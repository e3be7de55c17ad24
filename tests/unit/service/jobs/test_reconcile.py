"""Whatever is killed or flushed, each job ends in a state with a reason."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from service.database import Database, Job, engine
from service.expiry import expire
from service.jobs import leases, reconcile, records, submission
from service.jobs.files import JobFolder
from service.jobs.leases import Lease, claim, fenced, finish, postpone, renew
from service.jobs.reconcile import Reconciler
from service.runtime.broker import Broker
from service.runtime.metrics import Metrics
from service.runtime.queue import RUN_JOB, VERIFY_STORE, Queue
from service.settings import Settings
from service.watch.watcher import look
from tests.helpers.service.queued import queued

pytestmark = pytest.mark.process


class Bench:
    """A database, a Redis and the code that reconciles jobs, all real."""

    def __init__(self, database: Database, state_dir: Path) -> None:
        self.database = database
        self.settings = Settings(state_dir=state_dir, redis_url=None, max_attempts=2)
        self.broker = Broker(self.settings)
        self.queue = Queue(self.settings, self.broker)
        self.metrics = Metrics()
        self.reconciler = self.another(self.metrics)

    def another(self, metrics: Metrics) -> Reconciler:
        expiring = partial(expire, self.database, self.settings)
        looking = partial(look, self.database)
        return Reconciler(self.settings, self.database, self.queue, metrics, expiring, looking)

    def submit(self, **fields: Any) -> str:
        asked = {"kind": "scan", "hospital": None, "model": "brain", "parent": "sha256:" + "0" * 64}
        with self.database.write() as session:
            job = queued(session, self.settings, **asked, cohort=None, options={}, **fields)
        submission.send(self.database, self.queue, job.id)
        return job.id

    def take(self, job_id: str) -> Lease:
        lease = claim(self.database, job_id, "w1", self.settings)
        assert lease is not None
        return lease

    def set(self, job_id: str, **columns: Any) -> None:
        with self.database.write() as session:
            session.execute(update(Job).where(Job.id == job_id).values(**columns))

    def lose(self, lease: Lease) -> None:
        """The worker dies, and its lease runs out."""
        self.set(lease.job_id, lease_until=datetime.now(UTC) - timedelta(seconds=1))

    def age(self, job_id: str) -> None:
        """The message was sent longer ago than `resend_seconds`."""
        self.set(job_id, queued_at=datetime.now(UTC) - timedelta(seconds=self.settings.resend_seconds + 1))

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            return records.get(session, job_id)

    def messages(self) -> list[list[Any]]:
        found = self.broker.client.lrange("locum:adaptation", 0, -1)
        headers = [json.loads(message)["headers"] for message in reversed(found)]  # type: ignore[arg-type]
        return [[header["task"], header["argsrepr"]] for header in headers]

    def sent(self, *job_ids: str) -> bool:
        return self.messages() == [[RUN_JOB, f"('{job_id}',)"] for job_id in job_ids]


@pytest.fixture
def bench(database: Database, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(database, tmp_path / "state")
    made.broker.start()
    yield made
    made.queue.close()
    made.broker.stop()


def test_reconciler_resends_messages_after_a_redis_flush(bench: Bench) -> None:
    first, second = bench.submit(), bench.submit()
    assert bench.sent(first, second)
    bench.broker.client.flushall()
    # Not at once: the message may be on its way through a worker's hands.
    bench.reconciler.look()
    assert bench.messages() == []
    bench.age(first)
    bench.age(second)
    bench.reconciler.look()
    assert bench.sent(first, second)
    # And not again, now that it was.
    bench.reconciler.look()
    assert bench.sent(first, second)


def test_reconciler_does_not_duplicate_queued_messages(bench: Bench) -> None:
    first, second = bench.submit(), bench.submit()
    for _ in range(3):
        bench.age(first)
        bench.age(second)
        bench.reconciler.look()
    assert bench.sent(first, second)


def test_job_accepted_without_redis_is_sent_when_redis_is_back(bench: Bench) -> None:
    before = bench.submit()
    bench.broker.stop()
    job_id = bench.submit()
    assert bench.job(job_id).queued_at is None
    bench.broker.start()
    for _ in range(2):
        # The first may find the connection that broke.
        bench.reconciler.look()
    assert bench.sent(before, job_id)
    assert bench.job(job_id).queued_at is not None


def test_job_of_a_lost_worker_is_requeued(bench: Bench) -> None:
    job_id = bench.submit()
    lease = bench.take(job_id)
    bench.broker.client.flushall()
    bench.reconciler.look()
    assert bench.job(job_id).state == "running"
    bench.lose(lease)
    bench.reconciler.look()
    job = bench.job(job_id)
    assert (job.state, job.owner, job.lease_until, job.reason) == ("queued", None, None, None)
    assert bench.sent(job_id)
    assert bench.take(job_id).token == 2


def test_job_that_lost_max_attempts_workers_fails_with_a_reason(bench: Bench) -> None:
    job_id = bench.submit()
    folder = JobFolder(bench.settings.open_files(), job_id)
    folder.write(folder.INPUT, b"a patient's scan")
    for _ in range(2):
        lease = bench.take(job_id)
        with fenced(bench.database, lease) as (_, job):
            job.progress = {"stage": "adapting"}
        bench.lose(lease)
        bench.reconciler.look()
    job = bench.job(job_id)
    assert job.state == "failed"
    assert job.reason is not None
    assert job.reason.startswith("its worker was lost 2 times, last while adapting")
    assert job.finished_at is not None
    assert not folder.names


def test_cancelling_job_of_a_lost_worker_is_cancelled(bench: Bench) -> None:
    job_id = bench.submit()
    lease = bench.take(job_id)
    with bench.database.write() as session:
        records.cancel(session, job_id)
    bench.reconciler.look()
    assert bench.job(job_id).state == "cancelling"
    bench.lose(lease)
    bench.reconciler.look()
    job = bench.job(job_id)
    assert (job.state, job.reason) == ("cancelled", "cancelled; the worker that ran it was gone")
    # Stopped while it drew, and woken up: what it still writes is a patient's picture of a job that is over.
    folder = JobFolder(bench.settings.open_files(), job_id)
    folder.write("pictures/before-1.png", b"drawn")
    expire(bench.database, bench.settings)
    assert not folder.names


def test_worker_with_a_valid_lease_keeps_its_job(bench: Bench) -> None:
    lease = bench.take(bench.submit())
    bench.reconciler.look()
    finish(bench.database, lease, "succeeded")
    bench.reconciler.look()
    assert bench.job(lease.job_id).state == "succeeded"


# Processes that share an SQLite file share a clock.
BETWEEN_MACHINES = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@contextmanager
def clock_off(seconds: float) -> Iterator[None]:
    """Set this process's clock so many seconds ahead of the database's."""

    class Off(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Off:
            return super().now(tz) + timedelta(seconds=seconds)

    with pytest.MonkeyPatch.context() as patched:
        for module in (engine, leases, reconcile, records):
            patched.setattr(module, "datetime", Off)
        yield


@BETWEEN_MACHINES
def test_reconciler_with_a_clock_off_of_the_database_leaves_a_job_to_its_worker(bench: Bench) -> None:
    lease = bench.take(bench.submit())
    for _ in range(3):
        with clock_off(bench.settings.lease_seconds + 5):
            bench.reconciler.look()
        assert not renew(bench.database, lease).lost
    job = bench.job(lease.job_id)
    assert (job.state, job.attempt) == ("running", 1)


@BETWEEN_MACHINES
def test_lease_and_retry_of_a_worker_with_a_clock_behind_are_by_the_database(bench: Bench) -> None:
    job_id, now = bench.submit(), datetime.now(UTC)
    with clock_off(-3600):
        lease = bench.take(job_id)
        assert not renew(bench.database, lease).lost
        bench.reconciler.look()
        assert bench.job(job_id).state == "running"
        postpone(bench.database, lease, leases.datetime.now(UTC) + timedelta(seconds=60), "no answer")
    job = bench.job(job_id)
    assert job.retry_at is not None
    assert 59 < (job.retry_at - now).total_seconds() < 120
    assert claim(bench.database, job_id, "w2", bench.settings) is None


def test_concurrent_reconcilers_recover_a_job_once(bench: Bench) -> None:
    jobs = [bench.submit() for _ in range(4)]
    for job_id in jobs:
        bench.lose(bench.take(job_id))
    bench.broker.client.flushall()
    others = [bench.another(Metrics()) for _ in range(4)]
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(others))

    def look(reconciler: Reconciler) -> None:
        barrier.wait(60)
        try:
            reconciler.look()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look, args=(one,)) for one in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(bench.messages()) == sorted([RUN_JOB, f"('{job_id}',)"] for job_id in jobs)
    with bench.database.read() as session:
        for job_id in jobs:
            states = [event.data["state"] for event in records.events_of_type(session, job_id, "state")]
            assert states == ["queued", "running", "queued"]


def test_reconciler_continues_without_redis(bench: Bench) -> None:
    lost, submitted = bench.take(bench.submit()), bench.submit()
    bench.broker.stop()
    bench.lose(lost)

    async def scenario(until: Callable[[], bool]) -> None:
        watching = asyncio.create_task(bench.reconciler.watch())
        async with asyncio.timeout(60):
            while not until():
                assert not watching.done()
                await asyncio.sleep(0.02)
        watching.cancel()

    asyncio.run(scenario(lambda: bench.job(lost.job_id).state == "queued"))
    bench.broker.start()
    bench.broker.client.flushall()
    bench.age(submitted)
    bench.reconciler.look()
    assert bench.sent(lost.job_id, submitted)


def test_reconciler_exports_job_metrics(bench: Bench) -> None:
    read = bench.metrics.registry.get_sample_value
    bench.submit()
    lease = bench.take(bench.submit())
    bench.queue.send(VERIFY_STORE)
    bench.reconciler.look()
    assert read("locum_jobs", {"kind": "scan", "state": "queued"}) == 1
    assert read("locum_jobs", {"kind": "scan", "state": "running"}) == 1
    assert read("locum_jobs", {"kind": "adaptation", "state": "queued"}) == 0
    assert read("locum_queue_messages") == 3
    assert read("locum_job_seconds_count", {"kind": "scan", "state": "succeeded"}) is None
    finish(bench.database, lease, "succeeded")
    for _ in range(2):
        bench.reconciler.look()
    assert read("locum_job_seconds_count", {"kind": "scan", "state": "succeeded"}) == 1
    assert read("locum_jobs", {"kind": "scan", "state": "running"}) == 0


def test_reconciler_logs_an_unexpected_error_and_continues(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Reconciler):
        looks = 0

        def look(self) -> None:
            self.looks += 1
            if self.looks == 1:
                raise KeyError("a fault of ours")
            watching.cancel()

    settings = Settings(state_dir=tmp_path, reconcile_every_seconds=0.01)
    queue = Queue(settings, Broker(settings))
    reconciler = Faulty(settings, database, queue, Metrics(), lambda: None, lambda: None)

    async def watch() -> None:
        nonlocal watching
        watching = asyncio.ensure_future(reconciler.watch())
        with pytest.raises(asyncio.CancelledError):
            await watching

    watching: asyncio.Future[None]
    asyncio.run(watch())
    queue.close()
    assert reconciler.looks == 2
    assert "KeyError: 'a fault of ours'" in caplog.text


def test_undeletable_files_of_a_lost_job_do_not_block_other_jobs(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    leases = [bench.take(bench.submit()) for _ in range(2)]
    for lease in leases:
        bench.set(lease.job_id, attempt=2)
        bench.lose(lease)
    path = bench.settings.state_dir / "jobs" / leases[0].job_id
    path.parent.mkdir(parents=True)
    # No folder, so that removing it as one is an OSError, for root too.
    path.write_bytes(b"")
    bench.reconciler.look()
    assert [bench.job(lease.job_id).state for lease in leases] == ["failed", "failed"]
    assert f"the files of job {leases[0].job_id} cannot be deleted" in caplog.text
