"""Build a routed network from a federation's models, and read its coefficients.

Legend: N images, B batch, L routed layers, E experts (K inside models and the global one).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.errors import RoutingError
from personalization.iop_fl.layers import RoutedConvolution, use_batch_statistics
from personalization.iop_fl.routers import DirectCoefficients, Init, PooledRouter
from personalization.iop_fl.space import RoutingSpace
from personalization.networks.capabilities import (
    MOST_DIMENSIONS,
    BatchNorm,
    Traits,
    batch_norms,
    convolutions,
    spatial_axes,
)
from personalization.options.presets import Router

# Voxels of a batch of volumes, outside training and in it, where their features are kept for the gradient.
MOST_VOXELS = 2**22
MOST_VOXELS_LEARNED = 2**19


def route(
    space: RoutingSpace,
    router: Router = "direct",
    init: Init = "uniform",
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Build the space's network with every convolution mixed from all experts, layer by layer (1.4).

    Only the routers and batch norm's affine parameters are learned; the latter start at the global model's.
    Batch norm always uses the statistics of the current batch. With `init="uniform"`, step 0 mixes every
    layer with 1/E each. `init`, `dropout` and `generator` apply to the pooled router. The generator draws its
    weights, and its dropout masks at each forward pass; the default is seeded with 0. With K = 0 there is
    only one expert, and the router is always the direct one.

    The state dict has only the routers and batch norm's affine parameters. The experts are the space's own
    tensors, not copies.
    """
    if router not in ("direct", "pooled"):
        raise RoutingError(f"router: expected 'direct' or 'pooled', found '{router}'")
    if init not in ("uniform", "official"):
        raise RoutingError(f"init: expected 'uniform' or 'official', found '{init}'")
    if not 0 <= dropout < 1:
        raise RoutingError(f"dropout: expected 0 <= dropout < 1, found {dropout}")
    if router == "direct" and (init != "uniform" or dropout):
        raise RoutingError("init='official' and dropout need the pooled router, found router='direct'")
    generator = generator or torch.Generator().manual_seed(0)
    network = space.plain().requires_grad_(False)
    followed = _followed_by_norm(space.outline())
    for name, convolution in convolutions(network).items():
        experts = space.stacks[f"{name}.weight"]
        coefficients: nn.Module
        if router == "direct" or len(space.names) == 1:
            coefficients = DirectCoefficients(len(space.names), experts.dtype)
        else:
            coefficients = PooledRouter(
                convolution.in_channels, len(space.names), init, dropout, generator, experts.dtype
            )
        layer = RoutedConvolution(convolution, experts, space.stacks.get(f"{name}.bias"), coefficients)
        layer.normalised = name in followed
        network.set_submodule(name, layer)
    use_batch_statistics(network)
    if not routed_layers(network):
        raise RoutingError(f"network '{space.network}' has no convolution to route")
    return network.train()


def routed_layers(network: nn.Module) -> dict[str, RoutedConvolution]:
    """Return the routed layers by name, in registration order (for a U-Net, execution order)."""
    return {name: module for name, module in network.named_modules() if isinstance(module, RoutedConvolution)}


def parameter_groups(network: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the learned parameters: those of the routers ("routing") and batch norm's affine ones ("bn")."""
    return {
        "routing": [
            parameter for layer in routed_layers(network).values() for parameter in layer.router.parameters()
        ],
        "bn": [parameter for norm in batch_norms(network).values() for parameter in norm.parameters()],
    }


def coefficients(
    network: nn.Module,
    images_NCHW: Tensor,
    batch_size: int = 16,
    check_cancelled: CancelCheck = never_cancelled,
) -> Tensor:
    """Compute the coefficients [N, L, E] of each image and layer, without dropout.

    Those of a pooled router depend on the other images of the batch (batch norm), so batches are as even as
    possible, which avoids a batch of one image. Direct coefficients are the same for every image, and need no
    forward pass. Raises RoutingError if there are no images, or the network is not a routed one.
    """
    layers = _layers_of(network)
    with torch.no_grad(), _evaluating(network):
        if all(isinstance(layer.router, DirectCoefficients) for layer in layers):
            shared = torch.stack([layer.router(images_NCHW) for layer in layers])
            return shared.expand(len(images_NCHW), -1, -1)
        rows = []
        for batch in batches(images_NCHW, batch_size):
            check_cancelled()
            seen: list[Tensor] = []
            handles = [
                layer.router.register_forward_hook(
                    lambda _router, _inputs, output, seen=seen: seen.append(output)
                )
                for layer in layers
            ]
            try:
                network(batch)
            finally:
                for handle in handles:
                    handle.remove()
            rows.append(torch.stack(seen, dim=1))
        return torch.cat(rows)


def share_copy(network: nn.Module) -> nn.Module:
    """Copy a routed network with its own parameters; the experts, which never change, are shared."""
    memo: dict[int, object] = {}
    for layer in routed_layers(network).values():
        memo[id(layer.experts)] = layer.experts
        memo[id(layer.biases)] = layer.biases
    return copy.deepcopy(network, memo)


def at_once(batch_size: int, sides: Sequence[int], most_voxels: int = MOST_VOXELS) -> int:
    """Images with these sides in a batch of at most `batch_size`: of volumes as many as have `most_voxels`
    together, and at least one, since a network holds all features of all of them."""
    if len(sides) < MOST_DIMENSIONS:
        return batch_size
    return max(1, min(batch_size, most_voxels // math.prod(sides)))


def batches(images_NCHW: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Split images into the fewest batches of at most `batch_size`, of even size: 17 by 16 gives 9 and 8.

    Of volumes a batch has fewer (`at_once`). Raises RoutingError if there are no images or their shape is not
    [N, C, ...], with 1 to 3 spatial axes.
    """
    if not 1 <= len(spatial_axes(images_NCHW)) <= MOST_DIMENSIONS or not len(images_NCHW):
        raise RoutingError(f"expected at least one image [N, C, H, W], found {list(images_NCHW.shape)}")
    if batch_size < 1:
        raise RoutingError(f"batch size: expected at least 1, found {batch_size}")
    size = at_once(batch_size, images_NCHW.shape[2:])
    return images_NCHW.tensor_split(math.ceil(len(images_NCHW) / size))


def mixed_batches(images_NCHW: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Split images into as many batches as `batches`, interleaved: of 4 by 2, the first has 0 and 2.

    If batch norm uses the batch's own statistics, they should represent the hospital, and neighbouring images
    belong to the same scan. Raises RoutingError as `batches`.
    """
    count = len(batches(images_NCHW, batch_size))
    return tuple(images_NCHW[first::count] for first in range(count))


def mixed_indices(count: int, batch_size: int) -> tuple[Tensor, ...]:
    """The images of each of the `mixed_batches`, of `count` images, at least one."""
    number = math.ceil(count / batch_size)
    return tuple(torch.arange(first, count, number) for first in range(number))


def _layers_of(network: nn.Module) -> list[RoutedConvolution]:
    layers = list(routed_layers(network).values())
    if not layers:
        raise RoutingError(f"expected a routed network (see `route`), found a plain {type(network).__name__}")
    return layers


def _followed_by_norm(outlined: nn.Module) -> set[str]:
    """Find the convolutions that are directly followed by batch norm, of an outline.

    Inside an nn.Sequential by their places; elsewhere by a pass without values, where the network declares
    what images it takes.
    """
    found = set()
    for path, module in outlined.named_modules():
        if isinstance(module, nn.Sequential):
            children = list(module.named_children())
            for (name, _), (_, following) in pairwise(children):
                if isinstance(following, BatchNorm):
                    found.add(f"{path}.{name}" if path else name)
    traits, channels = getattr(outlined, "traits", None), getattr(outlined, "in_channels", None)
    if not isinstance(traits, Traits) or channels is None or not batch_norms(outlined):
        return found
    outputs: dict[int, tuple[str, Tensor]] = {}

    def note(path: str, output: Tensor) -> None:
        # The tensor is kept, so that no other takes its id.
        outputs[id(output)] = path, output

    for path, convolution in convolutions(outlined).items():
        convolution.register_forward_hook(lambda _, _inputs, output, path=path: note(path, output))
    for norm in batch_norms(outlined).values():
        norm.register_forward_pre_hook(lambda _, inputs: found.add(outputs.get(id(inputs[0]), ("",))[0]))
    with torch.no_grad():
        outlined.eval()(torch.empty(1, channels, *traits.example_sides, device="meta"))
    return found - {""}


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)
