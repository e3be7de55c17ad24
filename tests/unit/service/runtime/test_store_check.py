from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.store import Store
from model_store.task import Task
from service.database import Database
from service.runtime import store_check
from service.runtime.broker import Broker
from service.runtime.metrics import Metrics
from service.runtime.queue import VERIFY_STORE, Queue
from service.runtime.store_check import Verifier, latest_verdict, verify_store
from service.settings import Settings
from tests.helpers.model_store.broken_files import unreadable
from tests.helpers.model_store.graphs import graph_of

pytestmark = pytest.mark.process

TASK = Task(name="bright", labels={"bright": (1,)}, size=(32, 32))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def publish(store: Store) -> Callable[[str, str], Artefact]:
    def build(name: str, graph: str) -> Artefact:
        manifest = ModelManifest(
            name=name,
            task=TASK,
            network=NetworkSpec(name="threshold", arguments={}),
            lineage=Lineage(method="by-hand", run="test", sites=(), rounds=0, seed=0),
        )
        return store.publish(manifest, {WEIGHTS: b"weights", GRAPH: graph_of(graph)})

    return build


def flip(path: Path) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def test_verify_store_of_an_intact_store_finds_no_damage(
    store: Store, publish: Callable[[str, str], Artefact], database: Database
) -> None:
    publish("brain", "1")
    publish("brain", "2")
    publish("heart", "3")
    before = datetime.now(UTC)
    verdict = verify_store(Store(store.root), database)
    assert (verdict.versions, verdict.damaged) == (3, {})
    assert latest_verdict(database) == verdict
    assert verdict.finished_at >= before


def test_verify_store_lists_every_damaged_version(
    store: Store, publish: Callable[[str, str], Artefact], database: Database
) -> None:
    flip(publish("brain", "1").path / GRAPH)
    flip(publish("brain", "2").path / "manifest.json")
    (publish("heart", "3").path / WEIGHTS).unlink()
    publish("heart", "4")
    flip(publish("lung", "5").path / GRAPH)
    store.withdraw("lung@1", actor="ada", reason="wrong")
    verdict = verify_store(Store(store.root), database)
    assert verdict.versions == 4
    assert {reference: text.split(":")[0] for reference, text in verdict.damaged.items()} == {
        "brain@1": "brain@1",
        "brain@2": "brain@2",
        "heart@1": "heart@1",
    }
    assert latest_verdict(database) == verdict


def test_verify_store_of_an_absent_store_counts_no_version(database: Database, tmp_path: Path) -> None:
    assert latest_verdict(database) is None
    assert verify_store(Store(tmp_path / "nowhere"), database).versions == 0


@pytest.fixture
def queue(tmp_path: Path) -> object:
    settings = Settings(state_dir=tmp_path / "state", redis_url=None)
    broker = Broker(settings)
    broker.start()
    queue = Queue(settings, broker)
    yield settings, broker, queue
    queue.close()
    broker.stop()


def waiting(broker: Broker) -> int:
    length = broker.client.llen("locum:adaptation")
    assert isinstance(length, int)
    return length


def test_verifier_requests_a_due_check_once(
    queue: tuple[Settings, Broker, Queue], store: Store, database: Database
) -> None:
    settings, broker, sending = queue
    metrics = Metrics()
    for _ in range(2):
        # Two API processes on one state folder, each of which sees that it is due.
        verifier = Verifier(settings, database, sending, metrics)
        verifier.look()
        verifier.look()
    assert waiting(broker) == 1
    assert metrics.registry.get_sample_value("locum_store_verified_timestamp_seconds") == 0


def test_verifier_with_a_fresh_verdict_shows_it_and_requests_no_check(
    queue: tuple[Settings, Broker, Queue],
    store: Store,
    publish: Callable[[str, str], Artefact],
    database: Database,
) -> None:
    settings, broker, sending = queue
    flip(publish("brain", "1").path / GRAPH)
    verdict = verify_store(Store(store.root), database)
    metrics = Metrics()
    Verifier(settings, database, sending, metrics).look()
    assert waiting(broker) == 0
    read = metrics.registry.get_sample_value
    assert read("locum_store_verified_timestamp_seconds") == verdict.finished_at.timestamp()
    assert read("locum_store_damaged_artefacts") == 1


def test_queue_sends_json_to_the_worker_queue(queue: tuple[Settings, Broker, Queue]) -> None:
    import json

    _, broker, sending = queue
    sending.send(VERIFY_STORE)
    (message,) = broker.client.lrange("locum:adaptation", 0, -1)  # type: ignore[misc]
    content = json.loads(message)
    assert content["content-type"] == "application/json"
    assert content["headers"]["task"] == "locum.verify_store"


def test_verify_store_lists_unreadable_files_and_tombstones(
    store: Store, publish: Callable[[str, str], Artefact], database: Database
) -> None:
    unreadable(publish("brain", "").path / GRAPH)
    publish("brain", "2")
    (store.root / "brain" / "2.withdrawn.json").write_text("{")
    flip(publish("heart", "3").path / GRAPH)
    verdict = verify_store(Store(store.root), database)
    assert verdict.damaged.keys() == {"brain@1", "brain@2", "heart@1"}
    assert "cannot be read (Input/output error)" in verdict.damaged["brain@1"]
    assert "its tombstone 2.withdrawn.json cannot be read" in verdict.damaged["brain@2"]


def test_verifier_logs_an_unexpected_error_and_continues(
    queue: tuple[Settings, Broker, Queue],
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Faulty(Verifier):
        looks = 0

        def look(self) -> None:
            self.looks += 1
            if self.looks == 1:
                raise KeyError("a fault of ours")
            watching.cancel()

    monkeypatch.setattr(store_check, "_INTERVAL_SECONDS", 0.01)
    settings, _, sending = queue
    verifier = Faulty(settings, database, sending, Metrics())

    async def watch() -> None:
        nonlocal watching
        watching = asyncio.ensure_future(verifier.watch())
        with pytest.raises(asyncio.CancelledError):
            await watching

    watching: asyncio.Future[None]
    asyncio.run(watch())
    assert verifier.looks == 2
    assert "KeyError: 'a fault of ours'" in caplog.text
