"""A service that is killed while it answers: each answer that a client has left one row of each kind."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from sqlalchemy import func, select

from benchmarks.harness.forked import Forked
from locum.demo.service_process import free_port
from service.audit import trail
from service.database import AuditRow, Database, Observation, ObservedLabel, Watch
from service.watch.watcher import look
from tests.helpers.service.api import NO_REDIS
from tests.helpers.waiting import wait_for

PICTURES, CLIENTS = 300, 6
# So many answers have arrived at each kill.
KILLS = (50, 150)


class Killed:
    """A service that is started again on its port after each kill."""

    def __init__(self, store: Path, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LOCUM_")}
        self._environment = inherited | {
            **{"LOCUM_STORE": str(store), "LOCUM_STATE_DIR": str(folder / "state"), "LOCUM_PORT": str(port)},
            **{"LOCUM_REDIS_URL": NO_REDIS, "LOCUM_EMBEDDED_WORKER": "false", "LOCUM_DEVICE": "cpu"},
            # The watch looks all the time, so that it is killed, too.
            **{"LOCUM_THREADS": "1", "LOCUM_RECONCILE_EVERY_SECONDS": "0.2", "LOCUM_LOG_FORMAT": "plain"},
        }
        self._log = folder / "log"
        self._process: Forked | None = None

    def start(self) -> None:
        self._process = Forked("service", [], self._log, self._environment)
        wait_for(self._answers)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        assert self._process.wait(30) == -9

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            return httpx.get(f"{self.url}/health/live").is_success
        except httpx.TransportError:
            return False


@pytest.fixture
def service(publish_bright: Callable[[Path], object], tmp_path: Path) -> Iterator[Killed]:
    publish_bright(tmp_path / "store")
    service = Killed(tmp_path / "store", tmp_path)
    service.start()
    try:
        yield service
    finally:
        service.kill()


@contextmanager
def opened(folder: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{folder / 'state/locum.db'}")
    try:
        yield database
    finally:
        database.dispose()


def test_killed_service_leaves_one_observation_and_one_audit_row_of_each_answer(
    service: Killed, make_png: Callable[..., bytes], tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    pictures = [make_png(random.integers(0, 200, (32, 32)).astype(np.uint8)) for _ in range(PICTURES)]
    waiting, acknowledged, cut = iter(pictures), list[str](), itertools.count()
    lock, arrived, over = threading.Lock(), threading.Condition(), threading.Event()
    httpx.put(f"{service.url}/hospitals/north", json={"name": "North"}).raise_for_status()

    def client() -> None:
        with httpx.Client(base_url=service.url, timeout=30) as http:
            while True:
                with lock:
                    picture = next(waiting, None)
                if picture is None:
                    return
                while (request := ask(http, picture)) is None:
                    assert not over.is_set()
                    time.sleep(0.02)
                with arrived:
                    acknowledged.append(request)
                    arrived.notify_all()

    def ask(http: httpx.Client, picture: bytes) -> str | None:
        """The id of the request of an answer that came whole."""
        try:
            answer = http.post(
                "/segment", files={"scan": ("scan", picture)}, data={"hospital": "north", "output": "json"}
            )
        except httpx.ConnectError:
            return None
        except httpx.TransportError:
            next(cut)
            return None
        assert answer.status_code == 200, answer.text
        assert answer.json()["receipt"]["request"] == answer.headers["locum-request"]
        return answer.headers["locum-request"]

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            for count in KILLS:
                with arrived:
                    assert arrived.wait_for(lambda count=count: len(acknowledged) >= count, 60)
                service.kill()
                service.start()
            for each in clients:
                each.result(60)
        finally:
            over.set()
    assert len(acknowledged) == len(set(acknowledged)) == PICTURES
    # A kill that met no request would have shown nothing.
    cuts = next(cut)
    assert cuts > 0

    with opened(tmp_path) as database, database.snapshot() as session:
        observed = Counter(session.scalars(select(Observation.request)))
        answered = (AuditRow.action == "scan.segmented", AuditRow.outcome == 200)
        audited = Counter(session.scalars(select(AuditRow.request).where(*answered)))
        assert set(observed.values()) == {1}
        assert audited == observed
        assert set(acknowledged) <= set(observed)
        # Beyond them are answers that were cut off on their way.
        assert len(observed) - PICTURES <= cuts
        assert session.scalar(select(func.count()).select_from(ObservedLabel)) == len(observed)
        assert trail.verify(session) is not None
    with opened(tmp_path) as database:
        wait_for(lambda: look(database) == 0)
        with database.read() as session:
            (watch,) = session.scalars(select(Watch))
    # A picture that was sent again is the same scan.
    assert watch.answers == PICTURES
