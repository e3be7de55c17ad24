"""The pretended device refuses what CUDA refuses, and takes what it takes; the marker `gpu` hides no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness.pretended_cuda import MixedDevices, PretendedCuda
from tests.helpers import gpu


class MadeInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.ones(2, 3)


def operands() -> dict[str, Any]:
    on_gpu = torch.arange(6.0, device="cuda").reshape(2, 3)
    index = torch.tensor([0, 1])
    return {
        "c": on_gpu,
        "h": torch.ones(2, 3),
        "scalar": torch.tensor(2.0),
        "i": index,
        "ci": index.to("cuda"),
        "draw": torch.Generator(),
    }


REFUSED: dict[str, Callable[..., Any]] = {
    "sum": lambda c, h, **_: c + h,
    "index of the gpu": lambda h, ci, **_: h[ci],
    "cat": lambda c, h, **_: torch.cat([c, h]),
    "stack": lambda c, h, **_: torch.stack([c, h]),
    "product": lambda c, h, **_: c @ h.T,
    "generator": lambda c, draw, **_: c.normal_(generator=draw),
    "generator of a new tensor": lambda draw, **_: torch.randn(2, device="cuda", generator=draw),
    "where": lambda c, h, **_: torch.where(c > 1, c, h),
    "in place": lambda c, h, **_: h.add_(c),
    "numpy": lambda c, **_: c.numpy(),
    "scatter": lambda c, i, **_: c.scatter_add(1, i[None].repeat(2, 1), c),
    "target": lambda c, i, **_: functional.cross_entropy(c, i),
    "backward": lambda c, **_: MadeInBackward.apply(c.clone().requires_grad_()).sum().backward(),
}
TAKEN: dict[str, Callable[..., Any]] = {
    "scalar": lambda c, scalar, **_: c + scalar,
    "number": lambda c, **_: c * 2,
    "index of the cpu": lambda c, i, **_: c[i],
    "mask of the cpu": lambda c, h, **_: c[h > 0],
    "one_hot": lambda ci, **_: functional.one_hot(ci, 3),
    "drawn and moved": lambda c, draw, **_: torch.randn(2, generator=draw).to(c),
    "where with a scalar": lambda c, scalar, **_: torch.where(c > 1, c, scalar),
    "copy": lambda c, h, **_: c.copy_(h),
    "list": lambda c, **_: c.tolist(),
    "like": lambda c, **_: c + torch.zeros_like(c) + c.new_zeros(2, 3) + torch.ones_like(c),
    "state": lambda **_: torch.nn.Linear(3, 2).to("cuda").load_state_dict(torch.nn.Linear(3, 2).state_dict()),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_what_cuda_refuses_is_refused(operation: str) -> None:
    with PretendedCuda(), pytest.raises((MixedDevices, RuntimeError, TypeError)):
        REFUSED[operation](**operands())


@pytest.mark.parametrize("operation", TAKEN)
def test_what_cuda_takes_is_taken(operation: str) -> None:
    with PretendedCuda():
        TAKEN[operation](**operands())


def test_host_synchronisations_and_copies_are_counted() -> None:
    with PretendedCuda() as device:
        x = torch.ones(3).to("cuda")
        x.sum().item()
        x.cpu()
    assert sum(device.syncs.values()) == 2
    assert sum(device.uploads.values()) == 1


@pytest.mark.parametrize("library", ["torch", "onnxruntime"])
def test_marked_test_fails_beside_a_gpu_that_cannot_be_used(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(gpu, "_DEVICE_FILES", (Path("/dev/null"),))
    with pytest.raises(pytest.fail.Exception, match=f"NVIDIA device, and {library}"):
        gpu.need_gpu(library)
    monkeypatch.setattr(gpu, "_DEVICE_FILES", (Path("/no/device"),))
    with pytest.raises(pytest.skip.Exception, match="no NVIDIA device"):
        gpu.need_gpu(library)
