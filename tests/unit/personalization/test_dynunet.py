"""Every recipe on a small DynUNet of volumes, with batch norm and with instance norm."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from personalization.errors import NetworkError
from personalization.export import to_onnx
from personalization.iop_fl.export import to_dynamic_onnx
from personalization.iop_fl.merge import merge
from personalization.iop_fl.network import route, routed_layers
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import build, initialise
from personalization.options.presets import PRESETS
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import ensemble, probabilities
from personalization.test_time.recipe import recipe_of

SIDES = (8, 8, 4)
# Every level of the network halves the sides that are still long.
ARGUMENTS: dict[str, Any] = {
    "in_channels": 1,
    "classes": 2,
    "spatial_dims": 3,
    "width": 2,
    "strides": [1, 2, [2, 2, 1]],
}
NORMS = ("batch", "instance")
# What moves batch norm's statistics, or its scale and shift alone.
OF_BATCH_NORM = {"ladder", "intent", "vptta", "prompt", "statistics", "tent", "sar", "grata"}


def drawn(norm: str, seed: int) -> nn.Module:
    """A network with all of its floats drawn, and statistics of images like these."""
    draw = torch.Generator().manual_seed(seed)
    network = initialise(build("monai.dynunet", **ARGUMENTS, norm_name=norm), draw)
    with torch.no_grad():
        for value in network.parameters():
            if value.ndim == 1:
                value.add_(0.2 * torch.randn(value.shape, generator=draw))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm3d):
            module.momentum = 1.0
    network.train()(2 * torch.randn(4, 1, *SIDES, generator=draw) + 0.5)
    return network.eval()


def space(norm: str) -> RoutingSpace:
    states = [drawn(norm, seed).state_dict() for seed in range(3)]
    arguments = {**ARGUMENTS, "norm_name": norm}
    return RoutingSpace.of("monai.dynunet", arguments, {"a": states[1], "b": states[2]}, states[0])


def images(count: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 1, *SIDES, generator=torch.Generator().manual_seed(7)).to(dtype)


def run(graph: bytes, seen: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"image": seen.numpy()})[0])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_moves_the_network_and_is_served_or_refuses(preset: str, norm: str) -> None:
    router = PRESETS[preset].router or "direct"
    config = AdaptationConfig(preset=preset, epochs=1, batch_size=3, router=router)
    if norm == "instance" and preset in OF_BATCH_NORM:
        with pytest.raises(NetworkError, match="InstanceNorm3d; there is nothing to move"):
            recipe_of(preset).adapt(space(norm), images(), config, torch.device("cpu"))
        return
    found = recipe_of(preset).adapt(space(norm), images(), config, torch.device("cpu"))
    with torch.no_grad():
        answer = torch.softmax(found.merged(images()), dim=1)
        before = torch.softmax(drawn(norm, 0)(images()), dim=1)
    assert bool(torch.isfinite(answer).all())
    assert not torch.allclose(answer, before, atol=1e-4)
    torch.testing.assert_close(run(to_onnx(found.merged, 1, SIDES), images()), answer, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("router", ["direct", "pooled"])
def test_routing_of_three_experts_is_exported(norm: str, router: Any) -> None:
    over = space(norm)
    routed = route(over, router)
    layers = routed_layers(routed)
    assert len(layers) == 13
    # Batch norm, which cancels a coefficient's scale, follows all but the transposed ones and the output.
    assert sum(layer.normalised for layer in layers.values()) == (10 if norm == "batch" else 0)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in layers.values():
            for parameter in layer.router.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    graph = to_dynamic_onnx(over, routed, images())
    seen = images(1)
    merged = merge(over, routed, images())
    found = run(graph, seen)
    assert found.shape == (1, 2, *SIDES)
    if router == "direct":
        with torch.no_grad():
            torch.testing.assert_close(found, torch.softmax(merged(seen), 1), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("norm", NORMS)
def test_gradient_of_every_coefficient_equals_finite_differences(norm: str) -> None:
    states = {name: drawn(norm, seed).double().state_dict() for seed, name in enumerate("gab")}
    arguments = {**ARGUMENTS, "norm_name": norm}
    inside = {name: states[name] for name in "ab"}
    routed = route(RoutingSpace.of("monai.dynunet", arguments, inside, states["g"]))
    logits = [layer.router.logits for layer in routed_layers(routed).values()]
    seen = images(2, torch.float64)

    def loss() -> Tensor:
        return torch.softmax(routed(seen), dim=1)[:, 1].square().mean()

    loss().backward()
    assert all(bool(each.grad.abs().max() > 0) for each in logits)
    for each in logits:
        with torch.no_grad():
            for index in range(3):
                values = []
                for step in (1e-5, -1e-5):
                    each[index] += step
                    values.append(float(loss()))
                    each[index] -= step
                expected = (values[0] - values[1]) / 2e-5
                assert float(each.grad[index]) == pytest.approx(expected, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_ensemble_of_instance_norms_is_the_plain_mean(norm: str) -> None:
    found = ensemble(space(norm), images(), (0.5, 0.5, 0.5))
    plain = torch.stack([probabilities(drawn(norm, seed), images()) for seed in range(3)]).mean(0)
    assert torch.allclose(found, plain, atol=1e-5) == (norm == "instance")
