"""Networks from a manifest's name and arguments, with weights, and back to weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from model_store.manifest import NetworkSpec
from personalization.networks import build, initialise, outline
from training.algorithm import State


def new_network(spec: NetworkSpec, generator: torch.Generator) -> nn.Module:
    """A network with fresh weights from `generator` alone."""
    return initialise(build(spec.name, **spec.arguments), generator)


def shapes_of(spec: NetworkSpec) -> State:
    """Names, shapes and types of a network's parameters and buffers, without values."""
    return dict(outline(spec.name, **spec.arguments).state_dict())


def parameter_names(spec: NetworkSpec) -> tuple[str, ...]:
    """Names of a network's parameters, without its buffers (batch-norm statistics and counters)."""
    return tuple(name for name, _ in outline(spec.name, **spec.arguments).named_parameters())


def network_of(spec: NetworkSpec, state: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """A network with a copy of these weights, on a device."""
    # Without initial weights, which would be drawn only to be dropped.
    network = outline(spec.name, **spec.arguments)
    network.load_state_dict({name: _channels_last(tensor) for name, tensor in state.items()}, assign=True)
    return network.to(device)


def _channels_last(tensor: Tensor) -> Tensor:
    """A copy with channels innermost, where convolutions take a sixth less time on a CPU."""
    innermost = torch.channels_last if tensor.ndim == 4 else torch.preserve_format
    return tensor.detach().clone(memory_format=innermost)


def state_of(network: nn.Module) -> State:
    """A copy of a network's parameters and buffers on the CPU."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in network.state_dict().items()
    }
