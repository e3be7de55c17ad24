"""MOON's projection head: the layers, the names and a graph that answers as the network."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from personalization.errors import NetworkError
from personalization.export import to_onnx
from personalization.networks import build, initialise

ARGUMENTS = {
    "network": "resnet18",
    "arguments": {"in_channels": 1, "classes": 3, "width": 2},
    "projection": 5,
}


def test_the_output_layer_becomes_the_projection_and_an_output() -> None:
    network, plain = build("projected", **ARGUMENTS), build("resnet18", **ARGUMENTS["arguments"])
    body = {name for name in plain.state_dict() if not name.startswith("linear")}
    names = {f"linear.{layer}.{kind}" for layer in (0, 2, 3) for kind in ("weight", "bias")}
    assert set(network.state_dict()) == body | names
    initialise(network, torch.Generator().manual_seed(0)).eval()
    seen: list[torch.Tensor] = []
    network.linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found = network(torch.randn(4, 1, 8, 8))
    first, second, third = network.linear[0], network.linear[2], network.linear[3]
    z = torch.relu(seen[0] @ first.weight.T + first.bias) @ second.weight.T + second.bias
    assert z.shape == (4, 5)
    torch.testing.assert_close(found, z @ third.weight.T + third.bias)


@pytest.mark.parametrize(
    ("network", "arguments", "projection", "found"),
    [
        ("unet", {"in_channels": 1, "classes": 2, "width": 2}, 4, "'unet' with Conv2d and 4"),
        ("resnet18", {"in_channels": 1, "classes": 2, "width": 2}, 0, "'resnet18' with Linear and 0"),
    ],
)
def test_another_network_or_no_projection_is_rejected(network, arguments, projection, found) -> None:
    with pytest.raises(NetworkError, match=found):
        build("projected", network=network, arguments=arguments, projection=projection)


def test_the_exported_graph_answers_as_the_network() -> None:
    network = initialise(build("projected", **ARGUMENTS), torch.Generator().manual_seed(0)).eval()
    image = np.random.default_rng(0).normal(size=(2, 1, 8, 8)).astype(np.float32)
    expected = torch.softmax(network(torch.from_numpy(image)), dim=1).detach().numpy()
    graph = to_onnx(network, 1, (8, 8))
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"image": image})[0], expected, atol=1e-5)


def test_a_vit_is_projected_at_its_head() -> None:
    vit = {"in_channels": 1, "classes": 2, "size": [8, 8], "patch": 4, "width": 4, "depth": 1, "heads": 1}
    network = build("projected", network="vit", arguments=vit, projection=6)
    assert isinstance(network.head, nn.Sequential)
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 2)
