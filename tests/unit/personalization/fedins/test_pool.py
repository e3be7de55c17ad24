"""Lookup, adaptation and merging, compared with naive loops and hand-computed cases."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from personalization.errors import NetworkError, StateError
from personalization.fedins import (
    InstanceAdaptive,
    fedins_loss,
    key_entropy,
    key_matching_loss,
    look_up,
    random_entries,
    unused,
    usage_of,
)
from personalization.networks import Backbone, build, initialise

SIDE = 32
BACKBONES = {
    "unet": {"in_channels": 1, "classes": 3, "width": 2},
    "vit": {
        "in_channels": 1,
        "classes": 3,
        "size": [SIDE, SIDE],
        "patch": 8,
        "width": 12,
        "depth": 2,
        "heads": 3,
    },
}


def adaptive(kind: str, entries: int = 6, top: int = 3, blocks: int | None = None) -> InstanceAdaptive:
    draw = torch.Generator().manual_seed(1)
    backbone = initialise(build(kind, **BACKBONES[kind]), draw)
    assert isinstance(backbone, Backbone)
    for module in backbone.modules():  # running statistics come from the batch below
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        backbone.train()(torch.randn(16, 1, SIDE, SIDE, generator=draw))
    network = InstanceAdaptive(backbone, 3, entries, top, blocks=blocks)
    network.pool.draw(draw, backbone.output_head)
    with torch.no_grad():  # entries differ enough to change the output
        network.pool.scale.add_(0.3 * torch.randn(network.pool.scale.shape, generator=draw))
        network.pool.head_weight.add_(0.3 * torch.randn(network.pool.head_weight.shape, generator=draw))
    return network


def images(count: int = 4, seed: int = 2) -> Tensor:
    return torch.randn(count, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ lookup


def test_look_up_picks_the_same_keys_as_a_naive_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(5, 4, generator=draw), torch.randn(7, 4, generator=draw)
    picked = look_up(queries, keys, 3)
    for query, entries, similarities in zip(queries, picked.entries, picked.similarities, strict=True):
        cosines = [float(query @ key / query.norm() / key.norm()) for key in keys]
        ranking = sorted(range(7), key=lambda index: -cosines[index])[:3]
        assert entries.tolist() == ranking
        torch.testing.assert_close(similarities, torch.tensor([cosines[index] for index in ranking]))


def test_look_up_breaks_ties_by_index_and_gives_zero_query_similarity_0() -> None:
    keys = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 0.0], [3.0, 0.0]])
    picked = look_up(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), keys, 2)
    assert picked.entries.tolist() == [[1, 2], [0, 1]]
    assert picked.similarities.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_look_up_with_fewer_entries_than_top_picks_all() -> None:
    assert look_up(torch.ones(2, 3), torch.ones(2, 3), 5).entries.tolist() == [[0, 1], [0, 1]]
    assert adaptive("unet", entries=2, top=3).answer(images()).picked.entries.shape == (4, 2)


def test_look_up_penalty_changes_the_entry_but_not_the_similarity() -> None:
    keys = torch.eye(3)
    picked = look_up(torch.tensor([[1.0, 0.5, 0.0]]), keys, 1, torch.tensor([0.9, 0.0, 0.0]))
    assert picked.entries.tolist() == [[1]]
    assert float(picked.similarities) == pytest.approx(0.5 / math.sqrt(1.25))


def test_random_entries_are_distinct_and_reproducible_by_generator() -> None:
    queries, keys = torch.randn(50, 4), torch.randn(6, 4)
    picked = random_entries(queries, keys, 3, torch.Generator().manual_seed(0))
    again = random_entries(queries, keys, 3, torch.Generator().manual_seed(0))
    assert torch.equal(picked.entries, again.entries)
    assert all(len(set(row)) == 3 for row in picked.entries.tolist())
    assert {*picked.entries.flatten().tolist()} == set(range(6))


# ------------------------------------------------------------------ the pool


def test_vit_b_16_pool_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        backbone = build("vit", in_channels=3, classes=10)
        assert isinstance(backbone, Backbone)
        network = InstanceAdaptive(backbone, 10, 25, 3)
    assert sum(point.channels for point in network.points) == 102_912
    assert sum(parameter.numel() for parameter in network.pool.parameters()) == 5_357_050


def test_delta_is_the_mean_of_the_picked_entries() -> None:
    network = adaptive("vit")
    picked = network.pick(network.query(images()))
    delta = network.pool.delta(picked)
    for image, entries in enumerate(picked.entries.tolist()):
        for found, parameter in (
            (delta.scale_BD, network.pool.scale),
            (delta.shift_BD, network.pool.shift),
            (delta.head_weight_BKF, network.pool.head_weight),
            (delta.head_bias_BK, network.pool.head_bias),
        ):
            torch.testing.assert_close(found[image], sum(parameter[entry] for entry in entries) / 3)


def test_drawn_pool_has_distinct_entries_with_documented_deviations() -> None:
    backbone = build("vit", **{**BACKBONES["vit"], "width": 48, "heads": 1})
    assert isinstance(backbone, Backbone)
    pool = InstanceAdaptive(backbone, 3, 40, 3).pool.draw(torch.Generator().manual_seed(0))
    pool.requires_grad_(False)
    assert float(pool.scale.mean()) == pytest.approx(1, abs=1e-3)
    assert float(pool.scale.std()) == pytest.approx(0.02, rel=0.05)
    assert float(pool.shift.std()) == pytest.approx(0.02, rel=0.05)
    assert float(pool.head_weight.std()) == pytest.approx(math.sqrt(2 / 48), rel=0.05)
    assert len({tuple(row) for row in pool.keys.tolist()}) == 40


@pytest.mark.parametrize("kind", BACKBONES)
def test_neutral_pool_leaves_the_backbone_output_unchanged(kind: str) -> None:
    network = adaptive(kind)
    with torch.no_grad():
        network.pool.scale.fill_(1)
        network.pool.shift.zero_()
        network.pool.draw(torch.Generator(), network.backbone.output_head)
        network.pool.scale.fill_(1)
        network.pool.shift.zero_()
        torch.testing.assert_close(network(images()), network.backbone(images()), atol=1e-5, rtol=0)


# ------------------------------------------------------------------ adaptation


def test_the_last_block_alone_has_its_points_and_the_last_norm() -> None:
    network = adaptive("vit", blocks=1)
    assert [point.path.rpartition("blocks.1.")[2] for point in network.points] == [
        *("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"),
        "norm",
    ]
    assert adaptive("vit", blocks=2).points == adaptive("vit").points[1:]
    for kind, blocks, message in (("vit", 3, "1 to 2, found 3"), ("unet", 1, "network of blocks")):
        with pytest.raises(NetworkError, match=message):
            adaptive(kind, blocks=blocks)


@pytest.mark.parametrize("kind", BACKBONES)
def test_answer_of_a_batch_equals_answers_of_single_images(kind: str) -> None:
    network = adaptive(kind)
    with torch.no_grad():
        together = network.answer(images())
        assert len({tuple(row) for row in together.picked.entries.tolist()}) > 1
        alone = torch.cat([network(image[None]) for image in images()])
    torch.testing.assert_close(together.logits, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kind", "blocks"), [("unet", None), ("vit", None), ("vit", 1)])
def test_apply_delta_scales_and_shifts_the_output_of_every_point(kind: str, blocks: int | None) -> None:
    """Compared with modules replaced by hand."""
    network = adaptive(kind, blocks=blocks)

    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module, scale: Tensor, shift: Tensor) -> None:
            super().__init__()
            self.inner, self.scale, self.shift = inner, scale, shift

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            axis = 1 if out.ndim == 4 else out.ndim - 1
            shape = [-1 if index == axis else 1 for index in range(out.ndim)]
            return out * self.scale.reshape(shape) + self.shift.reshape(shape)

    with torch.no_grad():
        delta = network.pool.delta(network.pick(network.query(images(1))))
        found = network.apply_delta(network.stem(images(1)), delta)
        start = 0
        for point in network.points:
            here = slice(start, start + point.channels)
            parent, _, name = point.path.rpartition(".")
            wrapped = Scaled(
                network.backbone.get_submodule(point.path), delta.scale_BD[0, here], delta.shift_BD[0, here]
            )
            setattr(network.backbone.get_submodule(parent), name, wrapped)
            start += point.channels
        assert start == delta.scale_BD.shape[1]
        features = network.backbone.features(images(1))
        expected = torch.einsum("kf,bf...->bk...", delta.head_weight_BKF[0], features)
        expected += delta.head_bias_BK[0].reshape(1, 3, *[1] * (features.ndim - 2))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_adaptation_points_match_the_specification() -> None:
    unet = [point.path for point in adaptive("unet").points]
    assert len(unet) == 18 + 4
    assert sum("_bn" in path for path in unet) == 18
    assert [path for path in unet if "upconv" in path] == ["upconv4", "upconv3", "upconv2", "upconv1"]
    vit = [point.path for point in adaptive("vit").points]
    assert len(vit) == 1 + 6 * 2 + 1
    assert (vit[0], vit[-1]) == ("patch_embed.proj", "norm")


@pytest.mark.parametrize("kind", BACKBONES)
def test_one_scale_and_shift_can_be_merged_into_the_weights(kind: str) -> None:
    """As the paper says, one entry adds nothing to inference: y = g (W x + b) + h is (g W) x + (g b + h)."""
    network = adaptive(kind)
    with torch.no_grad():
        delta = network.pool.delta(network.pick(network.query(images(1))))
        merged, sizes = copy.deepcopy(network.backbone), [point.channels for point in network.points]
        scales, shifts = torch.split(delta.scale_BD[0], sizes), torch.split(delta.shift_BD[0], sizes)
        for point, scale, shift in zip(network.points, scales, shifts, strict=True):
            module = merged.get_submodule(point.path)
            channels = 1 if isinstance(module, nn.ConvTranspose2d) else 0
            module.weight.transpose(0, channels).mul_(scale.view(-1, *[1] * (module.weight.ndim - 1)))
            module.bias.mul_(scale).add_(shift)
        head = merged.output_head
        head.weight.copy_(delta.head_weight_BKF[0].view_as(head.weight))
        head.bias.copy_(delta.head_bias_BK[0])
        expected = network.apply_delta(images(), delta)
        assert float((expected - network.backbone(images())).abs().max()) > 0.01
        torch.testing.assert_close(merged(images()), expected, atol=1e-5, rtol=0)


# ------------------------------------------------------------------ training


def test_keys_get_gradients_only_from_the_key_matching_term() -> None:
    network = adaptive("vit").train()
    assert not network.backbone.training
    for weight, moves in ((0.0, False), (0.1, True)):
        network.zero_grad()
        found = network.answer(images())
        loss = fedins_loss(found.logits.square().mean(), found.picked.similarities, weight)
        torch.autograd.backward(loss)
        assert bool(network.pool.keys.grad is not None and network.pool.keys.grad.any()) == moves
        assert network.pool.scale.grad is not None
        picked = {*found.picked.entries.flatten().tolist()}
        for entry, gradient in enumerate(network.pool.scale.grad):
            assert bool(gradient.any()) == (entry in picked)
    assert all(parameter.grad is None for parameter in network.backbone.parameters())


def test_fedins_loss_matches_hand_computed_values() -> None:
    similarities = torch.tensor([[0.5, 0.25], [1.0, 0.25]])
    assert float(key_matching_loss(similarities)) == pytest.approx(1 - (0.75 + 1.25) / 2)
    assert float(fedins_loss(torch.tensor(2.0), similarities, 0.1)) == pytest.approx(0.9 * 2 + 0.1 * 0.0)
    with pytest.raises(StateError, match="key_weight"):
        fedins_loss(torch.tensor(2.0), similarities, 1.5)


# ------------------------------------------------------------------ usage


def test_usage_and_key_entropy_match_hand_computed_values() -> None:
    usage = usage_of(torch.tensor([[0, 1], [0, 2], [0, 1]]), 4)
    assert usage.tolist() == [3, 2, 1, 0]
    shares = [1 / 2, 1 / 3, 1 / 6]
    assert key_entropy(usage) == pytest.approx(-sum(s * math.log(s) for s in shares) / math.log(4))
    assert unused(usage) == 1
    assert key_entropy(torch.tensor([5, 5])) == pytest.approx(1)
    assert key_entropy(torch.tensor([5])) == 0
    assert key_entropy(torch.tensor([0, 0])) == 0
