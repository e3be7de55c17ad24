from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from personalization.errors import ExportError, NetworkError
from personalization.export import to_onnx
from personalization.networks import build, initialise
from personalization.state import clone

EXPORT = """
import hashlib, torch
from personalization.export import to_onnx
from personalization.networks import build, initialise
network = initialise(build("unet", in_channels=1, classes=3, width=2), torch.Generator().manual_seed(4))
for _ in range({times}):
    data = to_onnx(network, 1, (32, 48))
print(hashlib.sha256(data).hexdigest())
"""


def _network(in_channels: int = 1, classes: int = 3) -> nn.Module:
    network = build("unet", in_channels=in_channels, classes=classes, width=2)
    return initialise(network, torch.Generator().manual_seed(4))


def _run(graph: bytes, image: torch.Tensor) -> torch.Tensor:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    (probabilities,) = session.run(["probabilities"], {"image": image.numpy()})
    return torch.from_numpy(np.asarray(probabilities))


def test_onnx_equals_torch_at_any_batch_size() -> None:
    network = _network(in_channels=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # Move the running statistics from their initial values, so that folding them in is tested
        network(5 + 3 * torch.randn(8, 2, 32, 48, generator=generator))
        network.eval()
        graph = to_onnx(network, 2, (32, 48))
        for batch in (1, 5):
            image = 5 + 3 * torch.randn(batch, 2, 32, 48, generator=generator)
            expected = torch.softmax(network(image), dim=1)
            assert float(expected.std()) > 0.01
            torch.testing.assert_close(_run(graph, image), expected, atol=1e-5, rtol=0)


def test_graph_of_regions_gives_a_sigmoid_per_label() -> None:
    network = _network().eval()
    image = torch.randn(1, 1, 32, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.sigmoid(network(image))
    found = _run(to_onnx(network, 1, (32, 48), regions=True), image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_graph_has_documented_inputs_outputs_and_embedded_weights() -> None:
    model = onnx.load_from_string(to_onnx(_network(), 1, (32, 48)))
    onnx.checker.check_model(model)
    (image,), (probabilities,) = model.graph.input, model.graph.output
    assert (image.name, probabilities.name) == ("image", "probabilities")
    sides = [d.dim_param or d.dim_value for d in image.type.tensor_type.shape.dim]
    assert sides == ["B", 1, 32, 48]
    assert not any(t.external_data for t in model.graph.initializer)


def test_to_onnx_leaves_network_and_global_generator_unchanged() -> None:
    network = _network().train()
    before = clone(network.state_dict())
    random = torch.random.get_rng_state()
    to_onnx(network, 1, (32, 32))
    assert network.training
    assert all(p.requires_grad for p in network.parameters())
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(torch.random.get_rng_state(), random)


@pytest.mark.process
def test_to_onnx_gives_equal_bytes_in_other_processes_without_output() -> None:
    here = hashlib.sha256(to_onnx(_network(), 1, (32, 48))).hexdigest()
    root = Path(__file__).parents[3]
    for times, seed in ((1, "1"), (3, "2")):
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", EXPORT.format(times=times)],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == here
        assert run.stderr == ""


def test_graph_contains_no_path_of_the_exporting_machine() -> None:
    graph = to_onnx(_network(), 1, (32, 32))
    assert b".py" not in graph
    assert str(Path(__file__).parents[3]).encode() not in graph


def test_to_onnx_rejects_non_finite_weights_and_wrong_size() -> None:
    network = _network()
    with torch.no_grad():
        next(network.parameters())[0] = float("nan")
    with pytest.raises(ExportError, match=r"tensor 'encoder1\.enc1_conv1\.weight'"):
        to_onnx(network, 1, (32, 32))
    with pytest.raises(NetworkError, match="multiples of 16, found 32x40"):
        to_onnx(_network(), 1, (32, 40))
