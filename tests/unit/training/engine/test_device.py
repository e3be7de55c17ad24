"""A run's device: refused before a round when it is missing, and spread over cards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from training.config import RunConfig
from training.engine import device as devices
from training.engine.device import default_workers, device_of_worker, fault_of, free_memory, problem_of


@pytest.fixture(params=[0, 1, 2])
def cards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    count: int = request.param
    return count


def test_device_that_is_missing_is_named_with_what_is_there(cards: int) -> None:
    assert problem_of("cpu") is None
    assert (problem_of("cuda") is None) == (cards > 0)
    assert (problem_of("cuda:1") is None) == (cards > 1)
    found = problem_of("cuda:7")
    assert found is not None
    assert "cuda:7 is not there" in found
    assert (f"{cards} CUDA device(s)" if cards else "no CUDA device") in found


def test_workers_take_the_cards_in_turn_unless_one_is_named(cards: int) -> None:
    taken = [device_of_worker("cuda", worker) for worker in range(3)]
    assert taken == (["cuda:0", "cuda:1", "cuda:0"] if cards == 2 else ["cuda"] * 3)
    assert device_of_worker("cuda:1", 0) == "cuda:1"
    assert device_of_worker("cpu", 1) == "cpu"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "mps", "cuda:123"])
def test_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(ValidationError):
        RunConfig(device=device)


def test_worker_processes_are_as_many_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices.os, "cpu_count", lambda: 8)
    listed = tmp_path / "meminfo"
    listed.write_text("MemTotal: 99999999 kB\nMemAvailable: 3145728 kB\n")
    monkeypatch.setattr(devices, "_MEMORY", listed)
    assert (free_memory("cpu"), default_workers("cpu")) == (3 * 2**30, 3)
    free = [5 * 2**30, 2**30]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (free[card], 2**36))
    assert [default_workers(device) for device in ("cuda", "cuda:0", "cuda:1")] == [3, 2, 1]
    free[:] = [2**40, 2**40]
    assert default_workers("cuda") == 8


def test_device_is_asked_for_a_real_operation(monkeypatch):
    assert fault_of("cpu") is None

    def lost(*_, **__):
        raise RuntimeError("CUDA error: no CUDA-capable device is detected\nmore lines")

    monkeypatch.setattr(torch, "ones", lost)
    expected = "device: cuda:0 does not compute: CUDA error: no CUDA-capable device is detected"
    assert fault_of("cuda:0") == expected
