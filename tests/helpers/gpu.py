"""Whether a test can use an NVIDIA GPU: without one it is skipped, with one that cannot be used it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.harness.pretended_cuda import PretendedCuda

_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/nvidia0"), Path("/dev/dxg"))


def need_gpu(library: str) -> None:
    """Skip a test without an NVIDIA device; fail it where `library` cannot use the one that is there."""
    if not any(path.exists() for path in _DEVICE_FILES):
        pytest.skip("no NVIDIA device")
    if library == "torch":
        usable, build = torch.cuda.is_available(), f"torch {torch.__version__}"
    else:
        import onnxruntime

        from service.inference.providers import CUDA

        usable = CUDA in onnxruntime.get_available_providers()
        build = f"onnxruntime {onnxruntime.__version__}"
    if not usable:
        pytest.fail(
            f"this machine has an NVIDIA device, and {build} cannot use it: install a build for CUDA and a "
            "driver for that CUDA (docs/how-to/gpu.md), or run the tests without `-m gpu`",
            pytrace=False,
        )


@dataclass(frozen=True)
class Cuda:
    """A device that the tests call cuda: the pretended one, which computes as the CPU, or a real one."""

    real: bool

    @contextmanager
    def present(self) -> Iterator[torch.device]:
        """Within it, torch has the device."""
        if self.real:
            yield torch.device("cuda")
        else:
            with PretendedCuda():
                yield torch.device("cuda")
