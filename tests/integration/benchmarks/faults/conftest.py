"""A service of real processes for the faults of one module; after each of them, everything must hold."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from benchmarks.faults.experiment import QUOTA_BYTES
from benchmarks.faults.invariants import violations
from benchmarks.faults.kinds import Scene
from benchmarks.faults.service import Service
from benchmarks.faults.space import publish_space
from benchmarks.faults.workers import forked_api
from model_store.store import Store


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("faults")
    publish_space(Store(root / "store"))
    with Service(
        root / "store",
        root / "state",
        start_api=forked_api,
        lease_seconds=request.module.LEASE_SECONDS,
        cohort_quota_bytes=QUOTA_BYTES,
    ) as service:
        yield service


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    running.until(running.whole)
    yield running
    running.until(running.over)
    assert violations(running) == []


@pytest.fixture
def scene(service: Service) -> Scene:
    return Scene(service, None, Random(0))
