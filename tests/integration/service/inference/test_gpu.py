"""Graphs and scans on the GPU, answered as on the CPU. Run with `pytest -m gpu` on a machine with one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from personalization.export import to_onnx
from personalization.networks import build
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import recipe_of
from service.errors import GpuMemoryFull
from service.inference.limits import GraphLimits
from service.inference.providers import CPU, CUDA
from service.inference.sessions import GraphSession, probe_provider
from tests.helpers.personalization.routing_cases import images, space_of
from tests.helpers.service.counted_runs import counted
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.gpu("onnxruntime")


def slices_of(count: int, side: int = 64, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, 1, side, side)).astype(np.float32)


@pytest.fixture(scope="module")
def unet() -> bytes:
    return unet_for(64)


def unet_for(side: int) -> bytes:
    return to_onnx(build("unet", in_channels=1, classes=3, width=8), 1, (side, side))


def test_gpu_probabilities_are_close_to_the_cpu_and_repeatable(unet: bytes) -> None:
    slices, on_gpu = slices_of(4), GraphSession("g", unet, device="cuda:0")
    assert on_gpu.provider == CUDA
    assert on_gpu.gpu is not None
    for part in (torch.cuda.get_device_name(0), ", driver ", ", CUDA ", ", cuDNN "):
        assert part in on_gpu.gpu
    expected = GraphSession("c", unet, device="cpu").run(slices).probabilities
    np.testing.assert_allclose(on_gpu.run(slices).probabilities, expected, atol=1e-4)
    again = GraphSession("g", unet, device="cuda")
    for session in (on_gpu, again):
        np.testing.assert_array_equal(session.run(slices).probabilities, on_gpu.run(slices).probabilities)


def test_volume_as_a_whole_is_answered_and_its_memory_given_back(unet: bytes) -> None:
    slices = slices_of(40)
    found = GraphSession("g", unet, device="cuda").run_alone(slices).probabilities
    expected = GraphSession("c", unet, device="cpu").run_alone(slices).probabilities
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_graph_of_a_whole_scan_is_answered_as_on_the_cpu() -> None:
    """Its batch norm measures all slices of the scan together."""
    config = AdaptationConfig(preset="intent")
    adapted = recipe_of("intent").adapt(
        space_of(2, torch.float32), images(6, 32, 32, torch.float32), config, torch.device("cpu")
    )
    graph, slices = to_onnx(adapted.merged, 2, (32, 32)), images(6, 32, 32, torch.float32).numpy()
    on_gpu = GraphSession("g", graph, device="cuda")
    found = on_gpu.run_alone(slices).probabilities
    expected = GraphSession("c", graph, device="cpu").run_alone(slices).probabilities
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_array_equal(on_gpu.run_alone(slices).probabilities, found)
    part = on_gpu.run_alone(slices[:3]).probabilities
    assert not np.allclose(part, expected[:3], atol=1e-4)


def test_scans_of_two_networks_on_one_card_get_the_bits_of_each_alone(unet: bytes) -> None:
    other = to_onnx(build("unet", in_channels=1, classes=3, width=4), 1, (64, 64))
    loaded = [GraphSession(name, graph, device="cuda") for name, graph in (("a", unet), ("b", other))]
    asked = [slices_of(count, seed=count) for count in (1, 2, 3, 2)]
    alone = [[session.run(each).probabilities for each in asked] for session in loaded]
    started = threading.Event()
    for session in loaded:
        hold(session, started)
    with ThreadPoolExecutor(2 * len(asked)) as threads:
        answers = [[threads.submit(session.run, each) for each in asked] for session in loaded]
        # One runs, the others are in line.
        wait_for(lambda: all(session.joined.waiting == len(asked) - 1 for session in loaded))
        started.set()
    for expected, found in zip(alone, answers, strict=True):
        for one, other_one in zip(expected, found, strict=True):
            np.testing.assert_array_equal(other_one.result().probabilities, one)


def hold(session: GraphSession, until: threading.Event) -> None:
    """Let no run of the session begin before the event."""
    inner = session.joined.run

    def run(slices: NDArray[np.float32]) -> Any:
        assert until.wait(60)
        return inner(slices)

    session.joined.run = run


def test_full_card_is_refused_and_answers_again_when_it_has_room(unet: bytes) -> None:
    # cuDNN is loaded before the card is full.
    GraphSession("s", unet, device="cuda").run(slices_of(1))
    graph, slices = unet_for(1024), slices_of(1, side=1024)
    # Loaded, and not run yet: it has no memory for a run.
    session = GraphSession("g", graph, device="cuda")
    held = []
    try:
        for size in (2**30, 2**26, 2**23):
            with suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        with pytest.raises(GpuMemoryFull, match="send it again in 10 s"):
            session.run(slices)
    finally:
        held.clear()
        torch.cuda.empty_cache()
    expected = GraphSession("c", graph, device="cpu").run(slices).probabilities
    np.testing.assert_allclose(session.run(slices).probabilities, expected, atol=1e-4)


def test_run_above_the_bound_is_halved_and_a_slice_above_it_refused() -> None:
    graph, slices = unet_for(256), slices_of(8, side=256)
    expected = GraphSession("c", graph, device="cpu").run(slices).probabilities
    refused = halved = False
    for bound in (2**21, 2**23, 2**24, 2**25, 2**26, 2**27, 2**28):
        limits = GraphLimits(gpu_memory_bytes=bound)
        try:
            session = GraphSession("g", graph, device="cuda", limits=limits)
            counts = counted(session)
            found = session.run(slices).probabilities
        except GpuMemoryFull:
            refused = True
            continue
        halved = halved or max(counts) < 8 or len(counts) > 1
        np.testing.assert_allclose(found, expected, atol=1e-4)
    assert refused
    assert halved


def test_probe_runs_on_the_gpu() -> None:
    assert probe_provider("cuda") == CUDA
    assert probe_provider("auto") == CUDA


def test_scan_is_answered_on_the_gpu_and_its_receipt_says_so(
    start: Callable[..., Any],
    publish_bright: Callable[..., Any],
    make_png: Callable[..., bytes],
    picture: NDArray[np.uint8],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    store = tmp_path_factory.mktemp("store")
    publish_bright(store)
    masks, reports = [], []
    for device in ("cuda", "cpu"):
        api = start(store, device=device)
        part = api.client.get("/health/ready").json()["parts"]["device"]
        assert part["ok"]
        assert part["required"] == (device == "cuda")
        scan = make_png(picture)
        masks.append(api.segment(scan, output="png").content)
        reports.append(api.segment(scan, output="json").json()["receipt"])
    assert masks[0] == masks[1]
    assert [report["provider"] for report in reports] == [CUDA, CPU]
    assert reports[1]["gpu"] is None
    assert "driver" in reports[0]["gpu"]


def test_pool_picks_on_the_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    from model_store.manifest import GRAPH
    from model_store.store import Store
    from tests.helpers.service.pool_federation import publish_pool
    from tests.helpers.training.backbones import unet as unet_of
    from training.phantom import TASK

    task = TASK.model_copy(update={"size": (32, 32)})
    publish_pool(tmp_path, task, unet_of(task))
    graph = Store(tmp_path).open("pool").read(GRAPH)
    slices = slices_of(4, side=32)
    found, expected = (GraphSession(d, graph, device=d).run(slices) for d in ("cuda", "cpu"))
    np.testing.assert_array_equal(found.entries, expected.entries)
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-4)
