from __future__ import annotations

import pytest
import torch

from service.errors import AdaptationRejected
from service.settings import Settings
from service.worker.device import device_of


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
    with pytest.raises(
        AdaptationRejected, match=f"LOCUM_DEVICE={wanted}, but the worker's torch finds {words}"
    ):
        device_of(Settings(device=wanted))


def has(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
