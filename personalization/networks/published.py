"""Recognise published weights by the names of their tensors, and make a network for a task of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from personalization.errors import NetworkError
from personalization.networks.capabilities import TaskKind
from personalization.networks.efficientnet_unet import encoder_from_published, is_efficientnet
from personalization.networks.registry import outline
from personalization.networks.vit_weights import check_fits, is_vit, vit_from_published
from personalization.state import State


def network_from_published(
    published: Mapping[str, Tensor],
    kind: TaskKind,
    in_channels: int,
    classes: int,
    size: tuple[int, int],
    width: int,
    where: str,
) -> tuple[str, dict[str, Any], State] | None:
    """The name and arguments of a network, and the published tensors under its names; None for other weights.

    A ViT lacks its head then, EfficientNet-Lite0 the whole decoder of its U-Net, of which `width` is the
    number of channels at full resolution. Raises NetworkError for weights that do not fit, naming `where`.
    """
    if is_vit(published):
        _check_kind(kind, "classification", "a ViT", where)
        arguments, state = vit_from_published(published, in_channels, classes, size, where)
        return "vit", arguments, {n: t for n, t in state.items() if not n.startswith("head.")}
    if is_efficientnet(published):
        _check_kind(kind, "segmentation", "EfficientNet as an encoder", where)
        arguments = {"in_channels": in_channels, "classes": classes, "width": width}
        state = encoder_from_published(published, in_channels, where)
        shapes = outline("efficientnet_unet", **arguments).state_dict()
        expected = {name: tensor for name, tensor in shapes.items() if name.startswith("encoder.")}
        check_fits(state, expected, where)
        return "efficientnet_unet", arguments, {n: t.to(expected[n].dtype) for n, t in state.items()}
    return None


def _check_kind(found: TaskKind, expected: TaskKind, what: str, where: str) -> None:
    if found != expected:
        raise NetworkError(f"{where}: {what} is for a {expected}, the task is a {found}")
