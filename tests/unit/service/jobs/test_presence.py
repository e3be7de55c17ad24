"""Which workers run, went silent or ended."""

from __future__ import annotations

import os
import threading
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta

from service.database import Database, Worker, database_now
from service.jobs.presence import SILENT_SECONDS, Beating, presence, record


def seen_ago(database: Database, name: str, seconds: float) -> None:
    with database.write() as session:
        then = database_now(session) - timedelta(seconds=seconds)
        session.add(Worker(name=name, started_at=then, seen_at=then))


def test_no_worker_was_ever_seen(database: Database) -> None:
    with database.read() as session:
        found = presence(session)
    assert (found.running, found.silent, found.last_seen) == (0, 0, None)
    assert found.absence is not None
    assert found.absence.startswith("no worker is running")


def test_worker_without_a_recent_beat_is_silent_until_it_beats_again(database: Database) -> None:
    seen_ago(database, "one:1", SILENT_SECONDS + 5)
    with database.read() as session:
        found = presence(session)
    assert (found.running, found.silent) == (0, 1)
    assert found.absence is not None
    assert f"{found.last_seen:%Y-%m-%d %H:%M:%S}" in found.absence
    with database.write() as session:
        record(session, "one:1", runs=True)
    with database.read() as session:
        found = presence(session)
    assert (found.running, found.silent, found.absence) == (1, 0, None)


def test_jobs_for_a_gpu_wait_for_a_worker_with_one(database: Database) -> None:
    with database.write() as session:
        record(session, "one:1", runs=True, device_class="cpu")
    with database.read() as session:
        assert presence(session, "cpu").running == presence(session).running == 1
        absence = presence(session, "cuda").absence
    assert absence is not None
    assert absence.startswith("no worker with a GPU is running yet: ")
    assert "LOCUM_DEVICE=cuda" in absence


def test_worker_that_ends_is_forgotten_at_once_and_a_killed_one_after_a_day(database: Database) -> None:
    seen_ago(database, "killed:1", 25 * 3600)
    with database.write() as session:
        record(session, "ends:2", runs=True)
        record(session, "ends:2", runs=False)
    with database.read() as session:
        assert presence(session).last_seen is None


def test_beating_worker_is_seen_until_its_block_ends(database: Database) -> None:
    beaten = threading.Event()

    class Seen(nullcontext[Database]):
        def __exit__(self, *_: object) -> None:
            beaten.set()

    with Beating(lambda: Seen(database), "here:1"):
        assert beaten.wait(60)
        with database.read() as session:
            assert presence(session).running == 1
    with database.read() as session:
        assert presence(session).running == 0


def test_process_is_forked_between_beats(database: Database) -> None:
    begun, ended = threading.Event(), threading.Event()

    class Slow(nullcontext[Database]):
        def __enter__(self) -> Database:
            begun.set()
            time.sleep(0.5)
            return super().__enter__()

        def __exit__(self, *_: object) -> None:
            ended.set()

    with Beating(lambda: Slow(database), "here:1"), warnings.catch_warnings():
        # Python's own warning of forks beside threads.
        warnings.simplefilter("ignore")
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(not ended.is_set())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
