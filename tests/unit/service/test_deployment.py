"""What can be said of Dockerfile and compose.yaml without an engine to run them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from typer.main import get_command

from service.__main__ import app
from service.pacs.configuration import load_servers
from service.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())
    return loaded


def test_compose_requires_every_secret() -> None:
    used = re.findall(r"\$\{(\w+)([^}]*)\}", (REPOSITORY / "compose.yaml").read_text())
    required = {name for name, rest in used if rest.startswith(":?")}
    assert required == {"LOCUM_POSTGRES_PASSWORD", "LOCUM_REDIS_PASSWORD"}
    optional = {name for name, _ in used} - required
    assert optional == {"LOCUM_ALLOWED_HOSTS", "LOCUM_PACS", "ORTHANC_PASSWORD"}


def test_compose_publishes_only_the_api_on_loopback(compose: dict[str, Any]) -> None:
    ports = {name: service.get("ports", []) for name, service in compose["services"].items()}
    assert ports == {"api": ["127.0.0.1:8000:8000"], "worker": [], "redis": [], "postgres": [], "orthanc": []}
    assert compose["networks"]["inside"] == {"internal": True}


@pytest.mark.parametrize("service", ["api", "worker"])
def test_compose_environment_has_only_known_settings(compose: dict[str, Any], service: str) -> None:
    known = {f"LOCUM_{name.upper()}" for name in Settings.model_fields}
    # The secret that its PACS' file names.
    assert {*compose["services"][service]["environment"]} - {"ORTHANC_PASSWORD"} <= known


def test_orthanc_of_compose_needs_a_password_and_is_the_pacs_of_its_file(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    orthanc = compose["services"]["orthanc"]
    assert orthanc["profiles"] == ["pacs"]
    assert orthanc["networks"] == ["inside"]
    assert "test -n" in orthanc["command"][-1]
    said = compose["configs"]["orthanc"]["content"].replace("${ORTHANC_PASSWORD:-}", "secret")
    settings = json.loads(said)
    assert settings["AuthenticationEnabled"] is True
    path = tmp_path / "pacs.yaml"
    path.write_text(compose["configs"]["pacs"]["content"])
    server = load_servers(path)["main"]
    assert server.url == f"http://orthanc:{settings['HttpPort']}{settings['DicomWeb']['Root'].rstrip('/')}"
    assert settings["RegisteredUsers"] == {server.username: "secret"}


def test_image_does_not_run_as_root() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    last_stage = lines[max(n for n, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert [line.split()[1] for line in last_stage if line.startswith("USER ")] == ["10001"]


def test_image_command_has_valid_options() -> None:
    line = next(
        line for line in (REPOSITORY / "Dockerfile").read_text().splitlines() if line.startswith("CMD [")
    )
    words = json.loads(line.removeprefix("CMD "))
    assert words[:3] == ["python", "-m", "service"]
    # --help comes last and stops it, after every option before it was read.
    assert CliRunner().invoke(get_command(app), [*words[3:], "--help"]).exit_code == 0
    assert CliRunner().invoke(get_command(app), [*words[3:], "--no-such-option", "--help"]).exit_code != 0


def test_lock_has_the_pinned_versions_and_a_hash_for_each() -> None:
    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    pinned = {}
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        name, found, version = line.partition("==")
        if found:
            pinned[normal(name)] = version
    locked = {}
    for entry in re.split(r"\n(?=\S)", (REPOSITORY / "requirements.lock").read_text().strip()):
        assert "--hash=sha256:" in entry, entry[:80]
        name, _, rest = entry.partition("==")
        locked[normal(name)] = rest.split()[0]
    assert len(locked) > 50
    assert {name: version for name, version in locked.items() if pinned.get(name, version) != version} == {}


def test_every_package_that_is_required_is_locked() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["postgresql"], *extras["s3"], "setuptools"]
    lock = (REPOSITORY / "requirements.lock").read_text()
    for each in required:
        name = re.split(r"[^A-Za-z0-9._-]", each)[0]
        if name != "onnxruntime":
            assert re.search(rf"^{re.escape(name)}==", lock, re.MULTILINE | re.IGNORECASE), each
