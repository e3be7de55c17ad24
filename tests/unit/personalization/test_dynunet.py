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
from personalization.networks.instance_norm import Blended, TrackedInstanceNorm, tracked_norms
from personalization.options.presets import PRESETS
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import movable_in, recipe_of

SIDES = (8, 8, 4)
# Every level of the network halves the sides that are still long.
ARGUMENTS: dict[str, Any] = {
    "in_channels": 1,
    "classes": 2,
    "spatial_dims": 3,
    "width": 2,
    "strides": [1, 2, [2, 2, 1]],
}
TRACKED = "tracked"
NORMS = ("batch", "instance", TRACKED)
# What refuses a network, by its norms.
REFUSED = {
    "batch": {"blend"},
    "instance": {"ladder", "intent", "statistics", "tent", "blend"},
    TRACKED: {"ladder", "intent", "statistics", "tent"},
}


def arguments(norm: str) -> dict[str, Any]:
    return {**ARGUMENTS, "norm_name": ["instance", {"track": True}] if norm == TRACKED else norm}


def drawn(norm: str, seed: int) -> nn.Module:
    """A network with all of its floats drawn, and statistics of images like these."""
    draw = torch.Generator().manual_seed(seed)
    network = initialise(build("monai.dynunet", **arguments(norm)), draw)
    with torch.no_grad():
        for value in network.parameters():
            if value.ndim == 1:
                value.add_(0.2 * torch.randn(value.shape, generator=draw))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm3d | TrackedInstanceNorm):
            module.momentum = 1.0
    network.train()(2 * torch.randn(4, 1, *SIDES, generator=draw) + 0.5)
    return network.eval()


def space(norm: str) -> RoutingSpace:
    states = [drawn(norm, seed).state_dict() for seed in range(3)]
    return RoutingSpace.of("monai.dynunet", arguments(norm), {"a": states[1], "b": states[2]}, states[0])


def images(count: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 1, *SIDES, generator=torch.Generator().manual_seed(7)).to(dtype)


def run(graph: bytes, seen: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"image": seen.numpy()})[0])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "ttt"])
def test_preset_moves_the_network_and_is_served_or_refuses(preset: str, norm: str) -> None:
    router = PRESETS[preset].router or "direct"
    config = AdaptationConfig(preset=preset, epochs=1, batch_size=3, router=router)
    assert movable_in(drawn(norm, 0)).suits(preset) == (preset not in REFUSED[norm])
    if preset in REFUSED[norm]:
        with pytest.raises(
            NetworkError, match=r"expected a network with (batch|instance) norm .*, found DynUNet with"
        ):
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
    inside = {name: states[name] for name in "ab"}
    routed = route(RoutingSpace.of("monai.dynunet", arguments(norm), inside, states["g"]))
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


def by_hand(norm: TrackedInstanceNorm, features: Tensor, share: float) -> Tensor:
    """Image by image and channel by channel."""
    found, weight, bias = torch.empty_like(features), norm.weight.tolist(), norm.bias.tolist()
    for b, c in ((b, c) for b in range(len(features)) for c in range(features.shape[1])):
        values = features[b, c].double()
        own, spread = float(values.mean()), float(values.var(correction=0))
        usual, usual_spread = float(norm.running_mean[c]), float(norm.running_var[c])
        mean = (1 - share) * own + share * usual
        variance = (1 - share) * spread + share * usual_spread + share * (1 - share) * (usual - own) ** 2
        normal = (values - mean) / (variance + norm.eps) ** 0.5
        found[b, c] = normal * weight[c] + bias[c]
    return found


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_share_of_the_federations_statistics_is_hand_computed(share: float) -> None:
    norm = next(iter(tracked_norms(drawn(TRACKED, 0)).values()))
    features = torch.randn(3, norm.num_features, 2, 3, 2, generator=torch.Generator().manual_seed(2)) * 3 + 1
    norm.share = share
    torch.testing.assert_close(norm(features), by_hand(norm, features, share), atol=1e-5, rtol=1e-4)
    # A patch without anything in it stays a number, and nearer to what the federation calls it.
    flat = torch.full_like(features, 5.0)
    assert bool(torch.isfinite(norm(flat)).all())


def test_training_notes_the_mean_of_the_images_statistics_and_answers_as_before() -> None:
    plain, tracked = drawn("instance", 0), drawn(TRACKED, 0)
    with torch.no_grad():
        torch.testing.assert_close(tracked(images()), plain(images()), atol=1e-5, rtol=1e-4)
    norm = next(iter(tracked_norms(tracked).values()))
    seen: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    norm.momentum = 1.0
    tracked.train()(images())
    means, spreads = seen[0].flatten(2).mean(-1), seen[0].flatten(2).var(-1)
    torch.testing.assert_close(norm.running_mean, means.mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(norm.running_var, spreads.mean(0), atol=1e-5, rtol=1e-4)


def test_blend_takes_its_doses_by_thirds_and_is_built_again_from_its_arguments() -> None:
    over, config = space(TRACKED), AdaptationConfig(preset="blend", doses=(0.5, 0.2, 0.0))
    recipe = recipe_of("blend")
    merged = recipe.adapt(over, images(), config, torch.device("cpu")).merged
    shares = [norm.share for norm in tracked_norms(merged).values()]
    assert len(shares) == 10
    assert shares == [0.5] * 4 + [0.2] * 3 + [0.0] * 3
    name, own = recipe.architecture(over, config)
    again = build(name, **own).eval()
    again.load_state_dict(merged.state_dict())
    with torch.no_grad():
        assert torch.equal(again(images()), merged(images()))
    with pytest.raises(NetworkError, match="shares: expected 3 numbers within"):
        Blended("monai.dynunet", arguments(TRACKED), (0.5, 2.0, 0.0))
    none = recipe.adapt(over, images(), config.model_copy(update={"doses": (0.0,) * 3}), torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(none.merged(images()), drawn(TRACKED, 0)(images()))


@pytest.mark.parametrize("norm", NORMS)
def test_preset_that_learns_from_turns_refuses_a_network_without_their_head(norm: str) -> None:
    config = AdaptationConfig(preset="ttt", epochs=1, batch_size=3)
    with pytest.raises(NetworkError, match="DynUNet"):
        recipe_of("ttt").adapt(space(norm), images(), config, torch.device("cpu"))
