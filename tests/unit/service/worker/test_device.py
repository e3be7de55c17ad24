from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from service.errors import GpuUnusable
from service.inference import providers
from service.settings import Settings
from service.worker import celery, device
from service.worker.device import check_gpu, device_of, facts, prepare_torch, words_of_memory


@pytest.mark.parametrize(
    ("wanted", "gpus", "found"),
    [
        ("cpu", 1, "cpu"),
        ("cpu", 0, "cpu"),
        ("auto", 1, "cuda"),
        ("auto", 0, "cpu"),
        ("cuda", 1, "cuda"),
        ("cuda:0", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_device_follows_the_setting_and_the_available_gpus(
    wanted: str, gpus: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(gpus, monkeypatch)
    assert str(device_of(Settings(device=wanted))) == found


@pytest.mark.parametrize(("wanted", "gpus", "words"), [("cuda", 0, "no GPU"), ("cuda:1", 1, "1 GPU")])
def test_device_without_its_gpu_is_rejected(
    wanted: str, gpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(gpus, monkeypatch)
    with pytest.raises(GpuUnusable, match=f"LOCUM_DEVICE={wanted}, but the worker's torch finds {words}"):
        device_of(Settings(device=wanted))


def test_card_without_kernels_in_this_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    has(1, monkeypatch, capability=(7, 0), name="Tesla V100")
    with pytest.raises(GpuUnusable, match=r"a Tesla V100 of compute capability 7\.0, .* has sm_75, sm_80"):
        device_of(Settings(device="cuda"))
    seen(monkeypatch, present=False)
    assert device_of(Settings(device="auto")).type == "cpu"


@pytest.mark.parametrize(
    ("card", "built_for", "runs"),
    [
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((7, 0), ["sm_75", "compute_75"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), [], True),
    ],
)
def test_machine_code_serves_its_generation_and_code_to_compile_later_ones(
    card: tuple[int, int], built_for: list[str], runs: bool
) -> None:
    assert device._runs_on(*card, built_for) == runs


def test_fallback_beside_a_device_is_a_warning_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has(0, monkeypatch)
    seen(monkeypatch, present=True)
    device._warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "locum.worker")
    for _ in range(2):
        assert device_of(Settings(device="auto")).type == "cpu"
    (said,) = caplog.messages
    assert "jobs run on the CPU" in said
    assert "this machine has an NVIDIA device" in said


def test_jobs_on_cuda_are_repeatable_and_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = torch.backends.cudnn
    for name, value in {"deterministic": False, "allow_tf32": True, "benchmark": True}.items():
        monkeypatch.setattr(cudnn, name, value)
    prepare_torch(Settings(device="cpu"))
    assert (cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark) == (True, False, False)


@pytest.mark.parametrize(("device", "card"), [("cuda", 0), ("auto", 0), ("cuda:1", 1)])
def test_memory_of_a_worker_is_bounded_by_the_setting(
    device: str, card: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(2, monkeypatch)
    bounds: list[tuple[float, Any]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 2**34))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *a: bounds.append(a))
    prepare_torch(Settings(device=device, gpu_memory_bytes=2**32))
    # torch refuses a device without an index here.
    assert bounds == [(0.25, card)]


def test_gpu_that_does_not_answer_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    has(1, monkeypatch)

    def lost(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    monkeypatch.setattr(torch, "ones", lost)
    with pytest.raises(GpuUnusable, match="cuda does not answer: CUDA error: an illegal memory access"):
        check_gpu(Settings(device="cuda"))
    assert check_gpu(Settings(device="cpu")).type == "cpu"


def test_words_of_memory_say_how_many_scans_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 * gib, 16 * gib))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 6 * gib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7 * gib)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 10.00 GiB. GPU 0 has ...")
    words = words_of_memory(error, 10, torch.device("cuda"))
    # 16 GiB were needed, 8 are there: half of the scans.
    assert "16.0 GiB were needed" in words
    assert "8.0 of its 16.0 GiB" in words
    assert "of these 10 scans, about 5 would fit" in words
    assert "LOCUM_DEVICE=cpu" in words_of_memory(error, None, torch.device("cuda"))


def test_facts_of_a_gpu_name_card_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    has(1, monkeypatch, name="Some Card")
    assert facts(torch.device("cpu")) == {"device": "cpu", "torch": torch.__version__}
    found = facts(torch.device("cuda:0"))
    assert found["card"] == "Some Card"
    assert set(found) == {"device", "torch", "card", "driver", "cuda", "cudnn"}


@pytest.mark.process
def test_worker_refuses_to_start_without_the_gpu_that_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("LOCUM_DEVICE", "cuda")
    monkeypatch.setattr(celery, "settings", Settings(device="cuda"))
    with pytest.raises(SystemExit, match="LOCUM_DEVICE=cuda, but the worker's torch finds no GPU"):
        celery.check_device()


def test_worker_that_lost_its_gpu_ends_and_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from service.worker import runner

    def lost(_: Settings) -> None:
        raise GpuUnusable("the GPU cuda does not answer")

    opened, signals = list[str](), list[tuple[int, int]]()
    monkeypatch.setattr(runner, "check_gpu", lost)
    monkeypatch.setattr(runner, "Database", opened.append)
    monkeypatch.setattr(celery.os, "kill", lambda *a: signals.append(a))
    celery.run("j1")
    assert opened == []
    assert [process for process, _ in signals] == [celery._worker_process]


def has(
    gpus: int, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (8, 0), name: str = "Card"
) -> None:
    answers = {
        "is_available": gpus > 0,
        "device_count": gpus,
        "get_device_capability": capability,
        "get_device_name": name,
        "get_arch_list": ["sm_75", "sm_80"],
    }
    for of, answer in answers.items():
        monkeypatch.setattr(torch.cuda, of, lambda *_, answer=answer: answer)


def seen(monkeypatch: pytest.MonkeyPatch, *, present: bool) -> None:
    monkeypatch.setattr(providers, "_DEVICE_FILES", (Path("/dev/null" if present else "/no/device"),))
