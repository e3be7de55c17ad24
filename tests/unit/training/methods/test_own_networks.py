"""A network of a package that is installed: found by its entry point, recorded, and missed by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from model_store.manifest import NetworkLayers, NetworkSpec
from model_store.store import Store
from personalization.errors import NetworkError
from personalization.networks import build, names, registry
from personalization.networks.registry import check_origin, origin_of
from service.catalog.ways import ways_of
from service.worker.routing_adapt import load_space
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.federation import load_federation
from training.methods.iop_fl import IopFlConfig
from training.phantom import write_federation
from training.run import Run, execute

MODULE = """
from torch import nn
from personalization.networks.capabilities import Traits

class TinyNet(nn.Module):
    traits = Traits("segmentation", head=("output",))

    def __init__(self, in_channels, classes, width=2):
        super().__init__()
        self.in_channels = in_channels
        first = nn.Conv2d(in_channels, width, 3, padding=1)
        self.body = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU())
        self.output = nn.Conv2d(width, classes, 1)

    def forward(self, images):
        self.traits.check_images(images, self.in_channels, "acme.tiny")
        return self.output(self.body(images))
"""


def write_package(root: Path, version: str, lines: str) -> None:
    """Write a package as pip leaves it: its module, its metadata and its entry points."""
    (root / "acme_nets.py").write_text(MODULE)
    info = root / "acme_nets-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-nets\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[locum.networks]\n{lines}\n")
    registry.installed.cache_clear()


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    root = tmp_path / "site-packages"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))

    def package(version: str = "1.2", lines: str = "acme.tiny = acme_nets:TinyNet") -> None:
        write_package(root, version, lines)

    yield package
    registry.installed.cache_clear()
    sys.modules.pop("acme_nets", None)


def test_network_of_a_package_is_built_by_its_name(install: Install) -> None:
    assert "acme.tiny" not in names()
    with pytest.raises(
        NetworkError, match=r"unknown network 'acme.tiny'; .* an entry point in locum.networks"
    ):
        build("acme.tiny")
    install()
    assert "acme.tiny" in names()
    assert type(build("acme.tiny", in_channels=1, classes=2)).__name__ == "TinyNet"
    with pytest.raises(NetworkError, match=r"'acme.tiny': got an unexpected keyword argument 'depth'"):
        build("acme.tiny", in_channels=1, classes=2, depth=3)
    assert origin_of("acme.tiny") == {"class": "acme_nets:TinyNet", "package": "acme-nets", "version": "1.2"}
    assert origin_of("unet") is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("unet = acme_nets:TinyNet", "'unet' of package acme-nets: Locum has one of this name"),
        ("acme.tiny = acme_nets:Missing", "acme_nets:Missing cannot be imported: .*Missing"),
        ("acme.tiny = acme_absent:Net", "acme_absent:Net cannot be imported: No module named 'acme_absent'"),
        ("acme.tiny = acme_nets:MODULE_", "cannot be imported"),
    ],
)
def test_entry_point_that_is_no_network_is_named(install: Install, lines: str, message: str) -> None:
    install(lines=lines)
    with pytest.raises(NetworkError, match=message):
        build("acme.tiny", in_channels=1, classes=2)


def test_space_of_a_packages_network_is_published_with_its_origin_and_opened_where_it_is(
    install: Install, tmp_path: Path
) -> None:
    install()
    federation = load_federation(write_federation(tmp_path / "data", ("aster", "birch"), 3, 16))
    config = IopFlConfig(rounds=1, local_steps=1, network="acme.tiny")
    run, store = Run(federation, "iop-fl", config, RunConfig(consent="all")), Store(tmp_path / "store")
    offered = execute(run, tmp_path / "run", workers=0, store=store, name="tiny").artefacts[-1]
    network = store.open("tiny.global").manifest.network
    assert network.origin == {"class": "acme_nets:TinyNet", "package": "acme-nets", "version": "1.2"}
    assert load_space(store, offered).space.names[-1] == "global"
    # What adapts it is known without the package, too.
    assert network.layers == NetworkLayers(norm="BatchNorm2d", batch=True, tracked=False, turns=False)
    found = ways_of(store, offered)
    assert (found.summary, found.masks) == ("adapts to a hospital without masks, or with a few", "optional")
    assert "blend" not in (found.presets or ())
    # Another version, and none at all.
    install("1.3")
    with pytest.raises(
        NetworkError, match=r"expected .* acme-nets 1.2, found .* 1.3: install acme-nets==1.2"
    ):
        load_space(store, offered)
    install(lines="")
    with pytest.raises(NetworkError, match=r"it is not installed: install acme-nets==1.2 wherever"):
        load_space(store, offered)


def test_member_with_another_version_refuses_the_configuration(install: Install) -> None:
    install()
    sent = FedAvgConfig(network="acme.tiny").model_dump(mode="json")
    assert sent["network_origin"]["version"] == "1.2"
    assert FedAvgConfig(**sent) == FedAvgConfig(network="acme.tiny")
    install("2.0")
    with pytest.raises(ValidationError, match=r"expected .* acme-nets 1.2, found .* 2.0"):
        FedAvgConfig(**sent)


def test_networks_of_locum_say_nothing_of_an_origin() -> None:
    assert "network_origin" not in FedAvgConfig(network="unet").model_dump()
    assert "layers" not in NetworkSpec(name="unet", arguments={}).model_dump(mode="json")
    assert "origin" not in NetworkSpec(name="unet", arguments={}).model_dump(mode="json")
    check_origin("unet", None)
