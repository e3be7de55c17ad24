from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from personalization.errors import RoutingError
from personalization.iop_fl.batch_norm import bake_statistics, recalibrate_statistics
from personalization.iop_fl.merge import mean_coefficients, merge
from personalization.iop_fl.network import coefficients, route, routed_layers
from personalization.networks.unet import UNet
from personalization.options.adaptation import Router
from personalization.state import clone
from tests.helpers.personalization.routing_cases import fixed, images, moved, space_of


def _inputs_of_norms(network: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """The input of every batch norm when all images pass through the network at once."""
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _module, inputs, name=name: seen.update({name: inputs[0].detach()})
        )
        for name, module in network.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    network(batch)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("inside", [0, 1, 3])
@pytest.mark.parametrize("size", [(32, 48), (64, 32)])
def test_merged_equals_dynamic_for_direct_coefficients_and_one_full_batch(
    inside: int, size: tuple[int, int]
) -> None:
    space, batch = space_of(inside), images(5, *size)
    network = moved(route(space))
    merged = merge(space, network, batch, prior_images=0)
    assert type(merged) is UNet
    assert not merged.training
    torch.testing.assert_close(merged(batch), network(batch), rtol=1e-9, atol=1e-9)
    # A single image gets the same prediction as within the batch
    torch.testing.assert_close(merged(batch[:1]), network(batch)[:1], rtol=1e-9, atol=1e-9)


def test_merge_in_chunks_is_equal_and_bounds_the_batch_size() -> None:
    space, batch = space_of(2), images(7)
    network = moved(route(space))
    whole = merge(space, network, batch, batch_size=7)
    largest = 0

    class Watched(nn.Module):
        def forward(self, features: Tensor) -> Tensor:
            nonlocal largest
            largest = max(largest, len(features))
            return features

    chunked = nn.Sequential(Watched(), merge(space, network, batch[:2]))
    prior = {f"1.{name}": tensor for name, tensor in space.experts["global"].items()}
    bake_statistics(chunked, batch, batch_size=2, prior=prior, prior_images=4)
    assert largest == 2
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(chunked[1].state_dict()[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


def test_merge_averages_coefficients_and_rescales_where_a_norm_follows() -> None:
    space, batch = space_of(2), images(3)
    network = moved(route(space, "pooled"))
    before = clone(network.state_dict())
    merged = merge(space, network, batch, batch_size=3).state_dict()
    mean = coefficients(network, batch, batch_size=3).mean(0)
    assert float((mean.sum(1) - 1).abs().min()) > 1e-3
    rows = dict(zip(routed_layers(network), mean, strict=True))
    for name, row in rows.items():
        scaled = name == "conv" or name.startswith("upconv")
        weights = row if scaled else row / row.sum()
        fields = ["weight", "bias"] if scaled else ["weight"]
        for field in fields:
            models = [expert[f"{name}.{field}"] for expert in space.experts.values()]
            expected = sum(float(weight) * model for weight, model in zip(weights, models, strict=True))
            torch.testing.assert_close(merged[f"{name}.{field}"], expected, rtol=1e-12, atol=1e-12)
    assert sum("upconv" in name or name == "conv" for name in rows) == 5
    for name, tensor in before.items():
        if "_bn" in name:
            assert torch.equal(merged[name], tensor)
        assert torch.equal(network.state_dict()[name], tensor)


def test_merge_equals_fixed_coefficients_although_it_drops_their_scale() -> None:
    space, batch = space_of(2), images(3)
    network = moved(route(space, "pooled"))
    merged = merge(space, network, batch, batch_size=3, prior_images=0)
    mean = fixed(network, coefficients(network, batch, batch_size=3).mean(0))
    # Equal up to batch norm's epsilon, which is not scaled
    torch.testing.assert_close(merged(batch), mean(batch), rtol=0, atol=5e-3)
    exact = fixed(network, mean_coefficients(network, batch, batch_size=3))
    torch.testing.assert_close(merged(batch), exact(batch), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prior_images", [0.0, 4.0])
@pytest.mark.parametrize("dynamic", [False, True])
def test_baked_statistics_equal_those_measured_in_the_baked_network(
    prior_images: float, dynamic: bool
) -> None:
    space, batch = space_of(2), images(6)
    network = moved(route(space, "pooled"))
    bake = recalibrate_statistics if dynamic else merge
    baked = bake(space, network, batch, batch_size=2, prior_images=prior_images)
    prior = space.experts["global"]
    weight = prior_images / (6 + prior_images)
    inputs = _inputs_of_norms(baked, batch)
    assert len(inputs) == 18
    for name, features in inputs.items():
        values = features.movedim(1, 0).flatten(1)
        norm = baked.get_submodule(name)
        for field, measured in (("running_mean", values.mean(1)), ("running_var", values.var(1, False))):
            expected = weight * prior[f"{name}.{field}"] + (1 - weight) * measured
            torch.testing.assert_close(getattr(norm, field), expected, rtol=1e-9, atol=1e-9)


def test_bake_statistics_with_prior_matches_hand_computed_values() -> None:
    # Constant images of 0 and 2: mean 1, variance 1, all of it between images
    pair = torch.tensor([0.0, 2.0]).reshape(2, 1, 1, 1).expand(2, 1, 4, 4)
    network = nn.Sequential(nn.BatchNorm2d(1))
    for batch_size in (1, 2):
        bake_statistics(network, pair, batch_size)
        assert (network[0].running_mean.item(), network[0].running_var.item()) == (1, 1)
        prior = {"0.running_mean": torch.tensor([5.0]), "0.running_var": torch.tensor([3.0])}
        bake_statistics(network, pair, batch_size, prior, prior_images=6)
        # Two images, weighed with the prior's six
        assert network[0].running_mean.item() == pytest.approx(0.75 * 5 + 0.25 * 1)
        assert network[0].running_var.item() == pytest.approx(0.75 * 3 + 0.25 * 1)


def test_bake_statistics_keeps_a_small_variance_around_a_large_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = 1000 + 0.1 * torch.randn(4, 1, 64, 64, generator=generator)
    network = bake_statistics(nn.Sequential(nn.BatchNorm2d(1)), batch, 2)
    assert network[0].running_var.item() == pytest.approx(float(batch.double().var(correction=0)), rel=1e-3)


@pytest.mark.parametrize("router", ["direct", "pooled"])
def test_recalibrate_statistics_keeps_outputs_on_one_full_batch(router: str) -> None:
    space, batch = space_of(2), images(4)
    network = moved(route(space, router))
    baked = recalibrate_statistics(space, network, batch, prior_images=0)
    torch.testing.assert_close(baked(batch), network(batch), rtol=1e-9, atol=1e-9)
    singly = torch.cat([baked(image[None]) for image in batch])
    torch.testing.assert_close(singly, network(batch), rtol=1e-9, atol=1e-9)
    for name, layer in routed_layers(baked).items():
        assert layer.experts.data_ptr() == space.stacks[f"{name}.weight"].data_ptr()
    assert network.state_dict().keys() == route(space, router).state_dict().keys()


@pytest.mark.parametrize("count", [1, 2, 500])
def test_merge_accepts_any_number_of_images(count: int) -> None:
    space = space_of(1, torch.float32)
    many = torch.randn(count, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    merged = merge(space, route(space), many, batch_size=100)
    assert merged(many[:1]).isfinite().all()


@pytest.mark.parametrize("router", ["direct", "pooled"])
def test_merge_calls_check_cancelled_before_every_batch(router: Router) -> None:
    space, batch = space_of(1), images(6)
    network = route(space, router)
    asked = 0

    def check_cancelled() -> None:
        nonlocal asked
        asked += 1
        if asked == allowed:
            raise InterruptedError

    allowed = 0
    merge(space, network, batch, batch_size=2, check_cancelled=check_cancelled)
    norms = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in space.plain().modules())
    assert asked == 3 * norms + (3 if router == "pooled" else 0)
    recalibrate_statistics(
        space, network, batch, batch_size=6, check_cancelled=check_cancelled
    )  # all at once
    assert asked == 3 * norms + (3 if router == "pooled" else 0) + 1
    for allowed in (1, asked // 2):
        asked = 0
        with pytest.raises(InterruptedError):
            merge(space, network, batch, batch_size=2, check_cancelled=check_cancelled)
        assert asked == allowed


def test_bake_statistics_rejects_invalid_input() -> None:
    space, batch = space_of(1), images(1)
    with pytest.raises(RoutingError, match="prior images: expected 0 or more"):
        bake_statistics(space.plain(), batch, prior=space.experts["global"], prior_images=-1)
    with pytest.raises(RoutingError, match="and a prior"):
        bake_statistics(space.plain(), batch, prior_images=1)
    with pytest.raises(RoutingError, match="at least one image"):
        bake_statistics(space.plain(), batch[:0])
    with pytest.raises(RoutingError, match="expected a routed network"):
        recalibrate_statistics(space, space.plain(), batch)
    idle = space.plain()
    idle.spare = nn.BatchNorm2d(1)
    with pytest.raises(RoutingError, match="does not use this layer"):
        bake_statistics(idle, images(2), batch_size=1)
