"""What happens around an inference: queue, versions that change, clients that leave, what is left behind."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.open_files import open_files
from tests.helpers.service.api import sent


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Path:
    root = tmp_path_factory.mktemp("store")
    publish_bright(root)
    return root


@contextmanager
def slots_taken(api: Any) -> Iterator[None]:
    """Hold every slot of the API, as scans in work would."""
    admission = api.context.admission
    release = asyncio.Event()
    held = threading.Semaphore(0)

    async def hold() -> None:
        async with admission.slot():
            held.release()
            await release.wait()

    holders = [asyncio.run_coroutine_threadsafe(hold(), api.loop) for _ in range(admission.slots)]
    for _ in holders:
        assert held.acquire(timeout=10)
    try:
        yield
    finally:
        api.loop.call_soon_threadsafe(release.set)
        for holder in holders:
            holder.result(10)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def open_spool_files(api: Any) -> list[str]:
    return open_files(api.settings.spool)


@pytest.mark.parametrize("route", ["/segment", "/classify"])
def test_request_above_the_queue_is_503_until_a_slot_is_free(
    start: Any,
    tmp_path: Path,
    publish_bright: Any,
    publish_dark: Any,
    make_png: Callable[..., bytes],
    picture: NDArray[np.uint8],
    route: str,
) -> None:
    {"/segment": publish_bright, "/classify": publish_dark}[route](tmp_path)
    api = start(tmp_path, inference_slots=1, inference_queue=1)
    scan = make_png(picture)
    with ThreadPoolExecutor(1) as pool:
        with slots_taken(api):
            waiting = pool.submit(api.send, route, scan)
            wait_until(lambda: api.context.admission.waiting == 1)
            refused = api.send(route, scan)
            assert refused.status_code == 503
            assert refused.json()["type"] == "urn:locum:problem:busy"
            assert int(refused.headers["retry-after"]) >= 1
            assert api.client.get("/health/live").status_code == 200
        assert waiting.result(30).status_code == 200
    assert api.send(route, scan).status_code == 200


def test_scan_for_a_cohort_takes_its_turn_with_those_in_inference(
    start: Any, store: Path, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    api = start(store, inference_slots=1, inference_queue=0)
    assert api.client.put("/hospitals/north", json={"name": "North"}).status_code == 201
    cohort = api.client.post("/hospitals/north/cohorts").json()["id"]
    place = f"/hospitals/north/cohorts/{cohort}/scans/one"
    with ThreadPoolExecutor(1) as pool:
        with slots_taken(api):
            sent = pool.submit(api.client.put, place, content=make_png(picture))
            # It waits, where a scan to segment is rejected: the queue holds none.
            assert api.segment(make_png(picture)).status_code == 503
            time.sleep(0.3)
            assert not sent.done()
        assert sent.result(30).status_code == 201
    assert api.context.admission.running == 0


def test_concurrent_requests_all_succeed_and_load_the_network_once(
    start: Any, store: Path, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    api = start(store, inference_slots=3, inference_queue=40)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: api.segment(make_png(picture)), range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert len(api.context.sessions) == 1
    assert (api.context.admission.running, api.context.admission.waiting) == (0, 0)


def test_answers_of_joined_runs_are_those_of_requests_one_by_one(
    start: Any, store: Path, make_png: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(7)
    scans = [make_png(draw.integers(0, 200, (32, 32), np.uint8)) for _ in range(24)]
    api = start(store, inference_slots=8, inference_queue=40, threads=1)

    def answer(scan: bytes) -> dict[str, Any]:
        report: dict[str, Any] = api.segment(scan, output="json").json()
        # The rank among the answers before it is another every time.
        del report["timing_ms"], report["receipt"]["request"], report["labels"]["bright"]["review"]
        return report | {"mask": api.segment(scan, output="png").content}

    expected = [answer(scan) for scan in scans]
    session = api.context.sessions.get(expected[0]["receipt"]["graph"], bytes)
    compositions, run = session.joined.compositions, session.joined.run

    def run_slowly(slices: NDArray[np.float32]) -> Any:
        # So that others arrive while it runs.
        time.sleep(0.02)
        return run(slices)

    monkeypatch.setattr(session.joined, "run", run_slowly)
    with ThreadPoolExecutor(8) as pool:
        # Until runs were joined, and joined without being compared again.
        for _ in range(20):
            assert list(pool.map(answer, scans)) == expected
            if compositions:
                break
    assert compositions


def test_publishing_versions_drops_no_request(
    start: Any, tmp_path: Path, publish_bright: Any, make_png: Callable[..., bytes]
) -> None:
    publish_bright(tmp_path, at=50)
    api = start(tmp_path, inference_slots=2, inference_queue=40, session_cache=1)
    # The higher the version, the higher its threshold: the number of bright pixels tells which one answered.
    steps = np.repeat(np.array([40, 55, 65, 75], np.uint8), 8)[:, None].repeat(32, axis=1)
    scan, seen, stop = make_png(steps), [], threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answer = api.segment(scan, output="json")
            assert answer.status_code == 200, answer.text
            report = answer.json()
            seen.append((report["receipt"]["model"]["name"], report["labels"]["bright"]["voxels"]))

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        for at in (60, 70):
            wait_until(lambda: len(seen) > 10)
            publish_bright(tmp_path, at=at)
            seen_before = len(seen)
            wait_until(lambda before=seen_before: len(seen) > before + 10)  # type: ignore[misc]
        stop.set()
        for each in asking:
            each.result(30)
    voxels = {"bright@1": 3 * 256, "bright@2": 2 * 256, "bright@3": 256}
    assert {name for name, _ in seen} == set(voxels)
    assert all(found == voxels[name] for name, found in seen)


def test_segment_for_a_hospital_uses_its_assigned_version(
    start: Any,
    tmp_path: Path,
    publish_bright: Any,
    make_png: Callable[..., bytes],
    picture: NDArray[np.uint8],
) -> None:
    for at in (50, 60):
        publish_bright(tmp_path, at=at)
    api = start(tmp_path)
    assert api.client.put("/hospitals/st-anna", json={"name": "St Anna"}).is_success
    assert api.segment(make_png(picture), hospital="st-anna").headers["locum-model"] == "bright@2"
    assigned = api.client.put(
        "/hospitals/st-anna/serving/bright",
        json={"version": 1, "actor": "dr", "reason": "validated"},
        headers={"If-Match": '"0"'},
    )
    assert assigned.is_success, assigned.text
    answer = api.segment(make_png(picture), hospital="st-anna")
    assert answer.headers["locum-model"] == "bright@1"
    assert api.segment(make_png(picture)).headers["locum-model"] == "bright@2"


def test_answered_scan_leaves_no_file_and_no_name_in_the_log(
    start: Any, store: Path, make_nifti: Callable[..., bytes], caplog: pytest.LogCaptureFixture
) -> None:
    api = start(store)
    large = make_nifti(np.random.default_rng(0).integers(0, 200, (64, 64, 200)).astype(np.int16))
    assert len(large) > 2**20
    broken = large[: len(large) // 2]
    with caplog.at_level("DEBUG"):
        assert api.segment(large, name="mueller_anna_1950.nii").status_code == 200
        assert api.segment(broken, name="mueller_anna_1950.nii").status_code == 422
        # The line of an answer is written when it is out, and may be a moment behind it.
        answered = {"POST /segment 200", "POST /segment 422"}
        wait_until(lambda: answered <= {record.getMessage() for record in own_records(caplog)})
    assert open_spool_files(api) == []
    left = [
        path
        for path in api.settings.state_dir.rglob("*")
        if path.is_file() and b"mueller" in path.read_bytes()
    ]
    assert left == []
    assert list(api.settings.spool.iterdir()) == []
    assert "mueller" not in "".join(str(vars(record)) for record in own_records(caplog))


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the service logged, and not the client that asks it."""
    return [record for record in caplog.records if not record.name.startswith("http")]


def upload_half(api: Any) -> socket.socket:
    """A client that promised 8 MiB and has sent 4."""
    head = b'--b\r\nContent-Disposition: form-data; name="scan"; filename="a.nii"\r\n\r\n'
    port = api.client.base_url.port
    assert port is not None
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(
        b"POST /segment HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8388608\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + head + b"x" * 4 * 2**20
    )
    return client


def test_client_disconnect_during_an_upload_leaves_no_file(
    start: Any, store: Path, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    api = start(store)
    client = upload_half(api)
    wait_until(lambda: len(open_spool_files(api)) == 1)
    assert list(api.settings.spool.iterdir()) == []
    client.close()
    wait_until(lambda: open_spool_files(api) == [])
    assert api.segment(make_png(picture)).status_code == 200


def test_slow_uploads_take_no_inference_slot(
    start: Any, store: Path, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    api = start(store, inference_slots=1, inference_queue=0)
    dawdlers = [upload_half(api) for _ in range(5)]
    wait_until(lambda: len(open_spool_files(api)) == 5)
    assert api.segment(make_png(picture)).status_code == 200
    for each in dawdlers:
        each.close()


def test_disconnected_waiting_client_gets_no_inference(
    start: Any, store: Path, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    api = start(store, inference_slots=1, inference_queue=3)
    with slots_taken(api), sent(api, files={"scan": make_png(picture)}):
        wait_until(lambda: api.context.admission.waiting == 1)
    wait_until(lambda: not api.context.admission.running and not api.context.admission.waiting)
    assert len(api.context.sessions) == 0
    assert api.segment(make_png(picture)).status_code == 200


def test_health_answers_while_a_volume_is_segmented(
    start: Any, store: Path, make_nifti: Callable[..., bytes]
) -> None:
    api = start(store)
    volume = make_nifti(np.random.default_rng(0).integers(0, 200, (192, 192, 160)).astype(np.int16))
    with ThreadPoolExecutor(1) as pool:
        segmenting = pool.submit(api.segment, volume, output="json")
        answered = 0
        while not segmenting.done():
            assert api.client.get("/health/live").status_code == 200
            answered += 1
    assert segmenting.result().status_code == 200
    assert answered >= 10
