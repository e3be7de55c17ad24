"""What is asked of a network: kinds of layers in one to three dimensions, sides, head; none by its name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from personalization.errors import NetworkError
from personalization.networks import outline
from personalization.networks.capabilities import (
    Traits,
    batch_norms,
    convolutions,
    declare,
    head_paths,
    moving_norms,
    norms,
    per_channel,
    required_norms,
    spatial_axes,
    traits_of,
)
from personalization.networks.registry import DEFAULTS, choices, names
from personalization.options.movable import movable
from personalization.test_time.recipe import movable_in
from tests.helpers.personalization.monai_cases import SMALL, small
from tests.helpers.personalization.toy_networks import toy

ROOT = Path(__file__).resolve().parents[4]
# Arguments of every network that methods train on its own; the others belong to their methods.
ALONE = {
    "unet": {"in_channels": 1, "classes": 2, "width": 2},
    "resnet18": {"in_channels": 1, "classes": 2, "width": 2},
    "efficientnet_unet": {"in_channels": 1, "classes": 2, "width": 2},
    "resenc": {"in_channels": 1, "classes": 2, "spatial_dims": 2, "width": 4, "strides": [1, 2, 2]},
    "vit": {"in_channels": 1, "classes": 2, "width": 64, "size": [32, 32], "patch": 8, "depth": 1},
    "averaged": {
        "in_channels": 1,
        "classes": 2,
        "network": "unet",
        "arguments": {"width": 2},
        "members": 2,
    },
    **{name: small(name, 2) for name in SMALL},
}
WITH_A_METHOD = {"blended", "fedoap", "projected"}
TRACKS = ["instance", {"track": True}]
# What is imported as a graph has no layers.
OPAQUE = {"graph"}


def test_every_network_declares_its_traits_or_belongs_to_a_method() -> None:
    assert set(names()) == ALONE.keys() | WITH_A_METHOD | OPAQUE
    # The mean of several networks is made from models that are trained.
    assert set(choices()) == ALONE.keys() - {"averaged"}
    for name, arguments in ALONE.items():
        network = outline(name, **arguments)
        assert head_paths(network)
        assert traits_of(network).dimensions == 2
    for (task, _), name in DEFAULTS.items():
        assert traits_of(outline(name, **ALONE[name])).task == task
    with pytest.raises(NetworkError, match=r"FedOapUNet: expected `traits`.*only the method that it"):
        traits_of(outline("fedoap", in_channels=1, width=2, heads=2, groups=2))


WITHIN = {
    "blended": {
        "backbone": "monai.dynunet",
        "arguments": small("monai.dynunet", 2, norm_name=TRACKS),
        "shares": [0.1] * 3,
    },
    "fedoap": {"in_channels": 1, "width": 2, "heads": 2, "groups": 2},
    "projected": {"network": "resnet18", "arguments": ALONE["resnet18"], "projection": 2},
}
NORM_ARGUMENTS = {
    "monai.basicunet": "norm",
    "monai.dynunet": "norm_name",
    "monai.flexibleunet": "norm",
    "monai.segresnet": "norm",
    "monai.unet": "norm",
}
CASES = [
    *ALONE.items(),
    *WITHIN.items(),
    ("unet", {**ALONE["unet"], "rotation_head": True}),
    ("averaged", {**ALONE["averaged"], "network": "monai.dynunet"}),
    ("resenc", {**ALONE["resenc"], "track": True}),
    *(
        (name, {**ALONE[name], argument: norm})
        for name, argument in NORM_ARGUMENTS.items()
        for norm in ("batch", ["BATCH", {"momentum": 0.05}], "instance", TRACKS, ["group", {"num_groups": 2}])
    ),
]


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_what_presets_move_is_known_without_torch_for_every_network(
    name: str, arguments: dict[str, Any]
) -> None:
    assert {each for each, _ in CASES} | OPAQUE == {*names()}
    known, found = movable(name, arguments), movable_in(outline(name, **arguments))
    assert known is not None
    assert (known.batch, known.tracked, known.turns) == (found.batch, found.tracked, found.turns)


def test_head_of_the_unet_is_all_after_the_bottleneck() -> None:
    network = outline("unet", **ALONE["unet"])
    prefixes = tuple(f"{path}." for path in head_paths(network))
    body = {name.split(".")[0] for name in network.state_dict() if not name.startswith(prefixes)}
    assert body == {"encoder1", "encoder2", "encoder3", "encoder4", "bottleneck"}


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_layers_are_found_in_any_number_of_dimensions(dimensions: int) -> None:
    network = toy(dimensions)
    assert list(convolutions(network)) == ["down", "body.0", "up", "output"]
    assert list(batch_norms(network)) == list(moving_norms(network)) == list(norms(network)) == ["body.1"]
    assert head_paths(network) == ("up", "output")
    features = torch.zeros(2, 4, *(2,) * dimensions)
    assert spatial_axes(features) == tuple(range(2, 2 + dimensions))
    scaled = features + per_channel(torch.arange(4.0), features)
    assert scaled.mean(dim=(0, *spatial_axes(features))).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("layer", "moves"),
    [
        (nn.BatchNorm1d(2), True),
        (nn.BatchNorm3d(2), True),
        (nn.SyncBatchNorm(2), True),
        (nn.BatchNorm2d(2, track_running_stats=False), False),
        (nn.InstanceNorm2d(2, affine=True), False),
        (nn.GroupNorm(1, 2), False),
        (nn.LayerNorm(2), False),
    ],
)
def test_only_batch_norms_with_running_statistics_can_be_moved(layer: nn.Module, moves: bool) -> None:
    network = nn.Sequential(layer)
    assert list(norms(network)) == ["0"]
    assert bool(moving_norms(network)) == moves
    if not moves:
        with pytest.raises(NetworkError, match=f"preset x: .*found Sequential with {type(layer).__name__}"):
            required_norms(network, "preset x")


def test_sides_are_checked_per_axis() -> None:
    traits = Traits("segmentation", ("output",), dimensions=3, multiples=(1, 8, 8), least_side=4)
    traits.check_sides((5, 16, 8), "net")
    for sides, message in (
        ((16, 8), "net: expected 3 spatial axes, found 16x8"),
        ((5, 16, 9), "multiples of 1x8, found 5x16x9"),
        ((3, 8, 8), "at least 4 pixels per side, found 3x8x8"),
    ):
        with pytest.raises(NetworkError, match=re.escape(message)):
            traits.check_sides(sides, "net")
    with pytest.raises(NetworkError, match=re.escape("expected images [B, 2, D, H, W], found [1, 2, 8, 8]")):
        traits.check_images(torch.zeros(1, 2, 8, 8), 2, "net")
    with pytest.raises(NetworkError, match="a multiple for each, found 2 and"):
        Traits("segmentation", ("output",), dimensions=2, multiples=(1, 8, 8))


def test_traits_can_be_declared_for_a_class_from_elsewhere() -> None:
    traits = Traits("classification", head=("1",))
    assert traits_of(declare(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), traits)) is traits
    with pytest.raises(NetworkError, match=r"in `traits.head`, found missing"):
        head_paths(declare(nn.Sequential(), Traits("classification", head=("missing",))))


def test_no_module_asks_for_a_network_by_name() -> None:
    """Outside of the networks' own modules; what is published in a format of its own may name its network,
    and what is known without torch is held against the networks above."""
    own = {
        "personalization/networks/registry.py",
        "personalization/options/movable.py",
        "training/backbones.py",
    }
    named = re.compile("|".join(f"[\"']{name}[\"']" for name in ("unet", "resnet18", "vit")))
    asking = [
        str(path.relative_to(ROOT))
        for room in ("personalization", "training", "service", "model_store")
        for path in (ROOT / room).rglob("*.py")
        if named.search(path.read_text(encoding="utf-8"))
    ]
    assert {path for path in asking if not path.startswith("personalization/networks/")} <= own


@pytest.mark.process
def test_a_network_is_imported_when_it_is_first_built() -> None:
    code = (
        "import sys; from personalization.networks import build; name = 'personalization.networks.unet'; "
        "assert name not in sys.modules; build('unet', in_channels=1, classes=2, width=1); "
        "assert name in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
