"""Routed convolutions, with weights mixed from several experts, and batch norm with batch statistics.

Legend: B batch, C and O channels in and out, E experts, ... one to three spatial axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.errors import RoutingError
from personalization.networks.capabilities import (
    BatchNorm,
    Convolution,
    InstanceNorm,
    TransposedConvolution,
    batch_norms,
    moving_norms,
    norms,
    running,
)

# For one, two and three spatial axes.
_PLAIN = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


class RoutedConvolution(nn.Module):
    """A convolution of one to three dimensions, plain or transposed, over several experts.

    The experts are [E, O, C / groups, ...], of a transposed convolution [E, C, O / groups, ...]. They are
    buffers outside the state dict, so that a checkpoint of a routed network has only learned parameters.
    Gradients reach only the router: autograd multiplies the gradient of the mixed weight with the experts,
    one matrix-vector product in each direction.
    """

    experts: Tensor
    biases: Tensor | None

    def __init__(self, plain: Convolution, experts: Tensor, biases: Tensor | None, router: nn.Module) -> None:
        super().__init__()
        if plain.padding_mode != "zeros":
            raise RoutingError(f"expected a convolution padded with zeros, found '{plain.padding_mode}'")
        self.register_buffer("experts", experts, persistent=False)
        self.register_buffer("biases", biases, persistent=False)
        self.router = router
        # Whether batch norm follows, which cancels the scale of the coefficients
        self.normalised = False
        self.in_channels = plain.in_channels
        transposed = isinstance(plain, TransposedConvolution)
        self._convolve: Callable[..., Tensor] = (_TRANSPOSED if transposed else _PLAIN)[
            len(plain.kernel_size) - 1
        ]
        shared = {"stride": plain.stride, "padding": plain.padding, "dilation": plain.dilation}
        own = {"output_padding": plain.output_padding} if transposed else {}
        self._arguments = {**shared, **own, "groups": plain.groups}

    def forward(self, features_BC: Tensor) -> Tensor:
        """Convolve with W = sum_k r_k W_k and b = sum_k r_k b_k, where r are the router's coefficients.

        Coefficients [E] give one weight for the whole batch, coefficients [B, E] one for each image.
        """
        coefficients = self.router(features_BC)
        if coefficients.shape[0] == 1:
            # One image, or one expert: one weight for the whole batch
            coefficients = coefficients.reshape(-1)
        if coefficients.ndim == 1:
            return self._convolve(features_BC, *self.mixed(coefficients), **self._arguments)
        if features_BC.is_cuda:
            return self._grouped(features_BC, coefficients)
        # Image by image: on a CPU this is a fifth faster than mixing for the whole batch at once, and not
        # slower than a grouped convolution, which needs the channels outermost. split and unbind, because
        # their gradient is one concatenation; that of an index fills a tensor of the batch for every image.
        return torch.cat(
            [
                self._convolve(image, *self.mixed(own), **self._arguments)
                for image, own in zip(torch.split(features_BC, 1), coefficients.unbind(), strict=True)
            ]
        )

    def _grouped(self, features_BC: Tensor, coefficients_BE: Tensor) -> Tensor:
        """All images in one convolution, each a group: a GPU takes about as long to start one as to do it."""
        count, inner = len(features_BC), self.experts.movedim(2, -1)
        weights_B = (coefficients_BE @ inner.flatten(1)).reshape(count, *inner.shape[1:]).movedim(-1, 2)
        bias = None if self.biases is None else (coefficients_BE @ self.biases).flatten()
        arguments = {**self._arguments, "groups": count * self._arguments["groups"]}
        images = features_BC.reshape(1, -1, *features_BC.shape[2:])
        found = self._convolve(images, weights_B.flatten(0, 1), bias, **arguments)
        return found.reshape(count, -1, *found.shape[2:])

    def mixed(self, coefficients_E: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mix the experts' weights and biases by these coefficients."""
        # Channels innermost, as the experts are stored: then flattening is a view, and so is the result
        inner = self.experts.movedim(2, -1)
        weight = (coefficients_E @ inner.flatten(1)).reshape(inner.shape[1:])
        # Positive axes, because the onnx exporter writes negative ones into the graph unchanged
        return weight.movedim(
            weight.ndim - 1, 1
        ), None if self.biases is None else coefficients_E @ self.biases


class _AnyBatchNorm(BatchNorm):
    """Batch norm of features with any number of spatial axes."""

    def _check_input_dim(self, features_BC: Tensor) -> None:
        """Take them all: the plain layer that it stands for knows its own."""


class BatchStatisticsNorm(_AnyBatchNorm):
    """Batch norm by the statistics of the current batch, in train and in eval mode (1.4, item 5)."""

    def __init__(self, plain: BatchNorm) -> None:
        super().__init__(plain.num_features, plain.eps, affine=False, track_running_stats=False)
        self.affine = plain.affine
        if plain.affine:
            self.weight = nn.Parameter(plain.weight.detach().clone())
            self.bias = nn.Parameter(plain.bias.detach().clone())

    def forward(self, features_BC: Tensor) -> Tensor:
        """Normalise. Raises RoutingError if the batch has one value per channel, which has no variance."""
        if features_BC.numel() == self.num_features:
            raise RoutingError(
                f"batch norm over {self.num_features} channels: found one value per channel, which has no "
                "statistics; expected larger images or several at once"
            )
        return super().forward(features_BC)


def use_batch_statistics(network: nn.Module) -> None:
    """Make every batch norm of a network use the statistics of the current batch, in place."""
    for name, norm in batch_norms(network).items():
        if not isinstance(norm, BatchStatisticsNorm):
            network.set_submodule(name, BatchStatisticsNorm(norm))


class FixedStatisticsNorm(_AnyBatchNorm):
    """Batch norm by its running statistics, in train and in eval mode, which never change."""

    def __init__(self, plain: BatchNorm) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine)
        self.load_state_dict(plain.state_dict())

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stay in eval mode."""
        return super().train(False)


def fix_statistics(network: nn.Module) -> None:
    """Make every batch norm of a network keep its running statistics in train mode too, in place.

    An instance norm that tracks keeps them as well, but is not used with them.
    """
    for norm in norms(network).values():
        if isinstance(norm, InstanceNorm) and norm.track_running_stats:
            norm.momentum = 0.0
    for name, norm in moving_norms(network).items():
        network.set_submodule(name, FixedStatisticsNorm(norm).to(running(norm)[0]).eval())


def keep_statistics(network: nn.Module, like: Tensor) -> None:
    """Give every batch norm of a routed network running statistics, of `like`'s type, in place."""
    for name, norm in batch_norms(network).items():
        kept = _AnyBatchNorm(norm.num_features, norm.eps, affine=norm.affine).to(like)
        kept.load_state_dict(norm.state_dict(), strict=False)
        network.set_submodule(name, kept)
