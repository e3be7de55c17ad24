"""Routed convolutions, with weights mixed from several experts, and batch norm with batch statistics.

Legend: B batch, C and O channels in and out, H and W height and width, E experts, P weights of one expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.errors import RoutingError


class _RoutedConvolution(nn.Module, ABC):
    """Base of both routed convolutions: the experts, and the mixing for a batch or for each image.

    The experts are buffers outside the state dict, so that a checkpoint of a routed network has only learned
    parameters. Gradients reach only the router: autograd multiplies the gradient of the mixed weight with the
    experts, one matrix-vector product in each direction.
    """

    experts: Tensor
    biases: Tensor | None

    def __init__(
        self, plain: nn.Conv2d | nn.ConvTranspose2d, experts: Tensor, biases: Tensor | None, router: nn.Module
    ) -> None:
        super().__init__()
        if plain.padding_mode != "zeros":
            raise RoutingError(f"expected a convolution padded with zeros, found '{plain.padding_mode}'")
        self.register_buffer("experts", experts, persistent=False)
        self.register_buffer("biases", biases, persistent=False)
        self.router = router
        # Whether batch norm follows, which cancels the scale of the coefficients
        self.normalised = False
        self.in_channels = plain.in_channels
        self.stride = plain.stride
        self.dilation = plain.dilation
        self.groups = plain.groups

    def forward(self, features_BCHW: Tensor) -> Tensor:
        """Convolve with W = sum_k r_k W_k and b = sum_k r_k b_k, where r are the router's coefficients.

        Coefficients [E] give one weight for the whole batch, coefficients [B, E] one for each image.
        """
        coefficients = self.router(features_BCHW)
        if coefficients.shape[0] == 1:
            # One image, or one expert: one weight for the whole batch
            coefficients = coefficients.reshape(-1)
        if coefficients.ndim == 1:
            return self._convolve(features_BCHW, *self.mixed(coefficients))
        # Image by image: on a CPU this is a fifth faster than mixing for the whole batch at once, and not
        # slower than a grouped convolution, which needs the channels outermost. split and unbind, because
        # their gradient is one concatenation; that of an index fills a tensor of the batch for every image.
        return torch.cat(
            [
                self._convolve(image, *self.mixed(own))
                for image, own in zip(torch.split(features_BCHW, 1), coefficients.unbind(), strict=True)
            ]
        )

    def mixed(self, coefficients_E: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mix the experts' weights and biases by these coefficients."""
        # Channels innermost, as the experts are stored: then flattening is a view, and so is the result
        inner = self.experts.movedim(2, -1)
        weight = (coefficients_E @ inner.flatten(1)).reshape(inner.shape[1:])
        # Positive axes, because the onnx exporter writes negative ones into the graph unchanged
        return weight.movedim(3, 1), None if self.biases is None else coefficients_E @ self.biases

    @abstractmethod
    def _convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the plain operation with this weight and bias."""


class RoutedConv2d(_RoutedConvolution):
    """A Conv2d over experts [E, O, C / groups, h, w]."""

    def __init__(self, plain: nn.Conv2d, experts: Tensor, biases: Tensor | None, router: nn.Module) -> None:
        super().__init__(plain, experts, biases, router)
        self.padding = plain.padding

    def _convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.conv2d(
            features, weight, bias, self.stride, self.padding, self.dilation, self.groups
        )


class RoutedConvTranspose2d(_RoutedConvolution):
    """A ConvTranspose2d over experts [E, C, O / groups, h, w]."""

    def __init__(
        self, plain: nn.ConvTranspose2d, experts: Tensor, biases: Tensor | None, router: nn.Module
    ) -> None:
        super().__init__(plain, experts, biases, router)
        # Padding by name ("same") exists for convolutions only
        self.padding: tuple[int, ...] = plain.padding  # type: ignore[assignment]
        self.output_padding = plain.output_padding

    def _convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.conv_transpose2d(
            features, weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


class BatchStatisticsNorm2d(nn.BatchNorm2d):
    """Batch norm by the statistics of the current batch, in train and in eval mode (1.4, item 5)."""

    def __init__(self, plain: nn.BatchNorm2d) -> None:
        super().__init__(plain.num_features, plain.eps, affine=False, track_running_stats=False)
        self.affine = plain.affine
        if plain.affine:
            self.weight = nn.Parameter(plain.weight.detach().clone())
            self.bias = nn.Parameter(plain.bias.detach().clone())

    def forward(self, features_BCHW: Tensor) -> Tensor:
        """Normalise. Raises RoutingError if the batch has one value per channel, which has no variance."""
        if features_BCHW.numel() == self.num_features:
            raise RoutingError(
                f"batch norm over {self.num_features} channels: found one value per channel, which has no "
                "statistics; expected larger images or several at once"
            )
        return super().forward(features_BCHW)


def use_batch_statistics(network: nn.Module) -> None:
    """Make every batch norm of a network use the statistics of the current batch, in place."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d) and not isinstance(module, BatchStatisticsNorm2d):
            network.set_submodule(name, BatchStatisticsNorm2d(module))


class FixedStatisticsNorm2d(nn.BatchNorm2d):
    """Batch norm by its running statistics, in train and in eval mode, which never change."""

    def __init__(self, plain: nn.BatchNorm2d) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine)
        self.load_state_dict(plain.state_dict())

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stay in eval mode."""
        return super().train(False)


def fix_statistics(network: nn.Module) -> None:
    """Make every batch norm of a network keep its running statistics in train mode too, in place."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            fixed = FixedStatisticsNorm2d(module).to(module.weight).eval()
            network.set_submodule(name, fixed)
