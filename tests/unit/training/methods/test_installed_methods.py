"""A method of a package that is installed: found by its entry point, and refused by its package's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.training.acme_methods import Install, acme_methods
from training.data.federation import load_federation
from training.errors import ConfigurationError
from training.methods.registry import fitting, method, methods
from training.options import listed_methods
from training.run import Run


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    with acme_methods(tmp_path / "site-packages", monkeypatch) as package:
        yield package


def test_method_of_a_package_is_found_by_its_name(install: Install, phantom_federation: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown method 'acme\.shrink'"):
        method("acme.shrink")
    install()
    assert "acme.shrink" in methods()
    assert listed_methods() == list(methods())
    chosen = method("acme.shrink")
    assert (chosen.name, chosen.build.__name__) == ("acme.shrink", "Shrink")
    with pytest.raises(ConfigurationError, match=r"did you mean 'acme\.shrink'\?"):
        method("acme.shrnk")
    federation = load_federation(phantom_federation)
    first = Run(federation, "acme.shrink", chosen.config())
    assert first.identity()["package"] == "acme-methods 1.2"
    # A run of another version of the package is another run.
    before = first.id
    install("1.3")
    assert first.id != before
    assert "package" not in Run(federation, "fedavg", method("fedavg").config()).identity()


@pytest.mark.parametrize(
    ("lines", "name", "message"),
    [
        ("fedavg = acme_methods:Shrink", "fedavg", "Locum has a method of this name; rename its entry point"),
        ("acme.x = acme_methods:Missing", "acme.x", "Missing cannot be imported: AttributeError"),
        ("acme.x = acme_absent:Shrink", "acme.x", "No module named 'acme_absent'"),
        ("acme.x = acme_methods:Shrink", "acme.x", r"is not registered under this name; put @register"),
        ("acme.shrink = acme_methods:Unregistered", "acme.shrink", r"is not registered under this name"),
    ],
)
def test_entry_point_that_is_no_method_is_refused_with_its_package(
    install: Install, lines: str, name: str, message: str
) -> None:
    install(lines=lines)
    with pytest.raises(ConfigurationError, match=message) as raised:
        method(name)
    assert str(raised.value).startswith(f"method '{name}' of package acme-methods cannot be used\n")
    # The others can be used, and messages name those.
    assert method("fedbn").name == "fedbn"
    found = fitting(lambda each: "classification" in each.kinds).split(", ")
    assert "fedbn" in found
    assert name not in found


def test_package_that_registers_a_name_of_locum_is_refused(install: Install, tmp_path: Path) -> None:
    install(lines="acme.taken = acme_taken:Taken")
    (tmp_path / "site-packages/acme_taken.py").write_text(
        "from training.methods.registry import register\n"
        "from training.methods.fedavg import FedAvg, FedAvgConfig\n"
        "@register('fedavg', FedAvgConfig)\nclass Taken(FedAvg): pass\n"
    )
    with pytest.raises(ConfigurationError, match=r"method 'fedavg': registered by .*FedAvg.* and by .*Taken"):
        method("acme.taken")


def test_name_that_two_packages_have_is_refused(install: Install) -> None:
    install()
    install(name="other-methods")
    with pytest.raises(ConfigurationError, match=r"package (acme|other)-methods has one of this name"):
        method("acme.shrink")
