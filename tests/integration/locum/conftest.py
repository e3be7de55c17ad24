"""A service that `locum serve` runs, and APIs in the test's own process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from locum import Client
from tests.helpers.service.api import Api
from tests.helpers.service.routing_federation import outside_scans
from tests.helpers.waiting import wait_for
from tests.integration.service.conftest import (  # noqa: F401
    joining_store,
    publish_bright,
    publish_dark,
    routing_store,
    start,
)

COMMAND = Path(sys.executable).with_name("locum")


@dataclass
class Served:
    """The address of a service, started in a folder with other packages of the same names."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`command(*arguments, url=None, **environment)`: run the `locum` command in a process of its own."""

    def run(
        *arguments: object, url: str | None = None, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LOCUM_")}
        known = inherited | ({} if url is None else {"LOCUM_URL": url}) | {"COLUMNS": "200"} | environment
        return subprocess.run(
            [COMMAND, *map(str, arguments)],
            env=known,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def served(
    routing_store: Path,  # noqa: F811
    joining_store: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """`locum serve` with its Redis and worker, on the models `organ` and `tumour`, with the hospital dune.

    Its working folder has packages that would end it.
    """
    folder = tmp_path_factory.mktemp("served")
    for name in ("service", "training", "celery", "model_store"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} of the working folder')\n")
    for made in (routing_store, joining_store):
        shutil.copytree(made, folder / "store", dirs_exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCUM_")}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [COMMAND, "serve", "--store", "store", "--port", "0", "--state-dir", "state"],
            cwd=folder,
            env=environment | {"LOCUM_DEVICE": "cpu", "LOCUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        with httpx.Client() as http:
            url = wait_for(lambda: _address(process), psutil.Process(process.pid))
            wait_for(lambda: _ready(http, url), psutil.Process(process.pid))
        with Client(url) as client:
            client.register("dune", "Dune")
        yield Served(url, process, log)
    finally:
        process.terminate()
        process.wait(60)


def _address(process: subprocess.Popen[bytes]) -> str | None:
    assert process.poll() is None
    for connection in psutil.Process(process.pid).net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip == "127.0.0.1":
            return f"http://127.0.0.1:{connection.laddr.port}"
    return None


def _ready(http: httpx.Client, url: str) -> bool:
    try:
        found = http.get(f"{url}/health/ready").json()
    except (httpx.TransportError, ValueError):
        return False
    return bool(found["status"] == "ready")


@pytest.fixture(scope="session")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three scans of dune's scanner."""
    folder = tmp_path_factory.mktemp("scans")
    for name, content in outside_scans(3).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def api(
    start: Callable[..., Api],  # noqa: F811
    routing_store: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Api:
    """An API in this process, on `organ`, without Redis, with the hospital dune."""
    store = shutil.copytree(routing_store, tmp_path_factory.mktemp("copy") / "store")
    running = start(store)
    running.client.put("/hospitals/dune", json={"name": "Dune"})
    return running
