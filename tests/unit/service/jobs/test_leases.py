"""One worker at a time, and none that lost its lease writes anything."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from service.database import Database, Job, JobEvent
from service.database.job_states import JobEnd
from service.errors import JobUnknown, LeaseLost
from service.jobs import records
from service.jobs.leases import Lease, RenewState, claim, fenced, finish, postpone, renew
from service.settings import Settings
from tests.helpers.service.queued import queued

SETTINGS = Settings(max_attempts=3)


def submitted(database: Database, **fields: Any) -> str:
    with database.write() as session:
        asked = {"kind": "scan", "hospital": "north", "model": "brain", "parent": "sha256:" + "0" * 64}
        return queued(session, SETTINGS, **{**asked, **fields}).id


def job_of(database: Database, job_id: str) -> Job:
    with database.read() as session:
        return records.get(session, job_id)


def expire(database: Database, lease: Lease) -> None:
    """As if the worker had not been heard of for longer than its lease."""
    with database.write() as session:
        session.execute(
            update(Job)
            .where(Job.id == lease.job_id)
            .values(lease_until=datetime.now(UTC) - timedelta(seconds=1))
        )


def claimed(database: Database, job_id: str, owner: str = "w1") -> Lease:
    lease = claim(database, job_id, owner, SETTINGS)
    assert lease is not None
    return lease


def told(database: Database, job_id: str) -> list[dict[str, Any]]:
    with database.read() as session:
        return [event.data for event in records.events_of_type(session, job_id, "state")]


def test_claim_of_a_queued_job_gives_token_1(database: Database) -> None:
    job_id = submitted(database)
    before = datetime.now(UTC)
    lease = claimed(database, job_id)
    job = job_of(database, job_id)
    assert (lease.token, lease.attempt, job.state, job.owner) == (1, 1, "running", "w1")
    assert job.started_at is not None
    assert before <= job.started_at <= datetime.now(UTC)
    assert job.lease_until is not None
    assert job.lease_until - job.started_at == timedelta(seconds=SETTINGS.lease_seconds)
    assert told(database, job_id) == [
        {"state": "queued", "attempt": 0},
        {"state": "running", "attempt": 1},
    ]


def test_concurrent_claims_have_exactly_one_winner(database: Database) -> None:
    jobs = [submitted(database) for _ in range(5)]
    workers = 6
    barrier = threading.Barrier(workers)
    won: list[str] = []
    failures: list[BaseException] = []

    def race(owner: str) -> None:
        # A connection of its own, as another process would have.
        own = Database(database.url.render_as_string(hide_password=False))
        try:
            for job_id in jobs:
                barrier.wait(60)
                if claim(own, job_id, owner, SETTINGS) is not None:
                    won.append(job_id)
        except BaseException as error:
            failures.append(error)
        finally:
            own.dispose()

    threads = [threading.Thread(target=race, args=(f"w{n}",)) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(won) == sorted(jobs)
    assert [job_of(database, job_id).token for job_id in jobs] == [1] * 5


def test_claim_of_a_taken_ended_or_unknown_job_gives_no_lease(database: Database) -> None:
    job_id = submitted(database)
    lease = claimed(database, job_id)
    assert claim(database, job_id, "w2", SETTINGS) is None
    finish(database, lease, "succeeded")
    assert claim(database, job_id, "w2", SETTINGS) is None
    assert claim(database, "0" * 32, "w2", SETTINGS) is None
    cancelled = submitted(database)
    with database.write() as session:
        records.cancel(session, cancelled)
    assert claim(database, cancelled, "w2", SETTINGS) is None


def test_claim_of_an_expired_lease_gives_a_higher_token(database: Database) -> None:
    job_id = submitted(database)
    first = claimed(database, job_id)
    started = job_of(database, job_id).started_at
    expire(database, first)
    second = claimed(database, job_id, "w2")
    job = job_of(database, job_id)
    assert (second.token, second.attempt, job.owner, job.started_at) == (2, 2, "w2", started)


def test_claim_after_max_attempts_gives_no_lease(database: Database) -> None:
    job_id = submitted(database)
    for _ in range(SETTINGS.max_attempts):
        expire(database, claimed(database, job_id))
    assert claim(database, job_id, "w2", SETTINGS) is None


def test_hospital_with_many_jobs_does_not_delay_the_others(database: Database) -> None:
    many = [submitted(database, hospital="north") for _ in range(20)]
    late = [submitted(database, hospital="south") for _ in range(2)]
    own = submitted(database, hospital=None)
    order = []
    for _ in range(8):
        with database.read() as session:
            (job_id, *_) = records.turns(session)
        finish(database, claimed(database, job_id), "succeeded")
        order.append(job_id)
    assert order == [many[0], late[0], own, many[1], late[1], *many[2:5]]


def test_next_is_the_hospital_with_the_fewest_running_jobs(database: Database) -> None:
    (first, *rest) = [submitted(database, hospital="north") for _ in range(3)]
    late = submitted(database, hospital="south")
    claimed(database, late)
    held = claimed(database, first)
    another = submitted(database, hospital="south")
    finish(database, held, "succeeded")
    with database.read() as session:
        assert records.turns(session) == [rest[0], another]
    with database.write() as session:
        records.get(session, rest[0]).retry_at = datetime.now(UTC) + timedelta(hours=1)
    with database.read() as session:
        assert records.turns(session) == [rest[1], another]


def test_worker_with_a_stale_lease_cannot_write(database: Database) -> None:
    job_id = submitted(database)
    stale = claimed(database, job_id)
    expire(database, stale)
    current = claimed(database, job_id, "w2")

    def write_late() -> None:
        with fenced(database, stale) as (_, job):
            job.progress = {"stage": "stale"}

    with pytest.raises(LeaseLost, match="holds token 1, the job is running under token 2"):
        write_late()
    with pytest.raises(LeaseLost):
        finish(database, stale, "succeeded")
    assert renew(database, stale) == RenewState(lost=True, cancel=False)
    with fenced(database, current) as (_, job):
        job.progress = {"stage": "adapting"}
    finish(database, current, "succeeded", result={"ok": 1}, candidate=("brain.at-north", 1, "sha256:1"))
    with pytest.raises(LeaseLost, match="the job is succeeded"):
        finish(database, stale, "failed", reason="late")
    job = job_of(database, job_id)
    assert (job.state, job.progress, job.result) == ("succeeded", {"stage": "adapting"}, {"ok": 1})
    assert (job.candidate_name, job.candidate_version, job.candidate_digest) == (
        "brain.at-north",
        1,
        "sha256:1",
    )
    assert (job.owner, job.lease_until, job.reason) == (None, None, None)


def test_lease_of_a_requeued_job_is_lost(database: Database) -> None:
    job_id = submitted(database)
    lease = claimed(database, job_id)
    with database.write() as session:
        records.transition(session, records.get(session, job_id, lock=True), "queued")
    assert renew(database, lease).lost
    with pytest.raises(LeaseLost), fenced(database, lease):
        raise AssertionError("must not be reached")


def test_renewed_expired_lease_is_valid_again(database: Database) -> None:
    lease = claimed(database, submitted(database))
    expire(database, lease)
    assert renew(database, lease) == RenewState(lost=False, cancel=False)
    assert claim(database, lease.job_id, "w2", SETTINGS) is None


def test_failing_fenced_write_is_rolled_back(database: Database) -> None:
    lease = claimed(database, submitted(database))

    def fail() -> None:
        with fenced(database, lease) as (session, job):
            job.progress = {"stage": "half"}
            records.append_event(session, job, "progress", {"stage": "half"})
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert job_of(database, lease.job_id).progress == {}
    with database.read() as session:
        assert records.events_of_type(session, lease.job_id, "progress") == []


def test_cancelled_running_job_ends_with_the_reason_of_its_worker(database: Database) -> None:
    job_id = submitted(database)
    lease = claimed(database, job_id)
    with database.write() as session:
        assert records.cancel(session, job_id).state == "cancelling"
        # Asked twice, nothing more happens.
        records.cancel(session, job_id)
    assert renew(database, lease) == RenewState(lost=False, cancel=True)
    finish(database, lease, "cancelled", reason="cancelled while adapting")
    assert [entry["state"] for entry in told(database, job_id)] == [
        "queued",
        "running",
        "cancelling",
        "cancelled",
    ]
    with database.write() as session:
        assert records.cancel(session, job_id).reason == "cancelled while adapting"


def test_claim_of_a_cancelling_job_gives_no_lease(database: Database) -> None:
    lease = claimed(database, submitted(database))
    with database.write() as session:
        records.cancel(session, lease.job_id)
    expire(database, lease)
    assert claim(database, lease.job_id, "w2", SETTINGS) is None


def test_invalid_state_transition_is_rejected(database: Database) -> None:
    lease = claimed(database, submitted(database))
    finish(database, lease, "failed", reason="because")
    with database.write() as session:
        with pytest.raises(ValueError, match="no way leads from failed to queued"):
            records.transition(session, records.get(session, lease.job_id), "queued")
        with pytest.raises(JobUnknown):
            records.cancel(session, "0" * 32)


def test_finished_job_expires_after_the_files_lifetime(database: Database) -> None:
    lease = claimed(database, submitted(database))
    finish(database, lease, "succeeded")
    job = job_of(database, lease.job_id)
    assert job.finished_at is not None
    assert job.expires_at - job.finished_at == timedelta(days=SETTINGS.job_files_lifetime_days)


def test_events_after_an_id_are_returned_in_growing_order(database: Database) -> None:
    lease = claimed(database, submitted(database))
    other = claimed(database, submitted(database))
    for epoch in range(3):
        for one in (lease, other):
            with fenced(database, one) as (session, job):
                records.append_event(session, job, "epoch", {"epoch": epoch})
    with database.read() as session:
        found = records.events_after(session, lease.job_id)
        ids = [event.id for event in found]
        assert ids == sorted(set(ids))
        assert [event.type for event in found] == ["state", "state", "epoch", "epoch", "epoch"]
        rest = records.events_after(session, lease.job_id, ids[2])
        assert [event.data for event in rest] == [{"epoch": 1}, {"epoch": 2}]
        assert {event.job for event in session.query(JobEvent)} == {lease.job_id, other.job_id}


def test_queue_position_counts_earlier_waiting_jobs(database: Database) -> None:
    first, second, third = (submitted(database) for _ in range(3))

    def places() -> list[int | None]:
        with database.read() as session:
            return [records.queue_position(session, records.get(session, j)) for j in (first, second, third)]

    assert places() == [0, 1, 2]
    claimed(database, first)
    assert places() == [None, 0, 1]


def test_queue_position_of_a_hospital_does_not_count_the_jobs_of_others(database: Database) -> None:
    for owner in ("north", "north", None):
        submitted(database, hospital=owner)
    theirs, own = submitted(database, hospital="south"), submitted(database, hospital=None)
    with database.read() as session:
        assert records.queue_position(session, records.get(session, theirs)) == 0
        # The maker's second job of no hospital.
        assert records.queue_position(session, records.get(session, own)) == 1


def test_queue_position_does_not_count_postponed_jobs(database: Database) -> None:
    first, second = (submitted(database) for _ in range(2))
    postpone(database, claimed(database, first), datetime.now(UTC) + timedelta(hours=1), "no answer")
    with database.read() as session:
        assert records.queue_position(session, records.get(session, second)) == 0


@pytest.mark.parametrize("state", ["succeeded", "cancelled"])
@pytest.mark.parametrize(("kind", "gone"), [("scan", True), ("adaptation", False)])
def test_cancelled_scan_job_expires_at_its_end(
    database: Database, kind: str, gone: bool, state: JobEnd
) -> None:
    lease = claimed(database, submitted(database))
    with database.write() as session:
        records.get(session, lease.job_id).kind = kind
        records.cancel(session, lease.job_id)
    finish(database, lease, state, reason="too late, or not")
    assert (job_of(database, lease.job_id).expires_at <= datetime.now(UTC)) is gone
