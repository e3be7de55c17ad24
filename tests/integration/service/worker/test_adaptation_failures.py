"""Adaptation jobs that cannot be done end in `failed`, say why, and publish nothing."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import select

from model_store.errors import ArtefactWithdrawn
from model_store.manifest import WEIGHTS
from service.cohorts import cohorts
from service.database import Cohort, Job, JobEvent
from service.errors import GpuUnusable
from service.jobs import leases
from service.settings import Settings
from service.worker import cohort_job, runner
from service.worker.attempt import Attempt, AttemptOutcome
from service.worker.candidate import publish
from service.worker.runner import run_job, run_next
from tests.helpers.service.routing_federation import outside_scans
from tests.helpers.service.workplace import Workplace, draft_of, opened


@pytest.fixture
def place(tmp_path: Path, routing_store: Path) -> Iterator[Workplace]:
    with opened(tmp_path, routing_store) as opened_place:
        yield opened_place


def withdrawn(place: Workplace, job_id: str) -> None:
    place.store.withdraw("organ@1", actor="ada", reason="a site withdrew")


def withdrawn_part(place: Workplace, job_id: str) -> None:
    place.store.withdraw("organ.birch@1", actor="ada", reason="a site withdrew")


def damaged(place: Workplace, job_id: str) -> None:
    path = place.store.open("organ.aster").path / WEIGHTS
    path.chmod(0o600)
    path.write_bytes(bytes(path.stat().st_size))


def deleted(place: Workplace, job_id: str) -> None:
    with place.database.write() as session:
        cohort = session.get(Cohort, place.job(job_id).cohort)
        assert cohort is not None
        cohort.deleted_at = cohort.created_at


def lost(place: Workplace, job_id: str) -> None:
    for path in (place.settings.state_dir / "cohorts").glob("*/*"):
        path.unlink()


def changed(place: Workplace, job_id: str) -> None:
    for path in (place.settings.state_dir / "cohorts").glob("*/*"):
        path.write_bytes(b"other bytes")


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        (withdrawn, r"'organ@1' was withdrawn by ada .*a site withdrew"),
        (withdrawn_part, r"'organ.birch@1' was withdrawn"),
        (damaged, r"organ.aster@1: weights.safetensors: expected sha256"),
        (deleted, r"the scans of cohort \w+ were deleted"),
        (lost, r"scan [0-9a-f]{12} is not stored any more"),
        (changed, r"scan [0-9a-f]{12} was changed where it is stored"),
    ],
)
def test_job_with_a_vanished_input_fails_with_a_reason(
    place: Workplace, happens: Callable[[Workplace, str], None], says: str
) -> None:
    job_id = place.adaptation(place.cohort(outside_scans(1)))
    happens(place, job_id)
    assert_failed(place, job_id, says)


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        ("in colour", r"scan DIGEST: .*colour"),
        ("no scan", r"scan DIGEST: "),
        (lost, r"scan DIGEST is not stored any more"),
        (changed, r"scan DIGEST was changed where it is stored"),
    ],
)
def test_failed_job_names_its_scan_by_digest_and_never_by_name(
    place: Workplace,
    make_png: Callable[..., bytes],
    caplog: pytest.LogCaptureFixture,
    happens: str | Callable[[Workplace, str], None],
    says: str,
) -> None:
    name, pixels = "MUELLER^HANS 1961-03-04.png", np.zeros((32, 32, 3), np.uint8)
    pixels[..., 0] = np.arange(32)
    scan = b"nothing that is a scan" if happens == "no scan" else make_png(pixels)
    cohort = place.cohort({name: scan})
    job = place.adaptation(cohort)
    if callable(happens):
        happens(place, job)
    with caplog.at_level("INFO", "locum"):
        assert_failed(place, job, says.replace("DIGEST", hashlib.sha256(scan).hexdigest()[:12]))
    assert f"job {job}: failed" in caplog.text
    assert name not in caplog.text
    # What is left after the deletion of all that can be deleted.
    cohorts.remove(place.database, place.settings, "dune", cohort)
    place.folder(job).delete()
    with place.database.read() as session:
        rows = [session.execute(select(table)).all() for table in (Job.__table__, JobEvent.__table__)]
    assert all(rows)
    assert "MUELLER" not in repr(rows)


def test_job_with_another_kind_no_scan_or_invalid_options_fails(place: Workplace) -> None:
    cohort = place.cohort(outside_scans(1))
    model = place.store.open("organ.global").digest
    assert_failed(place, place.adaptation(cohort, parent=model), "only these can be adapted")
    assert_failed(place, place.adaptation(place.cohort({})), "has no scan")
    assert_failed(place, place.adaptation(cohort, options={"epochs": 0}), "epochs")


def test_publishing_a_candidate_of_a_withdrawn_parent_is_rejected(place: Workplace) -> None:
    job_id = place.adaptation(place.cohort(outside_scans(1)))
    lease = leases.claim(place.database, job_id, "worker", place.settings)
    assert lease is not None
    loaded = place.loaded()
    withdrawn(place, job_id)
    draft = draft_of(loaded)
    with pytest.raises(ArtefactWithdrawn):
        publish(Attempt(place.database, lease, place.settings), place.store, draft, gate={}, result={})
    assert place.candidates() == []


def test_job_above_its_time_limit_fails_with_a_reason(place: Workplace) -> None:
    job_id = place.adaptation(place.cohort(outside_scans(1)), options={"epochs": 200})

    def too_long(*_: object) -> None:
        raise SoftTimeLimitExceeded

    def tell() -> None:
        while not place.events(job_id, "epoch"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    # As Celery tells the process of a task.
    before = signal.signal(signal.SIGUSR1, too_long)
    teller = threading.Thread(target=tell, daemon=True)
    try:
        teller.start()
        assert_failed(place, job_id, r"took longer than a job may \(6 h\) while adapting")
    finally:
        teller.join()
        signal.signal(signal.SIGUSR1, before)


def assert_failed(place: Workplace, job_id: str, says: str) -> None:
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert job.state == "failed"
    assert job.reason is not None
    assert re.search(says, job.reason), job.reason
    assert place.candidates() == []


def test_full_gpu_is_said_with_how_many_scans_would_fit(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = place.adaptation(place.cohort(outside_scans(4)))

    def fill(attempt: Attempt) -> AttemptOutcome:
        attempt.set_stage("adapting")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 ...")

    gib = 2**30
    monkeypatch.setattr(cohort_job, "run_adaptation", fill)
    monkeypatch.setattr(runner, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 * gib, 10 * gib))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 4 * gib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7 * gib)
    assert_failed(
        place, job_id, r"while adapting: the GPU has too little memory: .*of these 4 scans, about 2"
    )


def test_process_with_a_lost_gpu_leaves_its_job_to_another(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, lost = place.adaptation(place.cohort(outside_scans(1))), list[str]()

    def poison(_: Attempt) -> AttemptOutcome:
        lost.append("now")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def check(_: Settings) -> None:
        if lost:
            raise GpuUnusable("the GPU cuda does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(cohort_job, "run_adaptation", poison)
        patched.setattr(runner, "check_gpu", check)
        with pytest.raises(GpuUnusable):
            run_job(job_id, place.settings)
        # It claims nothing more.
        with pytest.raises(GpuUnusable):
            run_next(job_id, place.settings)
    assert place.job(job_id).state == "running"
    # As one with a killed worker: its lease expires, and another does it.
    place.expire(job_id)
    run_job(job_id, place.settings)
    assert place.job(job_id).state in ("succeeded", "fell_back")
    assert place.job(job_id).result["computed_on"]["device"] == "cpu"


def test_error_with_a_gpu_that_answers_ends_the_job(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, checked = place.adaptation(place.cohort(outside_scans(1))), list[Settings]()

    def fail(_: Attempt) -> AttemptOutcome:
        raise RuntimeError("a shape")

    monkeypatch.setattr(cohort_job, "run_adaptation", fail)
    monkeypatch.setattr(runner, "check_gpu", checked.append)
    assert_failed(place, job_id, "an unexpected RuntimeError while preparing")
    assert len(checked) == 1
