from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from personalization.errors import RoutingError
from personalization.iop_fl.layers import RoutedConvolution
from personalization.iop_fl.network import (
    batches,
    coefficients,
    parameter_groups,
    route,
    routed_layers,
    share_copy,
)
from personalization.networks.capabilities import Convolution
from personalization.state import clone
from tests.helpers.personalization.routing_cases import SITES, Fixed, fixed, images, moved, slow, space_of


def _gradients(network: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Gradients of a loss that weighs every output differently."""
    network.zero_grad()
    output = network(batch)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    (output.softmax(1) * weights).sum().backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("router", ["direct", "pooled"])
@pytest.mark.parametrize(("inside", "count"), [(0, 2), (1, 1), (2, 3), (4, 2)])
def test_outputs_and_gradients_equal_a_loop_over_images_and_experts(
    router: str, inside: int, count: int
) -> None:
    space, batch = space_of(inside), images(count)
    network = moved(route(space, router))
    reference = slow(space, network.state_dict())
    torch.testing.assert_close(network(batch), reference(batch), rtol=1e-9, atol=1e-9)
    found, expected = _gradients(network, batch), _gradients(reference, batch)
    assert found.keys() == expected.keys() == {name for name, _ in _learned(network)}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
    if inside:
        assert all(gradient.abs().max() > 1e-6 for name, gradient in expected.items() if "router" in name)


@pytest.mark.parametrize("router", ["direct", "pooled"])
def test_float32_outputs_and_gradients_are_close_to_the_float64_loop(router: str) -> None:
    space, batch = space_of(3, torch.float32), images(3, dtype=torch.float32)
    network = moved(route(space, router))
    reference = slow(space, network.state_dict()).double()
    torch.testing.assert_close(network(batch).double(), reference(batch.double()), rtol=1e-4, atol=1e-4)
    found, expected = _gradients(network, batch), _gradients(reference, batch.double())
    for kind in ("router", "bn"):
        one, other = (
            torch.cat([gradients[name].double().flatten() for name in expected if kind in name])
            for gradients in (found, expected)
        )
        assert float((one - other).norm() / other.norm()) < 1e-4


@pytest.mark.parametrize("router", ["direct", "pooled"])
@pytest.mark.parametrize("inside", [0, 1, 3])
def test_step_0_equals_a_plain_network_of_averaged_convolutions(router: str, inside: int) -> None:
    space = space_of(inside)
    experts = space.experts
    plain = space.plain().train()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "_bn" not in name:
                parameter.copy_(sum(experts[e][name] for e in experts) / (inside + 1))
    for batch in (images(2), images(1, 64, 32)):
        network = route(space, router)
        rows = coefficients(network, batch)
        assert rows.shape == (len(batch), 23, inside + 1)
        torch.testing.assert_close(rows, torch.full_like(rows, 1 / (inside + 1)), rtol=1e-15, atol=0)
        torch.testing.assert_close(network(batch), plain(batch), rtol=1e-9, atol=1e-9)


def test_routed_network_uses_batch_statistics_in_eval_mode() -> None:
    network = moved(route(space_of(2)))
    batch = images(4)
    expected = network(batch)
    torch.testing.assert_close(network.eval()(batch), expected, rtol=0, atol=0)
    assert not torch.allclose(network(batch[:1]), expected[:1], atol=1e-3)
    with pytest.raises(RoutingError, match="one value per channel"):
        network(images(1, 16, 16))
    assert network(images(2, 16, 16)).isfinite().all()


def test_only_routers_and_norm_affines_are_learned_and_in_the_state() -> None:
    space = space_of(3)
    direct, pooled = route(space), route(space, "pooled")
    for network, per_layer in ((direct, 1), (pooled, 4)):
        groups = parameter_groups(network)
        assert [len(groups[name]) for name in ("routing", "bn")] == [23 * per_layer, 36]
        grouped = {id(p) for group in groups.values() for p in group}
        assert grouped == {id(p) for _, p in _learned(network)} == {id(p) for p in network.parameters()}
        assert network.state_dict().keys() == {name for name, _ in _learned(network)}
    assert sum(p.numel() for p in parameter_groups(direct)["routing"]) == 23 * 4
    for name, parameter in _learned(direct):
        if "_bn" in name:
            assert torch.equal(parameter, space.experts["global"][name])


@pytest.mark.parametrize("router", ["direct", "pooled"])
def test_training_changes_learned_parameters_and_not_the_experts(router: str) -> None:
    space = space_of(2)
    before = clone(space.stacks)
    network = route(space, router)
    start = clone(network.state_dict())
    optimiser = torch.optim.Adam(network.parameters(), lr=0.1)
    for _ in range(2):
        _gradients(network, images(2))
        optimiser.step()
    # A pooled router's first layer gets a gradient from step 2 on, since its second layer starts at 0
    assert all(not torch.equal(start[name], tensor) for name, tensor in network.state_dict().items())
    assert all(torch.equal(before[name], tensor) for name, tensor in space.stacks.items())


def test_networks_and_copies_share_the_experts_memory() -> None:
    space = space_of(3)
    first, second = route(space), route(space, "pooled")
    for network in (first, second, share_copy(first)):
        for name, layer in routed_layers(network).items():
            assert layer.experts.data_ptr() == space.stacks[f"{name}.weight"].data_ptr()
    parameter = next(share_copy(first).parameters())
    assert all(parameter.data_ptr() != other.data_ptr() for other in first.parameters())


@pytest.mark.parametrize("router", ["direct", "pooled"])
def test_memory_saved_for_gradients_does_not_grow_with_the_experts(router: str) -> None:
    def kept(inside: int) -> int:
        space = space_of(inside)
        experts = {stack.untyped_storage().data_ptr() for stack in space.stacks.values()}
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in experts:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = route(space, router)(images(2))
        assert output.requires_grad
        return sum(sizes.values())

    # Only coefficients and routers grow: some thousand numbers, while an expert has 31 thousand
    assert kept(4) - kept(1) < 0.05 * kept(1)


def test_coefficients_are_per_image_and_ignore_dropout() -> None:
    space, batch = space_of(2), images(5)
    generator = torch.Generator().manual_seed(1)
    network = moved(route(space, "pooled", dropout=0.5, generator=generator))
    rows = coefficients(network, batch, batch_size=5)
    assert network.training
    reference = moved(route(space, "pooled"))
    reference.load_state_dict(network.state_dict())
    seen: list[Tensor] = []
    for layer in routed_layers(reference).values():
        layer.router.register_forward_hook(lambda _m, _i, output: seen.append(output.detach()))
    reference(batch)
    torch.testing.assert_close(rows, torch.stack(seen, dim=1), rtol=1e-12, atol=0)
    assert float(rows[0].sub(rows[1]).abs().max()) > 1e-3
    uneven = coefficients(network, batch, batch_size=4)
    torch.testing.assert_close(uneven[:3], coefficients(network, batch[:3]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2),
        nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, output_padding=1),
        nn.Conv3d(4, 2, (1, 3, 3), dilation=2),
        nn.ConvTranspose3d(4, 2, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_all_images_as_groups_of_one_convolution_equal_one_after_the_other(
    convolution: Convolution, bias: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    shape = (3, *convolution.weight.shape)
    experts = torch.randn(shape, generator=draw, dtype=torch.float64)
    biases = torch.randn(3, convolution.out_channels, generator=draw, dtype=torch.float64) if bias else None
    coefficients = torch.rand(5, 3, generator=draw, dtype=torch.float64)
    layer = RoutedConvolution(convolution, experts, biases, Fixed(coefficients))
    features = torch.randn(5, 4, *(7,) * (convolution.weight.ndim - 2), generator=draw, dtype=torch.float64)
    torch.testing.assert_close(layer._grouped(features, coefficients), layer(features))


def test_direct_coefficients_are_the_softmax_of_the_logits() -> None:
    space, batch = space_of(1), images(2)
    given = torch.linspace(0.1, 2, 46, dtype=torch.float64).reshape(23, 2)
    direct = moved(route(space))
    for row, layer in zip(given, routed_layers(direct).values(), strict=True):
        with torch.no_grad():
            layer.router.logits.copy_(row.log())
    shares = given / given.sum(1, keepdim=True)
    torch.testing.assert_close(coefficients(direct, batch), shares.expand(2, 23, 2))
    torch.testing.assert_close(fixed(direct, shares)(batch), direct(batch), rtol=1e-9, atol=1e-9)


def test_generator_alone_determines_weights_and_dropout() -> None:
    space, batch = space_of(2), images(2)
    before = torch.random.get_rng_state()
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 5, 6)]
    same, again, other = (
        route(space, "pooled", init="official", dropout=0.2, generator=generator) for generator in generators
    )
    first = same(batch)
    assert torch.equal(first, again(batch))
    assert not torch.equal(first, other(batch))
    assert not torch.equal(first, same(batch))
    generators[0].manual_seed(9)
    repeated = same(batch)
    generators[0].manual_seed(9)
    assert torch.equal(repeated, same(batch))
    assert torch.equal(torch.random.get_rng_state(), before)
    rows = coefficients(same, batch)
    assert 0.4 < float(rows.median()) < 0.6
    assert float(rows.std()) > 0.01


def test_router_dropout_keeps_the_mean_logit() -> None:
    layer = routed_layers(
        route(space_of(1), "pooled", init="official", dropout=0.25, generator=torch.Generator())
    )["encoder4.enc4_conv1"]
    router = layer.router
    features = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(1, 8, 1, 1).expand(4000, -1, -1, -1)
    logits = router(features).detach().logit()
    assert float(logits.std(dim=0).min()) > 1e-3
    expected = router.eval()(features[:1]).detach().logit()
    torch.testing.assert_close(logits.mean(0, keepdim=True), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda space: route(space, "dense"), "'direct' or 'pooled', found 'dense'"),
        (lambda space: route(space, "pooled", init="zero"), "found 'zero'"),
        (lambda space: route(space, "pooled", dropout=1.0), "dropout: expected"),
        (lambda space: route(space, init="official"), "need the pooled router"),
        (lambda space: coefficients(space.plain(), images(1)), "expected a routed network"),
        (lambda space: coefficients(route(space, "pooled"), images(0)), "at least one image"),
        (lambda space: batches(images(1)[0, 0], 4), r"\[N, C, H, W\]"),
        (lambda space: batches(images(1), 0), "batch size"),
    ],
)
def test_invalid_router_argument_or_input_is_rejected(call: Callable[..., object], message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        call(space_of(1))


def test_batches_are_even_and_within_the_batch_size() -> None:
    drawn = images(17, 16, 16)
    assert [len(batch) for batch in batches(drawn, 16)] == [9, 8]
    assert [len(batch) for batch in batches(drawn, 17)] == [17]
    assert torch.equal(torch.cat(batches(drawn, 5)), drawn)
    assert max(len(batch) for batch in batches(drawn, 5)) <= 5


def test_expert_names_are_sorted_with_global_last() -> None:
    assert space_of(4).names == (*SITES, "global")


def _learned(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in network.named_parameters() if p.requires_grad]
