"""Convert published weights of a Vision Transformer to Locum's `ViT`.

Three layouts are known: that of the original JAX release (kernels as [in, out]), timm's names, which `ViT`
and the files of DINOv2 have too, and the names of Hugging Face's ViT and DINOv2. The size of the ViT is
inferred from the tensors. LayerScale (Touvron et al., Going Deeper with Image Transformers, 2021) is folded
into the layer before it, which is exact: gamma * (W x + b) = (gamma W) x + gamma b.

What a file has beyond its ViT is left out where it cannot change the features (heads, the token of masked
training), and refused by name where it can (other perceptrons, norms of queries, a token of distillation).

Legend: D width, J heads, T tokens, R registers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from personalization.errors import NetworkError
from personalization.networks.registry import outline
from personalization.networks.vit import check_patches
from personalization.state import State

_BLOCK = "Transformer/encoderblock_{}"
_ATTENTION = "MultiHeadDotProductAttention_1"
_RGB = 3
# They do not change the features: heads, and the token that stands for a masked patch in training.
_UNUSED = ("head", "mask_token", "pooler.", "classifier.", "embeddings.mask_token")
# Of Hugging Face's names, in Locum's; those of DINOv2 beside those of ViT.
_HUGGING_FACE = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.register_tokens": "reg_token",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
}
_HUGGING_FACE_BLOCK = {
    "layernorm_before": "norm1",
    "norm1": "norm1",
    "attention.output.dense": "attn.proj",
    "layer_scale1.lambda1": "ls1.gamma",
    "layernorm_after": "norm2",
    "norm2": "norm2",
    "intermediate.dense": "mlp.fc1",
    "mlp.fc1": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "mlp.fc2": "mlp.fc2",
    "layer_scale2.lambda1": "ls2.gamma",
}


def vit_from_published(
    published: Mapping[str, Tensor], in_channels: int, classes: int, size: tuple[int, int], where: str
) -> tuple[dict[str, Any], State]:
    """Make the arguments and the state of a `ViT` for a task from published weights.

    The head is new and zero, because a published head has other classes. Positions are resampled (bicubic) to
    the grid of `size`. For images of one channel the kernels of the colours are summed, which is equivalent
    to repeating the channel three times. Registers are kept.

    Args:
        where: name of the weights in errors.

    Raises NetworkError naming the first tensors that are missing, do not fit or are not known, or the nearest
    sizes where patches do not fill the task's.
    """
    state = _folded(_in_our_names(published, where), where)
    # Blocks are counted, since a name can have any number.
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    expected = ["patch_embed.proj.weight", "cls_token", "pos_embed", "norm.weight"]
    expected += [f"blocks.{index}.mlp.fc1.weight" for index in range(depth)]
    missing = [name for name in expected if name not in state]
    if missing:
        raise NetworkError(
            f"{where}: expected the weights of a ViT, as .npz of the JAX release or with names of timm or "
            f"Hugging Face, such as 'blocks.0.attn.qkv.weight'; missing {', '.join(missing[:4])}, found "
            f"{', '.join(sorted(published)[:4]) or 'nothing'}, …"
        )
    kernel = state["patch_embed.proj.weight"]
    width, patch = kernel.shape[0], kernel.shape[2]
    check_patches(size, patch, where)
    if kernel.shape[1] != in_channels:
        if kernel.shape[1] != _RGB or in_channels != 1:
            raise NetworkError(
                f"{where}: expected {in_channels} input channels as the task has, found {kernel.shape[1]}"
            )
        state["patch_embed.proj.weight"] = kernel.sum(1, keepdim=True)
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
    if "reg_token" in state:
        arguments["registers"] = state["reg_token"].shape[1]
    shapes = outline("vit", **arguments).state_dict()
    # The positions are checked by their grid, of which a token that is not known would be a part.
    check_fits({**state, "pos_embed": shapes["pos_embed"]}, shapes, where)
    positions = _with_class_position(state["pos_embed"])
    state["pos_embed"] = resample_positions(positions, (size[0] // patch, size[1] // patch))
    return arguments, state


def check_fits(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Raise NetworkError, naming the first tensors that are missing, not known, or of another shape."""
    problems = [f"no tensor '{name}'" for name in expected if name not in state]
    problems += [f"'{name}', which the network does not have" for name in state if name not in expected]
    problems += [
        f"'{name}' of shape {list(tensor.shape)}, expected {list(expected[name].shape)}"
        for name, tensor in state.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise NetworkError(f"{where}: these weights are of another network: {'; '.join(problems[:4])}{more}")


def is_vit(published: Mapping[str, Tensor]) -> bool:
    """Whether these are tensors of a ViT, by their names."""
    return "embedding/kernel" in published or any(name.split(".")[-1] == "cls_token" for name in published)


def _in_our_names(published: Mapping[str, Tensor], where: str) -> State:
    """The tensors of the ViT in timm's names, without a prefix that all of them have."""
    if "embedding/kernel" in published:
        return _from_jax(published, where)
    token = next((name for name in published if name.split(".")[-1] == "cls_token"), "")
    theirs = token.endswith("embeddings.cls_token")
    prefix = token.removesuffix("embeddings.cls_token" if theirs else "cls_token")
    mine = {name.removeprefix(prefix): t for name, t in published.items() if name.startswith(prefix)}
    kept = {name: tensor for name, tensor in mine.items() if not name.startswith(_UNUSED)}
    if theirs:
        return _from_hugging_face(kept, where)
    # The files of DINOv2 call the registers so.
    return {"reg_token" if name == "register_tokens" else name: tensor for name, tensor in kept.items()}


def _folded(published: State, where: str) -> State:
    """In float32, with LayerScale in the layer before it."""
    state = {name: tensor.float() for name, tensor in published.items()}
    for name in [name for name in state if name.endswith((".ls1.gamma", ".ls2.gamma"))]:
        gamma_D, block = state.pop(name), name.rsplit(".", 2)[0]
        layer = f"{block}.{'attn.proj' if '.ls1.' in name else 'mlp.fc2'}"
        if f"{layer}.weight" not in state or f"{layer}.bias" not in state:
            raise NetworkError(
                f"{where}: expected '{layer}.weight' and its bias beside '{name}', found neither"
            )
        state[f"{layer}.weight"] = gamma_D[:, None] * state[f"{layer}.weight"]
        state[f"{layer}.bias"] = gamma_D * state[f"{layer}.bias"]
    return state


def _with_class_position(positions_1TD: Tensor) -> Tensor:
    """Positions, with a zero for the class token's where a file has those of the patches alone: timm's ViTs
    with registers add the class token's position to the token itself."""
    if math.isqrt(positions_1TD.shape[1]) ** 2 != positions_1TD.shape[1]:
        return positions_1TD
    return torch.cat((torch.zeros_like(positions_1TD[:, :1]), positions_1TD), dim=1)


def _from_hugging_face(published: Mapping[str, Tensor], where: str) -> State:
    """Rename, and join the projections of queries, keys and values. Names that are not known stay."""
    state: State = {}
    for name, tensor in published.items():
        layer, _, kind = name.rpartition(".")
        parts = name.split(".")
        if parts[:2] == ["encoder", "layer"]:
            block, inner = f"blocks.{parts[2]}", ".".join(parts[3:])
            if inner.startswith("attention.attention."):
                continue
            layer, _, kind = inner.rpartition(".")
            mapped = _HUGGING_FACE_BLOCK.get(inner) or _HUGGING_FACE_BLOCK.get(layer, layer) + f".{kind}"
            state[f"{block}.{mapped}"] = tensor
        else:
            state[_HUGGING_FACE.get(name) or f"{_HUGGING_FACE.get(layer, layer)}.{kind}"] = tensor
    for index in {name.split(".")[2] for name in published if name.startswith("encoder.layer.")}:
        for kind in ("weight", "bias"):
            names = [
                f"encoder.layer.{index}.attention.attention.{of}.{kind}" for of in ("query", "key", "value")
            ]
            if missing := [name for name in names if name not in published]:
                raise NetworkError(
                    f"{where}: expected a tensor '{missing[0]}' in the weights of a ViT, found none"
                )
            state[f"blocks.{index}.attn.qkv.{kind}"] = torch.cat([published[name] for name in names])
    return state


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
