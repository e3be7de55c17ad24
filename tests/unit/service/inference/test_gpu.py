"""The words of a card, its driver and its libraries, by pretended libraries of NVIDIA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.inference import gpu

MAPS = """7f00-7f01 r-xp 0 08:01 5   /opt/nvidia/cu13/lib/libcudart.so.13
7f02-7f03 r-xp 0 08:01 6   /opt/nvidia/cudnn/lib/libcudnn_graph.so.9
7f04-7f05 r-xp 0 08:01 7   /opt/nvidia/cudnn/lib/libcudnn.so.9
"""


def filled(value: bytes | int, buffer: Any) -> int:
    getattr(buffer, "_obj", buffer).value = value
    return 0


class Version:
    """A function of a library, of which the type of the answer can be set."""

    def __call__(self) -> int:
        return 92_005


LIBRARIES: dict[str, Any] = {
    "libnvidia-ml.so.1": SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlShutdown=lambda: 0,
        nvmlDeviceGetHandleByIndex_v2=lambda index, handle: filled(7 + index, handle),
        nvmlDeviceGetHandleByUUID=lambda name, handle: filled(99 if name == b"GPU-a" else 0, handle),
        nvmlDeviceGetName=lambda handle, name, _: filled(b"Card %d" % handle.value, name),
        nvmlSystemGetDriverVersion=lambda driver, _: filled(b"580.65.06", driver),
    ),
    "/opt/nvidia/cu13/lib/libcudart.so.13": SimpleNamespace(
        cudaRuntimeGetVersion=lambda number: filled(13_020, number)
    ),
    "/opt/nvidia/cudnn/lib/libcudnn.so.9": SimpleNamespace(cudnnGetVersion=Version()),
}


@pytest.fixture
def maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "maps"
    file.write_text(MAPS)
    monkeypatch.setattr(gpu, "_MAPS", file)
    monkeypatch.setattr(gpu.ctypes, "CDLL", LIBRARIES.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for cached in (gpu.card, gpu.card_and_driver):
        cached.cache_clear()
    yield file
    for cached in (gpu.card, gpu.card_and_driver):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("device", "visible", "name"),
    [
        ("cuda", None, "Card 7"),
        ("cuda:1", None, "Card 8"),
        ("cuda:1", "3, 2", "Card 9"),
        ("cuda", "GPU-a", "Card 99"),
    ],
)
@pytest.mark.usefixtures("maps")
def test_card_is_named_with_driver_and_libraries(
    device: str, visible: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu.card(device) == f"{name}, driver 580.65.06, CUDA 13.2, cuDNN 9.20.5"
    assert gpu.card_and_driver(device) == (name, "580.65.06")


def test_library_that_is_not_loaded_is_left_out(maps: Path) -> None:
    maps.write_text(MAPS.splitlines()[0])
    assert gpu.card("cuda") == "Card 7, driver 580.65.06, CUDA 13.2"


def test_card_beyond_those_to_be_seen_is_not_named(maps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert maps.exists()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu.card("cuda:1") is None
