"""Convert published weights of a Vision Transformer to Locum's `ViT`.

Two layouts are supported: that of the original JAX release (an .npz, kernels as [in, out]), and safetensors
with the names common in PyTorch, which `ViT` uses too. The size of the ViT is inferred from the tensors.

Legend: D width, J heads, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from personalization.errors import NetworkError
from personalization.state import State

_BLOCK = "Transformer/encoderblock_{}"
_ATTENTION = "MultiHeadDotProductAttention_1"
_RGB = 3


def vit_from_published(
    published: Mapping[str, Tensor], in_channels: int, classes: int, size: tuple[int, int], where: str
) -> tuple[dict[str, Any], State]:
    """Make the arguments and the state of a `ViT` for a task from published weights.

    The head is new and zero, because a published head has other classes. Positions are resampled (bicubic) to
    the grid of `size`. For images of one channel the kernels of the colours are summed, which is equivalent
    to repeating the channel three times.

    Args:
        where: name of the weights in errors.

    Raises NetworkError naming the first tensor that is missing or does not fit.
    """
    state = _from_jax(published, where) if "embedding/kernel" in published else dict(published)
    state = {name: tensor.float() for name, tensor in state.items() if not name.startswith("head")}
    depth = 1 + max((int(name.split(".")[1]) for name in state if name.startswith("blocks.")), default=-1)
    expected = ["patch_embed.proj.weight", "cls_token", "pos_embed", "norm.weight"]
    expected += [f"blocks.{index}.mlp.fc1.weight" for index in range(depth)]
    missing = [name for name in expected if name not in state]
    if missing:
        raise NetworkError(
            f"{where}: expected the weights of a ViT, as .npz of the JAX release or as safetensors with "
            f"names such as 'blocks.0.attn.qkv.weight'; missing {', '.join(missing[:4])}, found "
            f"{', '.join(sorted(published)[:4]) or 'nothing'}, …"
        )
    kernel = state["patch_embed.proj.weight"]
    width, patch = kernel.shape[0], kernel.shape[2]
    if any(side % patch for side in size):
        raise NetworkError(f"{where}: patches of {patch} do not fit the task's size {size[0]}x{size[1]}")
    if kernel.shape[1] != in_channels:
        if kernel.shape[1] != _RGB or in_channels != 1:
            raise NetworkError(
                f"{where}: expected {in_channels} input channels as the task has, found {kernel.shape[1]}"
            )
        state["patch_embed.proj.weight"] = kernel.sum(1, keepdim=True)
    state["pos_embed"] = resample_positions(state["pos_embed"], (size[0] // patch, size[1] // patch))
    state["head.weight"], state["head.bias"] = torch.zeros(classes, width), torch.zeros(classes)
    arguments = {
        "in_channels": in_channels,
        "classes": classes,
        "size": list(size),
        "patch": patch,
        "width": width,
        "depth": depth,
        "heads": _heads(published, width),
        "mlp_ratio": state["blocks.0.mlp.fc1.weight"].shape[0] // width if depth else 4,
    }
    return arguments, state


def resample_positions(positions_1TD: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resample positions of a square grid (the class token's first) to another grid, if it differs."""
    token, patches = positions_1TD[:, :1], positions_1TD[:, 1:]
    side = math.isqrt(patches.shape[1])
    if side**2 != patches.shape[1]:
        raise NetworkError(f"expected the positions of a square grid, found {patches.shape[1]} of them")
    if grid == (side, side):
        return positions_1TD
    map_1Dhw = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resized = interpolate(map_1Dhw, size=grid, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat((token, resized.flatten(2).transpose(1, 2)), dim=1)


def _heads(published: Mapping[str, Tensor], width: int) -> int:
    kernel = published.get(f"{_BLOCK.format(0)}/{_ATTENTION}/query/kernel")
    return max(width // 64, 1) if kernel is None else kernel.shape[1]


def _from_jax(published: Mapping[str, Tensor], where: str) -> State:
    """Convert to the names and orientations of `ViT`. A pre-logits layer is left out."""

    def take(name: str) -> Tensor:
        if name not in published:
            raise NetworkError(f"{where}: expected a tensor '{name}' in the weights of a ViT, found none")
        return published[name]

    def norm(target: str, source: str) -> State:
        return {f"{target}.weight": take(f"{source}/scale"), f"{target}.bias": take(f"{source}/bias")}

    width = take("cls").shape[-1]
    state = {
        "cls_token": take("cls"),
        "pos_embed": take("Transformer/posembed_input/pos_embedding"),
        "patch_embed.proj.weight": take("embedding/kernel").permute(3, 2, 0, 1),
        "patch_embed.proj.bias": take("embedding/bias"),
        **norm("norm", "Transformer/encoder_norm"),
    }
    index = 0
    while f"{_BLOCK.format(index)}/LayerNorm_0/scale" in published:
        source, target = _BLOCK.format(index), f"blocks.{index}"
        state |= norm(f"{target}.norm1", f"{source}/LayerNorm_0")
        state |= norm(f"{target}.norm2", f"{source}/LayerNorm_2")
        projections = [f"{source}/{_ATTENTION}/{name}" for name in ("query", "key", "value")]
        state[f"{target}.attn.qkv.weight"] = torch.cat(
            [take(f"{name}/kernel").reshape(width, width).T for name in projections]
        )
        state[f"{target}.attn.qkv.bias"] = torch.cat(
            [take(f"{name}/bias").reshape(-1) for name in projections]
        )
        output = f"{source}/{_ATTENTION}/out"
        state[f"{target}.attn.proj.weight"] = take(f"{output}/kernel").reshape(width, width).T
        state[f"{target}.attn.proj.bias"] = take(f"{output}/bias")
        for layer, name in (("fc1", "Dense_0"), ("fc2", "Dense_1")):
            dense = f"{source}/MlpBlock_3/{name}"
            state[f"{target}.mlp.{layer}.weight"] = take(f"{dense}/kernel").T
            state[f"{target}.mlp.{layer}.bias"] = take(f"{dense}/bias")
        index += 1
    return state
