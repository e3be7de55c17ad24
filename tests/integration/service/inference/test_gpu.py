"""A graph on the GPU answers as on the CPU. Run with `pytest -m gpu` on a machine with one."""

from __future__ import annotations

import numpy as np
import pytest

from personalization.export import to_onnx
from personalization.networks import build
from service.inference import sessions
from service.inference.sessions import GraphSession

pytestmark = pytest.mark.gpu("onnxruntime")


def test_gpu_probabilities_are_close_to_the_cpu() -> None:
    graph = to_onnx(build("unet", in_channels=1, classes=3, width=8), 1, (64, 64))
    slices = np.random.default_rng(0).normal(size=(4, 1, 64, 64)).astype(np.float32)
    on_gpu = GraphSession("g", graph, device="cuda:0")
    assert on_gpu.provider == sessions.CUDA
    expected = GraphSession("c", graph, device="cpu").run(slices).probabilities
    np.testing.assert_allclose(on_gpu.run(slices).probabilities, expected, atol=1e-4)
    np.testing.assert_array_equal(on_gpu.run(slices).probabilities, on_gpu.run(slices).probabilities)
