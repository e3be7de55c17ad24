from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from personalization.errors import NetworkError
from personalization.networks import build, initialise, names, register
from personalization.networks.unet import UNet

# The authors' checkpoint holds 7,766,150 parameters; the self-supervision head Locum drops is BatchNorm (512)
# and Linear (512 -> 4).
OFFICIAL_PARAMETERS = 7_766_150
HEAD_PARAMETERS = 2 * 512 + 512 * 4 + 4
CONV_PARAMETERS = 7_757_186


def _parameters(network: nn.Module, containing: str = "") -> int:
    return sum(p.numel() for name, p in network.named_parameters() if containing in name)


def test_unet_has_the_published_parameter_count_without_the_unused_head() -> None:
    network = UNet(in_channels=3, classes=2)
    assert _parameters(network) == OFFICIAL_PARAMETERS - HEAD_PARAMETERS
    assert _parameters(network, "conv") == CONV_PARAMETERS


def test_unet_parameter_names_match_the_public_checkpoints() -> None:
    expected = {"conv.weight", "conv.bias"}
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    blocks = [(f"encoder{level}", f"enc{level}") for level in (1, 2, 3, 4)]
    blocks += [(f"decoder{level}", f"dec{level}") for level in (1, 2, 3, 4)]
    blocks += [("bottleneck", "bottleneck")]
    for block, prefix in blocks:
        for number in (1, 2):
            expected.add(f"{block}.{prefix}_conv{number}.weight")
            expected |= {f"{block}.{prefix}_bn{number}.{field}" for field in norm}
    for level in (1, 2, 3, 4):
        expected |= {f"upconv{level}.weight", f"upconv{level}.bias"}
    assert set(UNet(3, 2).state_dict()) == expected


def test_unet_forward_equals_a_hand_written_network() -> None:
    network = initialise(UNet(2, 3, width=4), torch.Generator().manual_seed(1)).train()
    state = dict(network.named_parameters())
    image = torch.randn(2, 2, 32, 48, generator=torch.Generator().manual_seed(2))

    def block(x: torch.Tensor, where: str, prefix: str) -> torch.Tensor:
        for number in (1, 2):
            x = nn.functional.conv2d(x, state[f"{where}.{prefix}_conv{number}.weight"], padding=1)
            mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
            gamma, beta = (state[f"{where}.{prefix}_bn{number}.{f}"] for f in ("weight", "bias"))
            x = (x - mean) / (variance + 1e-5).sqrt() * gamma[:, None, None] + beta[:, None, None]
            x = x.clamp(min=0)
        return x

    skips = []
    x = image
    for level in (1, 2, 3, 4):
        skips.append(block(x, f"encoder{level}", f"enc{level}"))
        x = nn.functional.max_pool2d(skips[-1], 2)
    x = block(x, "bottleneck", "bottleneck")
    for level in (4, 3, 2, 1):
        up = nn.functional.conv_transpose2d(
            x, state[f"upconv{level}.weight"], state[f"upconv{level}.bias"], stride=2
        )
        x = block(torch.cat((up, skips[level - 1]), dim=1), f"decoder{level}", f"dec{level}")
    expected = nn.functional.conv2d(x, state["conv.weight"], state["conv.bias"])
    torch.testing.assert_close(network(image), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 32, 40), (1, 1, 31, 32), (1, 1, 0, 16)])
def test_unet_with_side_not_a_multiple_of_16_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(NetworkError, match=f"multiples of 16, found {shape[2]}x{shape[3]}"):
        UNet(1, 2, width=1)(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(1, 3, 32, 32), (1, 32, 32)])
def test_unet_with_wrong_channels_or_axes_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(NetworkError, match=re.escape("expected images [B, 1, H, W]")):
        UNet(1, 2, width=1)(torch.zeros(shape))


@pytest.mark.parametrize("wrong", [{"in_channels": 0}, {"classes": 1}, {"width": 0}])
def test_invalid_unet_argument_is_rejected_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(NetworkError, match=next(iter(wrong))):
        build("unet", **{"in_channels": 1, "classes": 2, **wrong})


def test_registry_rejects_unknown_names_arguments_and_duplicates() -> None:
    assert "unet" in names()
    with pytest.raises(NetworkError, match="unknown network 'resnet'; known: ") as found:
        build("resnet")
    listed = set(re.findall(r"[\w.]+", str(found.value).partition("known: ")[2].partition(". One")[0]))
    # No name of what a method, preset or importer makes.
    assert listed == set(names()) - {"averaged", "blended", "fedoap", "graph", "projected"}
    with pytest.raises(NetworkError, match="'unet': missing a required argument: 'classes'"):
        build("unet", in_channels=1)
    with pytest.raises(NetworkError, match="unexpected keyword argument 'depth'"):
        build("unet", in_channels=1, classes=2, depth=3)
    with pytest.raises(NetworkError, match="registered twice"):
        register("unet")(UNet)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(3, 5, 3),
        lambda: nn.ConvTranspose2d(6, 4, 2, stride=2),
        lambda: nn.Linear(7, 3),
        lambda: nn.Conv2d(3, 5, 3, bias=False),
    ],
)
def test_initialise_draws_the_same_values_as_pytorch(make: type[nn.Module]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = make()
    redrawn = initialise(make(), torch.Generator().manual_seed(5))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(redrawn.state_dict()[name], tensor), name


def test_initialise_does_not_depend_on_the_memory_format() -> None:
    plain = build("unet", in_channels=3, classes=2, width=2)
    innermost = build("unet", in_channels=3, classes=2, width=2)
    for parameter in innermost.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    for network in (plain, innermost):
        initialise(network, torch.Generator().manual_seed(3))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(innermost.state_dict()[name], tensor), name


def test_initialise_keeps_the_global_generator_and_rejects_unknown_layers() -> None:
    network = build("unet", in_channels=1, classes=2, width=2)
    before = torch.random.get_rng_state()
    initialise(network, torch.Generator().manual_seed(0))
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(NetworkError, match="Embedding"):
        initialise(nn.Sequential(nn.Embedding(2, 2)), torch.Generator())
