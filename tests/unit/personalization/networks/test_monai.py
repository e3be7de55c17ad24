"""MONAI's networks by name: as MONAI builds them, with layers that are there once, exported, and bounded."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from personalization.errors import NetworkError
from personalization.export import to_onnx
from personalization.networks import build, initialise, outline
from personalization.networks.capabilities import convolutions, head_paths, moving_norms, norms, traits_of
from personalization.state import State, to_safetensors
from tests.helpers.personalization.monai_cases import SMALL, small

ROOT = Path(__file__).resolve().parents[4]
each = pytest.mark.parametrize("name", SMALL)
dimensions = pytest.mark.parametrize("dims", [2, 3])


def drawn(name: str, dims: int, **own: Any) -> nn.Module:
    network = build(name, **small(name, dims, in_channels=2, classes=3, **own))
    return initialise(network, torch.Generator().manual_seed(4)).eval()


def images(network: nn.Module, count: int = 2) -> Tensor:
    """Random images with the least sides, but the first twice as long."""
    first, *others = traits_of(network).each_multiple
    draw = torch.Generator().manual_seed(1)
    return torch.randn(count, 2, 2 * first, *others, generator=draw)


@each
@dimensions
def test_every_layer_is_there_once_and_used_and_the_head_is_the_end(name: str, dims: int) -> None:
    network = drawn(name, dims)
    tensors = [value for value in network.state_dict().values() if value.numel()]
    assert len({value.data_ptr() for value in tensors}) == len(tensors)
    layers = {**convolutions(network), **norms(network)}
    order: list[str] = []
    for path, layer in layers.items():
        layer.register_forward_hook(lambda *_, path=path: order.append(path))
    logits = network(images(network))
    assert sorted(order) == sorted(layers)
    assert logits.shape == (2, 3, *images(network).shape[2:])
    assert (traits_of(network).task, traits_of(network).dimensions) == ("segmentation", dims)
    # The head runs after everything else, and its last module gives the answer.
    prefixes = tuple(f"{path}." for path in head_paths(network))
    in_head = [f"{path}.".startswith(prefixes) for path in order]
    assert in_head == sorted(in_head)
    assert f"{order[-1]}.".startswith(prefixes[-1])


@pytest.mark.parametrize("name", ["monai.dynunet", "monai.basicunet", "monai.unet", "monai.flexibleunet"])
def test_batch_norms_are_registered_in_the_order_in_which_they_run(name: str) -> None:
    own = {"norm_name" if name == "monai.dynunet" else "norm": "batch"}
    network, order = drawn(name, 2, **own), []
    for path, norm in moving_norms(network).items():
        norm.register_forward_hook(lambda *_, path=path: order.append(path))
    network(images(network))
    assert order == list(moving_norms(network))


def test_attention_gates_are_registered_after_what_they_look_at() -> None:
    network, order = drawn("monai.attentionunet", 2), []
    for path, norm in moving_norms(network).items():
        norm.register_forward_hook(lambda *_, path=path: order.append(path))
    network(images(network))
    assert order == list(moving_norms(network))


@each
@dimensions
def test_graph_equals_torch_at_any_batch_size(name: str, dims: int) -> None:
    network = drawn(name, dims)
    graph = to_onnx(network, 2, images(network).shape[2:])
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    for count in (1, 3):
        seen = images(network, count)
        with torch.no_grad():
            expected = torch.softmax(network(seen), dim=1)
        (found,) = session.run(None, {"image": seen.numpy()})
        assert float(expected.std()) > 0.005
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=0)


INITIALISED = """
import hashlib, torch
from personalization.networks import build, initialise
from personalization.state import to_safetensors
from tests.helpers.personalization.monai_cases import SMALL, small
for name in SMALL:
    torch.rand(3)
    network = initialise(build(name, **small(name, 3)), torch.Generator().manual_seed(9))
    print(name, hashlib.sha256(to_safetensors(network.state_dict())).hexdigest())
"""


@pytest.mark.process
def test_weights_come_from_the_generator_alone_in_every_process() -> None:
    here = []
    for name in SMALL:
        network = initialise(build(name, **small(name, 3)), torch.Generator().manual_seed(9))
        here.append(f"{name} {hashlib.sha256(to_safetensors(network.state_dict())).hexdigest()}")
    command = [sys.executable, "-W", "error", "-c", INITIALISED]
    there = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert there.stdout.split("\n")[:-1] == here


@pytest.mark.process
def test_monai_is_imported_only_when_a_network_of_it_is_built() -> None:
    code = (
        "import sys, personalization.networks, personalization.losses, personalization.metrics, "
        "training.federate, service.app\n"
        "from personalization.networks import build\n"
        "build('unet', in_channels=1, classes=2, width=1)\n"
        "assert 'monai' not in sys.modules\n"
        "build('monai.dynunet', in_channels=1, classes=2)\n"
        "assert 'monai' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# MONAI's class, its arguments, and a multiple that the sides of an image must have.
THEIRS: list[tuple[str, dict[str, Any], int]] = [
    (
        "DynUNet",
        {"kernel_size": [[3, 1], 3, 3], "strides": [1, [2, 1], 2], "upsample_kernel_size": [[2, 1], 2]},
        4,
    ),
    (
        "DynUNet",
        {
            "kernel_size": [3, 3, 3, 3],
            "strides": [1, 2, 2, 2],
            "upsample_kernel_size": [2, 2, 2],
            "filters": [4, 8, 16, 24],
            "norm_name": ("batch", {"momentum": 0.2}),
            "deep_supervision": True,
            "res_block": True,
            "trans_bias": True,
            "dropout": 0.2,
        },
        8,
    ),
    ("SegResNet", {"init_filters": 8, "blocks_down": (1, 2), "blocks_up": (1,), "dropout_prob": 0.2}, 2),
    ("SegResNet", {"init_filters": 4, "norm_name": "GROUP", "num_groups": 2}, 8),
    ("BasicUNet", {"features": (2, 4, 4, 8, 8, 6), "norm": "BATCH"}, 16),
    ("UNet", {"channels": (4, 8, 8), "strides": (2, 2), "num_res_units": 1}, 4),
    ("UNet", {"channels": (4, 8), "strides": (2,), "norm": "batch", "act": ("elu", {"alpha": 0.5})}, 2),
    ("AttentionUnet", {"channels": (4, 6, 8), "strides": (2, 2)}, 4),
    ("MedNeXt", {"init_filters": 4, "blocks_down": (1, 1), "blocks_up": (1, 1), "kernel_size": 5}, 4),
    ("MedNeXt", {"init_filters": 4, "blocks_down": (1,), "blocks_up": (1,), "deep_supervision": True}, 2),
    ("FlexibleUNet", {"backbone": "resnet18", "decoder_channels": (16, 8, 8, 4, 4)}, 32),
]


@pytest.mark.parametrize(("name", "own", "multiple"), THEIRS)
def test_network_equals_that_which_monai_builds(name: str, own: dict[str, Any], multiple: int) -> None:
    from monai.networks import nets

    from personalization.networks.monai.translation import translated, translated_state

    torch.manual_seed(0)
    shared = {"spatial_dims": 2, "in_channels": 1, "out_channels": 3}
    theirs = getattr(nets, name)(**shared, **own).eval()
    ours_name, ours_arguments = translated(name, {**shared, **own})
    ours = build(ours_name, **ours_arguments).eval()
    ours.load_state_dict(translated_state(ours_name, theirs.state_dict()))
    seen = torch.randn(2, 1, 2 * multiple, multiple, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(ours(seen), theirs(seen))
    # What a bundle writes down builds the same.
    again = getattr(nets, name)(**ours.monai_arguments).eval()
    kept = translated_state(ours_name, again.state_dict())
    assert {key: value.shape for key, value in kept.items()} == {
        key: value.shape for key, value in ours.state_dict().items()
    }


def test_translation_writes_down_what_monai_takes_by_default() -> None:
    from personalization.networks.monai.translation import translated

    shared = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
    _, found = translated("UNet", {**shared, "channels": (4, 8), "strides": (2,)})
    assert found["norm"] == ["instance", {"affine": False}]
    assert found["num_res_units"] == 0
    three = {"kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    assert translated("DynUNet", {**shared, **three})[1]["filters"] == [32, 64, 128]
    for name, arguments_, message in (
        ("SwinUNETR", shared, "MONAI's SwinUNETR: expected one of DynUNet, SegResNet"),
        ("UNet", {**shared, "chanels": 3}, "MONAI's UNet: .*'chan"),
        ("MedNeXt", {**shared, "norm_type": "layer"}, "norm_type: expected MONAI's default"),
        ("MedNeXt", {**shared, "global_resp_norm": True}, "global_resp_norm: expected MONAI's default"),
        ("FlexibleUNet", {**shared, "backbone": "resnet18", "pre_conv": None}, "pre_conv: expected MONAI"),
    ):
        with pytest.raises(NetworkError, match=message):
            translated(name, arguments_)


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        ("monai.unet", {"spatial_dims": 1}, "monai.unet: spatial_dims: expected a whole number within 2..3"),
        ("monai.unet", {"width": 10**6}, "width: expected a whole number within 1..2048, found 1000000"),
        ("monai.unet", {"width": True}, "width: expected a whole number within 1..2048, found True"),
        ("monai.unet", {"strides": [2] * 11}, "strides: expected a list of 1 to 10"),
        ("monai.unet", {"channels": [4, 8]}, "channels: expected a list of 3, found [4, 8]"),
        ("monai.unet", {"norm": "sync"}, "norm: expected one of batch, instance, group, or [name, options]"),
        ("monai.unet", {"norm": ["batch", {"track": 1}]}, "options among affine, eps, momentum"),
        ("monai.unet", {"norm": ["batch", {"eps": "1"}]}, "norm.eps: expected a value such as 1e-05"),
        ("monai.unet", {"act": "memswish"}, "act: expected one of relu, leakyrelu, prelu"),
        ("monai.segresnet", {"width": 4}, "channels that are multiples of its 8 groups, found 4"),
        ("monai.segresnet", {"blocks_up": [1]}, "blocks_up: expected a list of 2, found [1]"),
        ("monai.segresnet", {"upsample_mode": "cubic"}, "upsample_mode: expected one of deconv"),
        ("monai.dynunet", {"strides": [2, 2, 2]}, "strides: expected 1 first, so that masks"),
        ("monai.dynunet", {"strides": [1, 2]}, "strides: expected a list of 3 to 10, found [1, 2]"),
        ("monai.dynunet", {"upsample_kernel_size": [2, 2, 1]}, "expected the strides after the first"),
        ("monai.dynunet", {"deep_supervision": True}, "unexpected keyword argument 'deep_supervision'"),
        ("monai.dynunet", {"kernel_size": [[3, 3], 3, 3, 3]}, "kernel_size: expected a list of 3, found"),
        ("monai.mednext", {"kernel_size": 4}, "kernel_size: expected an odd number, found 4"),
        ("monai.flexibleunet", {"backbone": "efficientnet-b0"}, "backbone: expected one of resnet10"),
        ("monai.attentionunet", {"width": 1}, "channels: expected at least 2 per stage"),
    ],
)
def test_arguments_out_of_bounds_are_refused_by_name(name: str, own: dict[str, Any], message: str) -> None:
    with pytest.raises(NetworkError, match=re.escape(message)):
        outline(name, **small(name, 3, **own))


def test_sides_that_do_not_fit_are_refused_before_torch_sees_them() -> None:
    strides = [1, [1, 2, 2], 2]
    network = drawn("monai.dynunet", 3, strides=strides, kernel_size=[[1, 3, 3], 3, 3])
    assert traits_of(network).each_multiple == (2, 4, 4)
    for shape, message in (
        ((1, 1, 4, 8, 8), "monai.dynunet: expected images [B, 2, D, H, W], found [1, 1, 4, 8, 8]"),
        ((1, 2, 4, 6, 8), "expected sides that are multiples of 2x4, found 4x6x8"),
        ((1, 2, 2, 4, 4), "expected at least 64 pixels, found 2x4x4: of fewer, its deepest layers see one"),
    ):
        with pytest.raises(NetworkError, match=re.escape(message)):
            network(torch.zeros(shape))
    network.train()(torch.randn(1, 2, 4, 4, 4))


def test_state_of_a_dynunet_names_every_weight_once() -> None:
    def size(state: State) -> int:
        return sum(value.numel() for value in state.values())

    from monai.networks import nets

    network = drawn("monai.dynunet", 3)
    plain = {"kernel_size": [3] * 4, "strides": [1, 2, 2, 2], "upsample_kernel_size": [2] * 3}
    shared = {"spatial_dims": 3, "in_channels": 2, "out_channels": 3, "filters": [4, 8, 16, 32]}
    theirs = nets.DynUNet(**shared, **plain).state_dict()
    last = sum(value.numel() for key, value in theirs.items() if key.startswith("output_block"))
    assert size(theirs) == 2 * size(network.state_dict()) - last
