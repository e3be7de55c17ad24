"""The invariants see what they are to see: each is broken by hand, in a service without processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.faults.invariants import violations
from benchmarks.faults.service import HOSPITAL, Service
from benchmarks.faults.space import NAME, publish_space
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest
from model_store.store import Store
from service.catalog.adapted import adapted_name
from service.cohorts import cohorts
from service.database import CohortScan, Hospital, Job, upgrade
from service.database.job_states import JobState
from service.jobs import records
from service.jobs.files import JobFolder
from tests.helpers.model_store.graphs import graph_of
from tests.helpers.service.queued import queued


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("space") / "store"
    publish_space(Store(root))
    return root


@pytest.fixture
def service(space: Path, tmp_path: Path) -> Iterator[Service]:
    shutil.copytree(space, tmp_path / "store")
    made = Service(tmp_path / "store", tmp_path / "state")
    made.settings.spool.mkdir(parents=True)
    (made.settings.store / ".staging").mkdir(exist_ok=True)
    upgrade(made.database)
    now = datetime.now(UTC)
    with made.database.write() as session:
        session.add(Hospital(id=HOSPITAL, name="Outside", site=None, created_at=now, updated_at=now))
    with made.database.write() as session:
        made.cohort = cohorts.create(session, made.settings, HOSPITAL).id
    yield made
    made.client.close()
    made.database.dispose()


def new_job(service: Service, *states: JobState, reason: str | None = None) -> str:
    with service.database.write() as session:
        job = queued(
            session,
            service.settings,
            kind="adaptation",
            hospital=HOSPITAL,
            model=NAME,
            parent="sha256:0",
            cohort=service.cohort,
            options={},
        )
        for state in states:
            job.attempt = job.token = int(state == "running") or job.attempt
            records.transition(session, job, state, reason)
    service.accepted.append(job.id)
    return job.id


def publish(service: Service, run: str, weights: bytes = b"weights", job: str | None = None) -> None:
    store = Store(service.settings.store)
    part = store.open(f"{NAME}.global").manifest
    assert isinstance(part, ModelManifest)
    lineage = Lineage(method="test", run=run, sites=("a",), rounds=1, seed=len(store.versions.names()))
    manifest = part.model_copy(
        update={
            "name": adapted_name(NAME, HOSPITAL),
            "part_of": None,
            "role": "hospital",
            "hospital": HOSPITAL,
            "lineage": lineage,
        }
    )
    made = store.publish(manifest, {WEIGHTS: weights, GRAPH: graph_of("graph")})
    with service.database.write() as session:
        row = session.get(Job, job or run)
        if row is not None:
            row.gate = {}
            row.candidate_name, row.candidate_version = made.name, made.version
            row.candidate_digest = made.digest


def done(service: Service, weights: bytes = b"weights") -> str:
    job = new_job(service, "running", "succeeded")
    publish(service, job, weights)
    return job


def test_what_went_well_violates_nothing(service: Service) -> None:
    done(service)
    done(service)
    new_job(service, "cancelled", reason="before it began")
    new_job(service, "running", "failed", reason="it could not be done")
    assert violations(service) == []


def lost(service: Service) -> None:
    service.accepted.append("f" * 32)


def endless(service: Service) -> None:
    new_job(service)


def wordless(service: Service) -> None:
    new_job(service, "running", "failed")


def held(service: Service) -> None:
    with service.database.write() as session:
        records.get(session, done(service)).owner = "somebody:1"


def jumped(service: Service) -> None:
    job = new_job(service, "cancelled", reason="why")
    with service.database.write() as session:
        for state in ("running", "cancelled"):
            records.append_event(session, records.get(session, job), "state", {"state": state, "attempt": 0})


def miscounted(service: Service) -> None:
    job = done(service)
    with service.database.write() as session:
        records.get(session, job).attempt = 2


def told_twice(service: Service) -> None:
    job = new_job(service, "running")
    with service.database.write() as session:
        for _ in range(2):
            records.append_event(session, records.get(session, job), "epoch", {"epoch": 1})
        records.transition(session, records.get(session, job), "failed", "why")


def published_twice(service: Service) -> None:
    publish(service, done(service), b"other weights")


def published_by_nobody(service: Service) -> None:
    publish(service, "f" * 32)


def unpublished(service: Service) -> None:
    new_job(service, "running", "succeeded")


def different(service: Service) -> None:
    done(service, b"one model")
    done(service, b"another")


def damaged(service: Service) -> None:
    path = Store(service.settings.store).open(f"{NAME}.a").path / WEIGHTS
    path.chmod(0o600)
    path.write_bytes(b"rot")


def staged(service: Service) -> None:
    (service.settings.store / ".staging" / "half").mkdir()


def scanless(service: Service) -> None:
    now = datetime.now(UTC)
    with service.database.write() as session:
        row = CohortScan(
            cohort=service.cohort, name="a", sha256="0" * 64, size=1, format="png", created_at=now
        )
        session.add(row)


def spooled(service: Service) -> None:
    (service.settings.spool / "upload-1").touch()


def unexpected(service: Service) -> None:
    service.expect(False, "it rained")


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lost, "was accepted and is not there"),
        (endless, "is queued after attempt 0"),
        (wordless, "failed without a reason"),
        (held, "its lease is not given up"),
        (jumped, "went from cancelled to running"),
        (miscounted, "was claimed as [1], and is at attempt 2"),
        (told_twice, "reported an epoch twice: [1, 1]"),
        (published_twice, "published 2 versions"),
        (published_by_nobody, "which does not exist"),
        (unpublished, "candidate or verdict is missing"),
        (different, "2 different models came of one adaptation"),
        (damaged, "a version does not open"),
        (staged, "1 half versions"),
        (scanless, "is not stored as it was uploaded"),
        (spooled, "left in the spool"),
        (unexpected, "it rained"),
    ],
)
def test_what_is_broken_is_seen(service: Service, break_it: Callable[[Service], None], says: str) -> None:
    break_it(service)
    assert any(says in violation for violation in violations(service)), violations(service)


def test_what_a_job_needed_does_not_outlive_it(service: Service) -> None:
    folder = JobFolder(service.settings.open_files(), done(service))
    folder.write(folder.CHECKPOINT, b"left by a worker that was killed at the very end")
    assert violations(service) == []
    assert folder.CHECKPOINT not in folder.names
