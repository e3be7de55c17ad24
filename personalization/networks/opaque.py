"""Network `graph`: the one inside of an imported onnx graph, of which there are no weights to change."""

from __future__ import annotations

from torch import nn

from personalization.errors import NetworkError
from personalization.options.movable import OPAQUE


def opaque(in_channels: int, classes: int) -> nn.Module:
    """Refuse to build it. Raises NetworkError, which says what can be done with such a version."""
    raise NetworkError(
        f"network '{OPAQUE}' ({in_channels} channels, {classes} outputs) was imported as a finished graph: "
        "it has no weights to adapt, average or train. It can be served, judged and rolled back; import it "
        "as a bundle or an nnU-Net folder to adapt it"
    )
