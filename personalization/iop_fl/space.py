"""The routing space: the federation's models (experts) that an outside hospital's network is mixed from.

Legend: K inside models (one per member hospital), E = K + 1 experts (the inside models and the global one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from personalization.errors import StateError
from personalization.networks import outline
from personalization.networks.capabilities import convolutions
from personalization.state import State, check_compatible, check_finite

GLOBAL = "global"


@dataclass(frozen=True)
class RoutingSpace:
    """The experts of one architecture, with each tensor stacked over the experts. Use `of` to make one.

    `stacks` has every tensor of the state as [E, *shape], in the order of `names`: the sites sorted, the
    global model last. Routed layers use these tensors without copies, so that E models are in memory once.
    Weights of convolutions are stored with the channels innermost, which is faster on a CPU.
    """

    network: str
    arguments: Mapping[str, Any]
    names: tuple[str, ...]
    stacks: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        network: str,
        arguments: Mapping[str, Any],
        inside: Mapping[str, Mapping[str, Tensor]],
        global_model: Mapping[str, Tensor],
    ) -> RoutingSpace:
        """Make the space of `inside`, states by site (may be empty: K = 0), and the global model's state.

        The states are copied. Each is read once and released before the next, so that a lazy mapping never
        has two models in memory. Raises StateError, naming the site and the tensor, for a state that does not
        fit `network`, differs from the others in names, shapes or types, or is not finite; NetworkError for a
        network that cannot be built.
        """
        if GLOBAL in inside:
            raise StateError(f"'{GLOBAL}' is reserved for the global model; rename the site")
        names = (*sorted(inside), GLOBAL)
        outlined = outline(network, **arguments)
        plain = outlined.state_dict()
        weights = {f"{path}.weight" for path in convolutions(outlined)}
        # The models' types are used, not the architecture's, so that a network in float64 is accepted
        expected = {
            name: tensor.to(global_model[name].dtype) if name in global_model else tensor
            for name, tensor in plain.items()
        }
        stacks = {
            name: _empty(len(names), tensor, innermost=name in weights) for name, tensor in expected.items()
        }

        def take(index: int, label: str, state: Mapping[str, Tensor]) -> None:
            check_compatible([expected, state], [network, label])
            check_finite(state, label)
            for name, stack in stacks.items():
                stack[index].copy_(state[name].detach())

        take(-1, "global model", global_model)
        for index, site in enumerate(names[:-1]):
            take(index, f"inside model '{site}'", inside[site])
        return cls(network, dict(arguments), names, stacks)

    @property
    def experts(self) -> dict[str, State]:
        """The state of every expert by name, in order; views, not copies."""
        return {
            expert: {name: stack[index] for name, stack in self.stacks.items()}
            for index, expert in enumerate(self.names)
        }

    def alone(self) -> RoutingSpace:
        """Return the space of the global model alone (K = 0), with the same tensors, not copies."""
        return replace(
            self, names=(GLOBAL,), stacks={name: stack[-1:] for name, stack in self.stacks.items()}
        )

    def outline(self) -> nn.Module:
        """The network's layers, without weights."""
        return outline(self.network, **self.arguments)

    def plain(self) -> nn.Module:
        """Build the global model as a plain network."""
        network = self.outline()
        network.load_state_dict(
            {name: tensor.clone() for name, tensor in self.experts[GLOBAL].items()}, assign=True
        )
        return network


def _empty(experts: int, like: Tensor, *, innermost: bool) -> Tensor:
    if not innermost:
        return torch.empty(experts, *like.shape, dtype=like.dtype)
    outer, channels, *window = like.shape
    return torch.empty(experts, outer, *window, channels, dtype=like.dtype).movedim(-1, 2)
