from __future__ import annotations

import pytest
import torch

from service.errors import AdaptationRejected
from service.settings import Settings
from service.worker.device import device_of


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "found"),
    [
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_device_follows_the_setting_and_the_available_gpu(
    wanted: str, has_gpu: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert device_of(Settings(device=wanted)).type == found


def test_device_cuda_without_a_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AdaptationRejected, match="LOCUM_DEVICE=cuda, but the worker's torch finds no GPU"):
        device_of(Settings(device="cuda"))
