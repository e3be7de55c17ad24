"""What can be said of Dockerfile, compose.yaml and the Helm chart without an engine to run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from click.testing import CliRunner
from typer.main import get_command

from locum.demo.__main__ import main as show_demo
from service.__main__ import app
from service.dicom_node.configuration import load_node
from service.pacs.configuration import load_servers
from service.settings import Settings

demo = typer.Typer(add_completion=False)
demo.command()(show_demo)

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
    assert optional == {"LOCUM_ALLOWED_HOSTS", "LOCUM_PACS", "LOCUM_NODE_KEY", "ORTHANC_PASSWORD"}


def test_compose_publishes_only_the_api_on_loopback(compose: dict[str, Any]) -> None:
    ports = {name: service.get("ports", []) for name, service in compose["services"].items()}
    assert {name: ports[name] for name in ports if ports[name]} == {"api": ["127.0.0.1:8000:8000"]}
    assert compose["networks"]["inside"] == {"internal": True}


@pytest.mark.parametrize("service", ["api", "worker", "node"])
def test_compose_environment_has_only_known_settings(compose: dict[str, Any], service: str) -> None:
    known = {f"LOCUM_{name.upper()}" for name in Settings.model_fields}
    # The secrets that the files of PACS and node name.
    named = {"ORTHANC_PASSWORD", "LOCUM_NODE_KEY"}
    assert {*compose["services"][service]["environment"]} - named <= known


def test_gpu_is_given_only_where_it_is_asked_for(compose: dict[str, Any]) -> None:
    """A process without one says cpu, and a process with one refuses to start without it."""
    assert {compose["services"][name]["environment"]["LOCUM_DEVICE"] for name in ("api", "worker")} == {"cpu"}
    assert "NVIDIA_VISIBLE_DEVICES=void" in (REPOSITORY / "Dockerfile").read_text()
    known = {f"LOCUM_{name.upper()}" for name in Settings.model_fields}
    services = yaml.safe_load((REPOSITORY / "compose.gpu.yaml").read_text())["services"]
    assert set(services) == {"api", "worker"}
    for service in services.values():
        assert set(service["environment"]) <= known
        assert service["environment"]["LOCUM_DEVICE"] == "cuda"
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        # `count: 1` would be card 0 for every service.
        assert "count" not in device
        assert device["device_ids"]
    helpers = (REPOSITORY / "deploy" / "helm" / "locum" / "templates" / "_helpers.tpl").read_text()
    assert "strategy: {type: Recreate}" in helpers


def test_read_only_containers_of_compose_get_files(compose: dict[str, Any]) -> None:
    # Compose copies other configs and secrets into the container, which it cannot if it is read_only.
    for name, service in compose["services"].items():
        given = [compose["configs"][one["source"]] for one in service.get("configs", [])]
        assert "secrets" not in service
        if service.get("read_only"):
            assert [{*one} for one in given] == [{"file"}] * len(given), name
            assert all((REPOSITORY / one["file"]).is_file() for one in given)


def test_orthanc_of_compose_needs_a_password_and_is_the_pacs_of_its_file(compose: dict[str, Any]) -> None:
    orthanc = compose["services"]["orthanc"]
    assert orthanc["profiles"] == ["pacs", "node"]
    assert orthanc["networks"] == ["inside"]
    assert "test -n" in orthanc["command"][-1]
    said = compose["configs"]["orthanc"]["content"].replace("${ORTHANC_PASSWORD:-}", "secret")
    settings = json.loads(said)
    assert settings["AuthenticationEnabled"] is True
    server = load_servers(REPOSITORY / compose["configs"]["pacs"]["file"])["main"]
    assert server.url == f"http://orthanc:{settings['HttpPort']}{settings['DicomWeb']['Root'].rstrip('/')}"
    assert settings["RegisteredUsers"] == {server.username: "secret"}


def test_node_of_compose_is_a_peer_of_its_orthanc_and_a_client_of_its_api(compose: dict[str, Any]) -> None:
    service, configs = compose["services"]["node"], compose["configs"]
    node = load_node(REPOSITORY / configs["node"]["file"])
    orthanc = json.loads(configs["orthanc"]["content"])
    assert orthanc["DicomModalities"]["locum"] == [node.ae_title, "node", node.port]
    assert {*node.senders} == {orthanc["DicomAet"]}
    (destination,) = node.destinations.values()
    assert (destination.ae_title, destination.host, destination.port) == (
        orthanc["DicomAet"],
        "orthanc",
        orthanc["DicomPort"],
    )
    # The API answers to the name that the node calls it by.
    hosts = compose["services"]["api"]["environment"]["LOCUM_ALLOWED_HOSTS"].split(",")
    assert urlsplit(node.service).hostname in hosts
    assert node.hospitals["north"].key_env in service["environment"]
    assert service["profiles"] == ["node"]
    assert service["networks"] == ["inside"]


def test_chart_has_only_known_settings_and_runs_as_the_user_of_the_image() -> None:
    chart = REPOSITORY / "deploy" / "helm" / "locum"
    text = "".join(path.read_text() for path in sorted(chart.rglob("*")) if path.is_file())
    known = {f"LOCUM_{name.upper()}" for name in Settings.model_fields} | {"LOCUM_NAME"}
    assert set(re.findall(r"\bLOCUM_[A-Z_]+\b", text)) <= known
    users = re.findall(r"(?:runAsUser|fsGroup): (\d+)", text)
    assert set(users) == set(
        re.findall(r"^USER (\d+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    )
    paths = re.findall(r"path: (/health/\w+)", text)
    assert set(paths) == {"/health/live", "/health/ready"}


def test_demo_of_chart_is_a_command_of_the_wheel_in_the_image() -> None:
    template = (REPOSITORY / "deploy/helm/locum/templates/api.yaml").read_text()
    (found,) = re.findall(r"{{- if \.Values\.demo }}\s+command: \[locum, demo, (--\w+)\]", template)
    shown = CliRunner().invoke(get_command(demo), ["--help"])
    assert found in shown.output
    assert f"`locum demo {found}`" in (REPOSITORY / "Dockerfile").read_text()
    # Where clients reach it, as without the demo.
    assert "LOCUM_HOST=0.0.0.0" in (REPOSITORY / "Dockerfile").read_text()


def test_state_folder_of_chart_is_made_by_the_process_inside_the_volume() -> None:
    # The volume is root's, so that user 10001 could not close it.
    templates = REPOSITORY / "deploy" / "helm" / "locum" / "templates"
    (folder,) = re.findall(r"LOCUM_STATE_DIR: (\S+)", (templates / "settings.yaml").read_text())
    (volume,) = re.findall(r"name: state, mountPath: ([^}]+)}", (templates / "_helpers.tpl").read_text())
    assert Path(volume) in Path(folder).parents


@pytest.mark.process
@pytest.mark.parametrize(
    ("allowed", "asked"),
    [({}, "localhost"), ({"LOCUM_ALLOWED_HOSTS": "locum.example, locum.local"}, "locum.example")],
)
def test_check_of_the_image_names_an_allowed_host(allowed: dict[str, str], asked: str) -> None:
    hosts: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hosts.append(self.headers["Host"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    text = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", "")
    (found,) = re.findall(r"^HEALTHCHECK .*? CMD +(\[.*\])$", text, re.MULTILINE)
    _, option, code = json.loads(found)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        code = code.replace(":8000", f":{server.server_port}")
        subprocess.run([sys.executable, option, code], env=allowed, check=True)
        server.shutdown()
    assert hosts == [asked]


def test_images_do_not_run_as_root() -> None:
    stages: dict[str, list[str]] = {}
    for line in (REPOSITORY / "Dockerfile").read_text().splitlines():
        if line.startswith("FROM "):
            stages[line.split()[-1]] = []
        if stages:
            stages[[*stages][-1]].append(line)
    # What both images have in common says who runs them, and neither says otherwise.
    assert [line for line in stages["run"] if line.startswith("USER ")] == ["USER 10001"]
    assert [*stages][-1] == "whole"
    for name in ("serve", "whole"):
        assert stages[name][0] == f"FROM run AS {name}"
        assert not [line for line in stages[name] if line.startswith("USER ")]


def test_compose_serves_without_torch_where_nothing_adapts(compose: dict[str, Any]) -> None:
    targets = {
        name: service["build"]["target"]
        for name, service in compose["services"].items()
        if "target" in service.get("build", {})
    }
    assert targets == {"api": "serve", "worker": "whole", "node": "serve"}


def test_image_command_has_valid_options() -> None:
    line = next(
        line for line in (REPOSITORY / "Dockerfile").read_text().splitlines() if line.startswith("CMD [")
    )
    words = json.loads(line.removeprefix("CMD "))
    assert words[:3] == ["python", "-m", "service"]
    # --help comes last and stops it, after every option before it was read.
    assert CliRunner().invoke(get_command(app), [*words[3:], "--help"]).exit_code == 0
    assert CliRunner().invoke(get_command(app), [*words[3:], "--no-such-option", "--help"]).exit_code != 0


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-serve.lock"])
def test_lock_has_the_pinned_versions_and_a_hash_for_each(lock: str) -> None:
    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    pinned = {}
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        name, found, version = line.partition("==")
        if found:
            pinned[normal(name)] = version
    locked = {}
    for entry in re.split(r"\n(?=\S)", (REPOSITORY / lock).read_text().strip()):
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
