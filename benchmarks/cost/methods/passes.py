"""Count passes through networks by the multiply-adds of their convolutions, forward and backward.

    with Passes() as counted:
        network(images)
    counted.forward

A pass that ends at a layer counts as the part that it computes. All networks count alike: copies, mixtures of
models, a network behind a filter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


class Passes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """While entered, sums the multiply-adds of each convolution: `forward`, and `backward`.

    Backward, a convolution counts what it counts forward, once, whether the gradient is that of its input, of
    its weight, or of both.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = 0
        self.backward = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do the operation, and count it if it is a convolution."""
        found = func(*args, **(kwargs or {}))
        if func is _FORWARD:
            image, weight, transposed = args[0], args[1], args[6]
            self.forward += _multiply_adds(image, weight, found, transposed)
        elif func is _BACKWARD:
            gradient, image, weight, transposed = args[0], args[1], args[2], args[7]
            self.backward += _multiply_adds(image, weight, gradient, transposed)
        return found


def _multiply_adds(image: Tensor, weight: Tensor, answer: Tensor, transposed: bool) -> int:
    """Each weight is used once at every pixel of the answer; if transposed, at every pixel of the image."""
    places = image if transposed else answer
    return len(image) * math.prod(places.shape[2:]) * weight.numel()
