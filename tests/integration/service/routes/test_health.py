from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from sqlalchemy import text

from service.jobs.presence import record


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def whole(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With an embedded Redis."""
    return start(tmp_path_factory.mktemp("store"), redis_url=None)


def test_live_returns_live(api: Any) -> None:
    assert api.client.get("/health/live").json() == {"status": "live"}


def test_ready_lists_every_part(whole: Any) -> None:
    answer = whole.client.get("/health/ready")
    # Scans are answered without a worker.
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    assert {name: part["ok"] for name, part in answer.json()["parts"].items()} == {
        "store": True,
        "database": True,
        "disk": True,
        "queue": True,
        "worker": False,
        "device": True,
    }
    optional = [name for name, part in answer.json()["parts"].items() if not part["required"]]
    assert optional == ["worker", "device"]


def test_missing_and_running_workers_are_seen_in_readiness_and_metrics(whole: Any) -> None:
    def look() -> tuple[str, dict[str, Any], str]:
        _submit(whole, whole.context.readiness.look).result(30)
        found = whole.client.get("/health/ready").json()
        return found["status"], found["parts"]["worker"], whole.client.get("/metrics").text

    status, part, metrics = look()
    assert status == "degraded"
    assert "it is starting" in part["detail"]
    assert 'locum_workers{state="running"} 0.0' in metrics
    with whole.context.database.write() as session:
        record(session, "here:1", runs=True)
    status, part, metrics = look()
    assert (status, part["ok"], part["detail"]) == ("ready", True, "1 running")
    assert 'locum_workers{state="running"} 1.0' in metrics
    assert 'locum_ready{part="worker"} 1.0' in metrics
    with whole.context.database.write() as session:
        record(session, "here:1", runs=False)


def test_ready_without_redis_is_503_and_models_are_served(api: Any) -> None:
    answer = api.client.get("/health/ready")
    assert answer.status_code == 503
    parts = answer.json()["parts"]
    assert (parts["store"]["ok"], parts["database"]["ok"], parts["queue"]["ok"]) == (True, True, False)
    assert "Redis does not answer" in parts["queue"]["detail"]
    assert api.client.get("/models").status_code == 200


def test_readiness_check_restarts_a_dead_embedded_redis(whole: Any) -> None:
    client = whole.context.queue.broker.client
    server = psutil.Process(client.info("server")["process_id"])
    server.kill()
    server.wait(20)
    _submit(whole, whole.context.readiness.look).result(30)
    assert whole.client.get("/health/ready").status_code == 200
    assert client.info("server")["process_id"] != server.pid


def test_ready_with_a_database_of_another_version_is_not_ok(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    running = start(tmp_path)
    with running.context.database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'another'"))
    _submit(running, running.context.readiness.look).result(30)
    part = running.client.get("/health/ready").json()["parts"]["database"]
    assert part["ok"] is False
    assert "another version of Locum" in part["detail"]


def test_ready_with_an_unreadable_store_is_not_ok(start: Callable[..., Any], tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    running = start(store)
    store.rmdir()
    store.symlink_to(store)
    _submit(running, running.context.readiness.look).result(30)
    assert running.client.get("/health/ready").json()["parts"]["store"]["ok"] is False


def _submit(api: Any, coroutine: Callable[[], Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine(), api.loop)


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics"])
def test_health_answers_while_every_thread_is_busy(api: Any, path: str) -> None:
    release = threading.Event()
    taken = threading.Semaphore(0)

    def occupy() -> None:
        taken.release()
        release.wait(60)

    async def fill() -> None:
        total = int(anyio.to_thread.current_default_thread_limiter().total_tokens)
        async with anyio.create_task_group() as group:
            for _ in range(total):
                group.start_soon(anyio.to_thread.run_sync, occupy)

    filling = _submit(api, fill)
    for _ in range(40):
        taken.acquire(timeout=30)
    try:
        # A route in a thread has to wait, which shows that the threads are indeed taken.
        with pytest.raises(httpx.ReadTimeout):
            api.client.get("/models", timeout=0.2)
        assert api.client.get(path, timeout=30).status_code in (200, 503)
    finally:
        release.set()
        filling.result(60)


def test_metrics_report_requests_inference_and_readiness(
    start: Callable[..., Any], publish_bright: Any, make_png: Any, picture: Any, tmp_path: Path
) -> None:
    publish_bright(tmp_path)
    running = start(tmp_path, inference_slots=2, session_cache=3)
    assert running.segment(make_png(picture)).status_code == 200
    running.client.get("/models/bright")
    answer = running.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = set(answer.text.splitlines())
    assert 'locum_requests_total{method="GET",route="/models/{model}",status="200"} 1.0' in lines
    assert 'locum_requests_total{method="POST",route="/segment",status="200"} 1.0' in lines
    assert 'locum_inference_seconds_count{model="bright",provider="CPUExecutionProvider"} 1.0' in lines
    assert 'locum_ready{part="store"} 1.0' in lines
    assert 'locum_ready{part="queue"} 0.0' in lines
    assert {
        "locum_inference_slots 2.0",
        "locum_inference_running 0.0",
        "locum_inference_waiting 0.0",
        "locum_sessions_loaded 1.0",
        "locum_sessions_capacity 3.0",
        "locum_store_verified_timestamp_seconds 0.0",
    } <= lines
