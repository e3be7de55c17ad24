"""The U-Net with EfficientNet-Lite0: its encoder beside a plain reference on the published names."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d, pad, relu6

from personalization.errors import NetworkError
from personalization.networks import build, initialise
from personalization.networks.capabilities import moving_norms
from personalization.networks.efficientnet_unet import (
    EfficientNetUNet,
    encoder_from_published,
    is_efficientnet,
)
from tests.helpers.personalization.efficientnet import BLOCKS, published


def _reference(t: dict[str, Tensor], image: Tensor) -> Tensor:
    """By TensorFlow's rule of padding: as many outputs as ceil(side / stride), the odd pixel at the end."""

    def layer(x: Tensor, conv: str, norm: str, stride: int = 1, groups: int = 1) -> Tensor:
        kernel = t[f"{conv}.weight"].shape[-1]
        sides = []
        for side in (x.shape[3], x.shape[2]):
            total = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
            sides += [total // 2, total - total // 2]
        x = conv2d(pad(x, sides), t[f"{conv}.weight"], stride=stride, groups=groups)
        mean, variance = t[f"{norm}.running_mean"], t[f"{norm}.running_var"]
        return batch_norm(x, mean, variance, t[f"{norm}.weight"], t[f"{norm}.bias"], eps=1e-3)

    x = relu6(layer(image, "_conv_stem", "_bn0", 2))
    for index, (_, stride, expansion, _) in enumerate(BLOCKS):
        own, inner = f"_blocks.{index}", x
        if expansion > 1:
            inner = relu6(layer(x, f"{own}._expand_conv", f"{own}._bn0"))
        inner = relu6(layer(inner, f"{own}._depthwise_conv", f"{own}._bn1", stride, inner.shape[1]))
        inner = layer(inner, f"{own}._project_conv", f"{own}._bn2")
        x = inner + x if inner.shape == x.shape else inner
    return x


def _network(in_channels: int, tensors: dict[str, Tensor]) -> EfficientNetUNet:
    network = build("efficientnet_unet", in_channels=in_channels, classes=3, width=4)
    initialise(network, torch.Generator().manual_seed(1))
    assert isinstance(network, EfficientNetUNet)
    found = encoder_from_published(tensors, in_channels, "w.pth")
    missing, unexpected = network.load_state_dict(found, strict=False)
    assert not unexpected
    assert not [name for name in missing if name.startswith("encoder.")]
    return network.eval()


@pytest.mark.parametrize("sides", [(64, 64), (32, 96)])
def test_published_weights_give_the_features_of_a_plain_reference(sides: tuple[int, int]) -> None:
    tensors = published()
    assert is_efficientnet(tensors)
    images = torch.randn(2, 3, *sides, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        network, expected = _network(3, tensors), _reference(tensors, images)
        torch.testing.assert_close(network.encoder(images)[-1], expected, atol=1e-5, rtol=1e-5)
        assert float(expected.std()) > 0.01
        torch.testing.assert_close(network.query(images), expected.mean((2, 3)), atol=1e-5, rtol=1e-5)
        assert network(images).shape == (2, 3, *sides)
        grey = images[:, :1]
        same = _reference(tensors, grey.expand(-1, 3, -1, -1))
        torch.testing.assert_close(_network(1, tensors).encoder(grey)[-1], same, atol=5e-4, rtol=1e-3)


def test_every_resolution_of_the_encoder_reaches_the_answer() -> None:
    network = _network(3, published())
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    taken = network.encoder(images)
    assert [features.shape[2] for features in taken] == [32, 16, 8, 4, 2]
    network(images).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())


def test_its_norms_can_be_moved_and_wrong_images_are_refused() -> None:
    network = _network(3, published())
    assert len(moving_norms(network)) == 1 + 15 * 3 + 2 + 10
    with pytest.raises(NetworkError, match="multiples of 32, found 48x64"):
        network(torch.zeros(1, 3, 48, 64))
    with pytest.raises(NetworkError, match="expected 2 input channels"):
        encoder_from_published(published(), 2, "w.pth")
    with pytest.raises(NetworkError, match="efficientnet_unet: width must be at least 1"):
        build("efficientnet_unet", in_channels=3, classes=2, width=0)
