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
def test_a_gpu_is_used_where_there_is_one_and_it_is_allowed(
    wanted: str, has_gpu: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert device_of(Settings(device=wanted)).type == found


def test_a_gpu_that_is_demanded_and_not_there_is_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AdaptationRejected, match="LOCUM_DEVICE=cuda, but the worker's torch finds no GPU"):
        device_of(Settings(device="cuda"))
