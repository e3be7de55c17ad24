"""The ViT, compared with a plain reference; published weights in both layouts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from personalization.errors import NetworkError
from personalization.networks import build, initialise
from personalization.networks.vit import ViT
from personalization.networks.vit_weights import resample_positions, vit_from_published

SMALL = {"in_channels": 3, "classes": 5, "size": [16, 24], "patch": 8, "width": 12, "depth": 2, "heads": 3}


@pytest.fixture
def vit() -> ViT:
    network = initialise(build("vit", **SMALL), torch.Generator().manual_seed(1)).double()
    assert isinstance(network, ViT)
    with torch.no_grad():
        for parameter in network.parameters():  # norms and biases away from 1 and 0
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return network


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean()
    return centred / math.sqrt(float((centred**2).mean()) + 1e-6) * weight + bias


def _reference(w: dict[str, Tensor], image: Tensor, patch: int, heads: int, depth: int) -> Tensor:
    """One image, token by token and head by head."""
    rows = []
    for top in range(0, image.shape[1], patch):
        for left in range(0, image.shape[2], patch):
            square = image[:, top : top + patch, left : left + patch]
            rows.append((w["patch_embed.proj.weight"] * square).sum((1, 2, 3)) + w["patch_embed.proj.bias"])
    tokens = [t + p for t, p in zip([w["cls_token"][0, 0], *rows], w["pos_embed"][0], strict=True)]
    for index in range(depth):
        b = {k.removeprefix(f"blocks.{index}."): v for k, v in w.items() if k.startswith(f"blocks.{index}.")}
        normed = [_norm(t, b["norm1.weight"], b["norm1.bias"]) for t in tokens]
        projected = [b["attn.qkv.weight"] @ t + b["attn.qkv.bias"] for t in normed]
        width = len(tokens[0])
        part = width // heads
        mixed = []
        for mine in projected:
            out = []
            for head in range(heads):
                at = slice(head * part, (head + 1) * part)
                query = mine[:width][at]
                scores = torch.stack([query @ p[width : 2 * width][at] / math.sqrt(part) for p in projected])
                shares = scores.exp() / scores.exp().sum()
                out.append(sum(s * p[2 * width :][at] for s, p in zip(shares, projected, strict=True)))
            mixed.append(b["attn.proj.weight"] @ torch.cat(out) + b["attn.proj.bias"])
        tokens = [t + m for t, m in zip(tokens, mixed, strict=True)]
        for place, token in enumerate(tokens):
            hidden = (
                b["mlp.fc1.weight"] @ _norm(token, b["norm2.weight"], b["norm2.bias"]) + b["mlp.fc1.bias"]
            )
            hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
            tokens[place] = token + b["mlp.fc2.weight"] @ hidden + b["mlp.fc2.bias"]
    return w["head.weight"] @ _norm(tokens[0], w["norm.weight"], w["norm.bias"]) + w["head.bias"]


def test_vit_forward_equals_a_plain_reference(vit: ViT) -> None:
    images = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([_reference(vit.state_dict(), image, 8, 3, 2) for image in images])
        assert float(expected.std()) > 0.1
        torch.testing.assert_close(vit(images), expected, atol=1e-10, rtol=0)


def test_vit_query_equals_features_and_updates_only_the_class_token(vit: ViT) -> None:
    images = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    seen = []
    vit.blocks[-1].mlp.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[1]))
    with torch.no_grad():
        torch.testing.assert_close(vit.query(images), vit.features(images), atol=1e-12, rtol=0)
    assert seen == [1, 7]


def test_vit_b_16_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        network = build("vit", in_channels=3, classes=1000)
    assert sum(p.numel() for p in network.parameters()) == 86_567_656


def _as_jax(state: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The layout of the JAX release, from its definition y = einsum(x, kernel) + bias."""
    width = state["norm.weight"].shape[0]
    part = width // heads
    out = {
        "cls": state["cls_token"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "embedding/kernel": state["patch_embed.proj.weight"].permute(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": torch.zeros(width, 1000),
        "pre_logits/kernel": torch.zeros(width, width),
    }
    for index in range(2):
        here, block = f"Transformer/encoderblock_{index}", f"blocks.{index}"
        for number, name in ((0, "norm1"), (2, "norm2")):
            out[f"{here}/LayerNorm_{number}/scale"] = state[f"{block}.{name}.weight"]
            out[f"{here}/LayerNorm_{number}/bias"] = state[f"{block}.{name}.bias"]
        for number, name in enumerate(("query", "key", "value")):
            rows = slice(number * width, (number + 1) * width)
            attention = f"{here}/MultiHeadDotProductAttention_1"
            kernel = state[f"{block}.attn.qkv.weight"][rows]  # [J part, D]
            out[f"{attention}/{name}/kernel"] = kernel.reshape(heads, part, width).permute(2, 0, 1)
            out[f"{attention}/{name}/bias"] = state[f"{block}.attn.qkv.bias"][rows].reshape(heads, part)
        weight = state[f"{block}.attn.proj.weight"]
        out[f"{attention}/out/kernel"] = weight.reshape(width, heads, part).permute(1, 2, 0)
        out[f"{attention}/out/bias"] = state[f"{block}.attn.proj.bias"]
        for number, name in ((0, "fc1"), (1, "fc2")):
            out[f"{here}/MlpBlock_3/Dense_{number}/kernel"] = state[f"{block}.mlp.{name}.weight"].T
            out[f"{here}/MlpBlock_3/Dense_{number}/bias"] = state[f"{block}.mlp.{name}.bias"]
    return out


SQUARE = {**SMALL, "size": [16, 16]}


@pytest.mark.parametrize("layout", ["jax", "torch"])
def test_published_weights_give_the_features_of_their_network(layout: str) -> None:
    source = initialise(build("vit", **SQUARE), torch.Generator().manual_seed(4))
    assert isinstance(source, ViT)
    state = source.state_dict()
    published = _as_jax(state, 3) if layout == "jax" else {**state, "head.weight": torch.zeros(1000, 12)}
    if layout == "torch":
        # The file does not give the number of heads: a width of 12 is read as one head.
        source = build("vit", **{**SQUARE, "heads": 1})
        source.load_state_dict(state)
    arguments, found = vit_from_published(published, 3, 2, (16, 16), "vit.npz")
    network = build("vit", **arguments)
    network.load_state_dict(found)
    assert isinstance(network, ViT)
    assert isinstance(source, ViT)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(network.features(images), source.features(images), atol=1e-5, rtol=0)
        assert not network(images).any()
        grey = images[:, :1]
        arguments, found = vit_from_published(published, 1, 2, (16, 16), "vit.npz")
        single = build("vit", **arguments)
        single.load_state_dict(found)
        assert isinstance(single, ViT)
        torch.testing.assert_close(
            single.features(grey), source.features(grey.expand(-1, 3, -1, -1)), atol=1e-5, rtol=0
        )


def test_resample_positions_interpolates_to_another_grid() -> None:
    grid = torch.arange(4.0).reshape(1, 4, 1).expand(1, 4, 2)
    positions = torch.cat((torch.full((1, 1, 2), 9.0), grid), dim=1)
    assert torch.equal(resample_positions(positions, (2, 2)), positions)
    wider = resample_positions(positions, (2, 4))
    assert wider.shape == (1, 9, 2)
    assert torch.equal(wider[:, 0], positions[:, 0])
    rows = wider[0, 1:, 0].reshape(2, 4)
    assert (rows.diff(dim=1) > 0).all()
    torch.testing.assert_close(rows[1] - rows[0], torch.full((4,), rows[1, 0] - rows[0, 0]))


@pytest.mark.parametrize(
    ("published", "channels", "message"),
    [
        ({"conv1.weight": torch.zeros(1)}, 3, r"w\.pt: expected the weights of a ViT.*found conv1\.weight"),
        ({"embedding/kernel": torch.zeros(1)}, 3, "expected a tensor 'cls'"),
        (None, 2, "expected 2 input channels as the task has, found 3"),
    ],
)
def test_weights_of_another_network_are_rejected_by_name(
    vit: ViT, published: dict[str, Tensor] | None, channels: int, message: str
) -> None:
    with pytest.raises(NetworkError, match=message):
        vit_from_published(published or vit.state_dict(), channels, 2, (16, 24), "w.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "heads must divide"),
        ({"size": [16, 20]}, "do not fill images of 16x20; the nearest sizes are 16x16 and 16x24"),
        ({"size": [4, 8]}, "the nearest sizes are 8x8: set one"),
        ({"registers": -1}, "registers no less than 0"),
        ({"depth": 0}, "depth"),
    ],
)
def test_invalid_vit_argument_is_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        build("vit", **{**SMALL, **change})


def test_published_blocks_with_other_tensors_are_rejected_by_name(vit: ViT) -> None:
    published = vit.state_dict()
    published["blocks.1.mlp.w12.weight"] = published.pop("blocks.1.mlp.fc1.weight")
    with pytest.raises(NetworkError, match=r"missing blocks\.1\.mlp\.fc1\.weight, found"):
        vit_from_published(published, 3, 2, (16, 24), "w.safetensors")


def test_vit_rejects_an_image_of_another_size(vit: ViT) -> None:
    with pytest.raises(NetworkError, match=r"expected images \[B, 3, 16, 24\], found \[1, 3, 16, 16\]"):
        vit(torch.zeros(1, 3, 16, 16))
