"""ResNet-18 for small images: parameter count, layers by hand, rejected input."""

from __future__ import annotations

import os
import subprocess
import sys

import onnxruntime
import pytest
import torch
from torch.nn import functional

from personalization.errors import NetworkError
from personalization.export import to_onnx
from personalization.networks import build, initialise


def network(**arguments: int) -> torch.nn.Module:
    given = {"in_channels": 3, "classes": 4, "width": 2, **arguments}
    return initialise(build("resnet18", **given), torch.Generator().manual_seed(0))


def test_resnet18_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        published = build("resnet18", in_channels=3, classes=10, width=64)
    assert sum(parameter.numel() for parameter in published.parameters()) == 11_173_962


def test_resnet18_forward_equals_the_paper_written_by_hand() -> None:
    model = network().eval()
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(len(name)))
    images = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    state = model.state_dict()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        w, b, m, v = (state[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var"))
        return functional.batch_norm(x, m, v, w, b)

    x = functional.relu(norm(functional.conv2d(images, state["conv1.weight"], padding=1), "bn1"))
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            at, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            y = functional.conv2d(x, state[f"{at}.conv1.weight"], stride=stride, padding=1)
            y = functional.conv2d(
                functional.relu(norm(y, f"{at}.bn1")), state[f"{at}.conv2.weight"], padding=1
            )
            if stride == 2:
                shortcut = functional.conv2d(x, state[f"{at}.shortcut.0.weight"], stride=2)
                x = norm(shortcut, f"{at}.shortcut.1")
            x = functional.relu(norm(y, f"{at}.bn2") + x)
    assert x.shape == (2, 16, 4, 4)
    pooled = functional.avg_pool2d(x, 4).flatten(1)
    expected = functional.linear(pooled, state["linear.weight"], state["linear.bias"])
    torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize("size", [(8, 8), (28, 28), (31, 50)])
@pytest.mark.parametrize("channels", [1, 3, 9])
def test_resnet18_accepts_any_size_and_channel_count(size: tuple[int, int], channels: int) -> None:
    assert network(in_channels=channels)(torch.zeros(2, channels, *size)).shape == (2, 4)


def test_exported_resnet18_equals_torch_at_another_batch_size() -> None:
    model = network().eval()
    graph = to_onnx(model, 3, (12, 20))
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    images = torch.randn(5, 3, 12, 20, generator=torch.Generator().manual_seed(2))
    (found,) = session.run(["probabilities"], {"image": images.numpy()})
    torch.testing.assert_close(torch.tensor(found), model(images).softmax(1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 28, 28), r"images \[B, 3, H, W\], found \[2, 1, 28, 28\]"),
        ((2, 3, 7, 28), "at least 8 pixels per side, found 7x28"),
        ((3, 28, 28), r"images \[B, 3, H, W\], found \[3, 28, 28\]"),
    ],
)
def test_resnet18_rejects_wrong_shape_and_zero_width(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        network()(torch.zeros(shape))
    with pytest.raises(NetworkError, match="width"):
        network(width=0)


# Allocates between steps, so that glibc detects a write past the end of a buffer and aborts.
_LEARNING = """
import torch
from personalization.networks import build
torch.set_num_threads(1)
for width in (1, 2, 4, 8, 12):
    network = build("resnet18", in_channels=1, classes=3, width=width).to(memory_format=torch.channels_last)
    for _ in range(30):
        network(torch.randn(4, 1, 20, 16)).sum().backward()
        beside = [torch.randn(size) for size in range(1, 200, 10)]
"""


@pytest.mark.process
def test_narrow_resnet18_trains_without_avx512_without_a_crash() -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([sys.executable, "-c", _LEARNING], env=environment, check=True)
