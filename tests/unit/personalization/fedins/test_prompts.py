"""Prompts of a pool, compared with a ViT that is written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from personalization.errors import NetworkError
from personalization.fedins import PromptAdaptive, look_up
from personalization.networks import build, initialise
from personalization.networks.vit import ViT

ENTRIES, TOP, TOKENS, CLASSES = 5, 2, 3, 3
ARGUMENTS = {
    "in_channels": 1,
    "classes": 3,
    "size": [16, 16],
    "patch": 8,
    "width": 12,
    "depth": 2,
    "heads": 3,
}


def adaptive() -> PromptAdaptive:
    draw = torch.Generator().manual_seed(1)
    backbone = initialise(build("vit", **ARGUMENTS), draw).double()
    assert isinstance(backbone, ViT)
    network = PromptAdaptive(backbone, CLASSES, ENTRIES, TOP, TOKENS).double()
    network.pool.draw(draw, backbone.head)
    with torch.no_grad():  # entries differ enough to change the output
        network.pool.head_weight.add_(torch.randn(network.pool.head_weight.shape, generator=draw))
    return network


def images(count: int = 4) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(count, 1, 16, 16, generator=draw, dtype=torch.float64)


def slow_logits(network: PromptAdaptive, image: Tensor) -> Tensor:
    """Logits of an image [1, C, H, W]: entries by their cosines, and every block on prompts and tokens."""
    backbone, pool = network.backbone, network.pool
    assert isinstance(backbone, ViT)
    query = backbone.query(image)[0]
    cosines = [float(query @ key / query.norm() / key.norm()) for key in pool.keys]
    chosen = sorted(range(ENTRIES), key=lambda index: -cosines[index])[:TOP]
    prompts = sum(pool.prompts[index] for index in chosen) / TOP
    patches = backbone.patch_embed(image)
    tokens = torch.cat((backbone.cls_token, patches), dim=1) + backbone.pos_embed
    for number, block in enumerate(backbone.blocks):
        seen = torch.cat((tokens[:, :1], prompts[number][None], tokens[:, 1:]), dim=1)
        normed, rows = block.norm1(seen), []
        width, heads = 12, block.attn.heads
        query_, key_, value_ = block.attn.qkv(normed)[0].split(width, dim=1)
        for t in range(seen.shape[1]):
            parts = []
            for head in range(heads):
                part = slice(head * width // heads, (head + 1) * width // heads)
                shares = torch.softmax(key_[:, part] @ query_[t, part] / math.sqrt(width // heads), dim=0)
                parts.append(shares @ value_[:, part])
            rows.append(torch.cat(parts))
        seen = seen + block.attn.proj(torch.stack(rows))[None]
        seen = seen + block.mlp(block.norm2(seen))
        tokens = torch.cat((seen[:, :1], seen[:, 1 + TOKENS :]), dim=1)
    feature = backbone.norm(tokens)[0, 0]
    weight = sum(pool.head_weight[index] for index in chosen) / TOP
    bias = sum(pool.head_bias[index] for index in chosen) / TOP
    return weight @ feature + bias


def test_prompts_are_those_of_a_vit_written_out_for_each_image() -> None:
    network, batch = adaptive(), images()
    with torch.no_grad():
        found = network(batch)
        expected = torch.stack([slow_logits(network, image[None]) for image in batch])
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        plain = network.backbone(batch)
        picked = look_up(network.query(batch), network.pool.keys, TOP)
    assert len({tuple(row) for row in picked.entries.tolist()}) > 1
    assert float((found - plain).abs().max()) > 1e-3
    # Outside of the call the backbone is as it was.
    torch.testing.assert_close(network.backbone(batch), plain, rtol=0, atol=0)


def test_every_parameter_of_the_picked_entries_gets_a_gradient_and_no_other() -> None:
    network, batch = adaptive(), images(1)
    answer = network.answer(batch)
    (answer.logits.sum() + answer.picked.similarities.sum()).backward()
    picked = set(answer.picked.entries[0].tolist())
    for name, parameter in network.pool.named_parameters():
        assert parameter.grad is not None, name
        moved = {index for index in range(ENTRIES) if bool(parameter.grad[index].abs().sum() > 0)}
        assert moved == picked, name
    assert all(parameter.grad is None for parameter in network.backbone.parameters())


def test_the_papers_pool_has_the_papers_number_of_parameters() -> None:
    """Table 2: 0.10 M for one prompt, 2.32 M for a pool of 25, keys with them and heads without."""
    with torch.device("meta"):
        backbone = ViT(3, 100)
        counts = {}
        for entries in (1, 25):
            pool = PromptAdaptive(backbone, 100, entries, 3).pool
            named = pool.named_parameters()
            counts[entries] = sum(p.numel() for name, p in named if not name.startswith("head"))
    assert counts == {1: 10 * 12 * 768 + 768, 25: 25 * (10 * 12 * 768 + 768)}
    assert round(counts[25] / 1e6, 2) == 2.32


def test_prompts_need_a_vit_and_a_token() -> None:
    unet = build("unet", in_channels=1, classes=2, width=2)
    with pytest.raises(NetworkError, match="expected a vit, found a UNet"):
        PromptAdaptive(unet, 2, 3, 2)  # type: ignore[arg-type]
    vit = build("vit", **ARGUMENTS)
    with pytest.raises(NetworkError, match="at least one token, found 0"):
        PromptAdaptive(vit, 3, 3, 2, 0)  # type: ignore[arg-type]
