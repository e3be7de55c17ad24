"""Convolutions whose weights are mixed from those of several experts.

Legend: B batch, C and O channels in and out, H and W height and width, E experts, P weights of one expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.errors import RoutingError


class _RoutedConvolution(nn.Module, ABC):
    """What both convolutions share: the experts, the mixing, and one or several mixtures per batch.

    The experts are buffers outside the state dict: a checkpoint of a routed network holds what is learned
    and nothing else. Gradients reach the router alone: autograd takes the gradient of the mixed weight and
    multiplies it with the experts, which therefore cost one matrix-vector product each way.
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
        # Whether batch norm follows, which makes the scale of the coefficients vanish
        self.normalised = False
        self.in_channels = plain.in_channels
        self.stride = plain.stride
        self.dilation = plain.dilation
        self.groups = plain.groups

    def forward(self, features_BCHW: Tensor) -> Tensor:
        """The convolution with W = sum_k r_k W_k and b = sum_k r_k b_k, r from the router.

        Coefficients [E] make one weight for the whole batch; coefficients [B, E] one for each image.
        """
        coefficients = self.router(features_BCHW)
        if coefficients.shape[0] == 1:
            # One image, or one expert: one weight for the whole batch
            coefficients = coefficients.reshape(-1)
        if coefficients.ndim == 1:
            return self._convolve(features_BCHW, *self.mixed(coefficients))
        # Image by image: on a CPU a fifth faster than mixing for the whole batch at once, and no slower than
        # a grouped convolution, which needs the channels outermost. split and unbind, whose gradients are one
        # concatenation each: that of an index would fill a tensor of the whole batch for every image.
        return torch.cat(
            [
                self._convolve(image, *self.mixed(own))
                for image, own in zip(torch.split(features_BCHW, 1), coefficients.unbind(), strict=True)
            ]
        )

    def mixed(self, coefficients_E: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of these coefficients."""
        # Channels innermost, as the experts are kept: flattening is then a view, and so is the result
        inner = self.experts.movedim(2, -1)
        weight = (coefficients_E @ inner.flatten(1)).reshape(inner.shape[1:])
        # Axes counted from the front: the onnx exporter writes a negative one into the graph as it is
        return weight.movedim(3, 1), None if self.biases is None else coefficients_E @ self.biases

    @abstractmethod
    def _convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The plain operation with this weight and bias."""


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
    """Batch norm by the statistics of the batch at hand, in train and in eval mode (1.4, item 5)."""

    def __init__(self, plain: nn.BatchNorm2d) -> None:
        super().__init__(plain.num_features, plain.eps, affine=False, track_running_stats=False)
        self.affine = plain.affine
        if plain.affine:
            self.weight = nn.Parameter(plain.weight.detach().clone())
            self.bias = nn.Parameter(plain.bias.detach().clone())

    def forward(self, features_BCHW: Tensor) -> Tensor:
        """Raises RoutingError where the batch has one value per channel, which has no variance."""
        if features_BCHW.numel() == self.num_features:
            raise RoutingError(
                f"batch norm over {self.num_features} channels met one value per channel: a single image "
                "this small has no statistics; give larger images or several at once"
            )
        return super().forward(features_BCHW)


def use_batch_statistics(network: nn.Module) -> None:
    """Have every batch norm of a network use the statistics of the batch at hand, in place."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d) and not isinstance(module, BatchStatisticsNorm2d):
            network.set_submodule(name, BatchStatisticsNorm2d(module))
