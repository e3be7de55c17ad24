"""Network `averaged`: the mean of the logits of several networks of one kind.

What nnU-Net answers with: the networks of its folds (Isensee et al., Nature Methods 18, 2021).

Legend: B batch, C channels, K classes, ... spatial axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from torch import Tensor, nn
from typing_extensions import override

from personalization.errors import NetworkError
from personalization.networks.capabilities import traits_of

_MOST_MEMBERS: Final = 16


class Averaged(nn.Module):
    """`members` networks named `network`, each with the same `arguments`; it costs as many passes.

    Raises NetworkError for no members, too many, and averages of averages.
    """

    def __init__(
        self, in_channels: int, classes: int, network: str, arguments: Mapping[str, Any], members: int
    ) -> None:
        super().__init__()
        # The registry imports this module.
        from personalization.networks.registry import build

        if not 1 <= members <= _MOST_MEMBERS or network == "averaged":
            raise NetworkError(
                f"averaged: expected 1 to {_MOST_MEMBERS} networks of another name, found {members} of "
                f"{network}"
            )
        built = [
            build(network, in_channels=in_channels, classes=classes, **arguments) for _ in range(members)
        ]
        self.members = nn.ModuleList(built)
        own = traits_of(built[0])
        head = tuple(f"members.{index}.{path}" for index in range(members) for path in own.head)
        self.traits = replace(own, head=head)

    @override
    def forward(self, image_BC: Tensor) -> Tensor:
        """Logits [B, K, ...]."""
        first, *others = self.members
        total: Tensor = first(image_BC)
        for member in others:
            total = total + member(image_BC)
        return total / len(self.members)
