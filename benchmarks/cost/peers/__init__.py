"""Programs of other servers with the same network: a file each, run by an interpreter that has their package.

`BENCHMARK_PEERS` names that interpreter; by default it is this one, which has FastAPI. None of them writes an
audit row, checks an artefact, guards a scan or keeps its geometry.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from locum.demo.service_process import free_port

PYTHON = "BENCHMARK_PEERS"
_HERE = Path(__file__).parent
# By name: the package that has to be there, and the program.
PEERS: Mapping[str, tuple[str, str]] = {
    "FastAPI": ("fastapi", "with_fastapi.py"),
    "LitServe": ("litserve", "with_litserve.py"),
    "BentoML": ("bentoml", "with_bentoml.py"),
}
_FORM = {"Content-Type": "multipart/form-data; boundary=locum"}
# Some import for half a minute on a busy machine.
_START_S = 120.0


def interpreter() -> str:
    """The interpreter that has the peers' packages."""
    return os.environ.get(PYTHON, sys.executable)


def installed() -> list[str]:
    """The peers of which it has the package, with onnxruntime and Pillow."""
    return [name for name, (package, _) in PEERS.items() if _imports(package)]


def _imports(package: str) -> bool:
    names = (package, "onnxruntime", "PIL", "multipart")
    found = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {names!r})))"
    return subprocess.run([interpreter(), "-c", found], check=False, capture_output=True).returncode == 0


@contextmanager
def peer(name: str, graph: Path, threads: int, body: bytes, folder: Path) -> Iterator[tuple[int, int]]:
    """Start a peer and wait for its first answer to the form `body`; yields its port and process.

    Raises RuntimeError with its output if it does not start.
    """
    port, log = free_port(), folder / f"{name}.log"
    own = {"PEER_GRAPH": str(graph.resolve()), "PEER_THREADS": str(threads), "PEER_PORT": str(port)}
    quiet = {"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(folder.resolve() / "bentoml")}
    command = [interpreter(), str(_HERE / PEERS[name][1])]
    with (
        log.open("wb") as stream,
        subprocess.Popen(
            command,
            cwd=_HERE,
            env=os.environ | own | quiet,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        ) as process,
    ):
        try:
            until = time.monotonic() + _START_S
            while not _answers(port, body):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{name} did not start: {log.read_text()}")
                time.sleep(0.1)
            yield port, process.pid
        finally:
            # Its workers are of its group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ask(connection: http.client.HTTPConnection, body: bytes) -> bytes:
    """POST the form to `/segment`; the mask as PNG. Raises RuntimeError for another status than 200."""
    connection.request("POST", "/segment", body, _FORM)
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {content.decode(errors='replace')}")
    return content


def _answers(port: int, body: bytes) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
    try:
        ask(connection, body)
    except (OSError, http.client.HTTPException, RuntimeError):
        return False
    finally:
        connection.close()
    return True
