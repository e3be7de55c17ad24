"""A real PACS on loopback, and a gate before it that fails as networks do."""

from __future__ import annotations

import http.client
import io
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pydicom
import pytest
import yaml
from pydicom import Dataset

from locum.demo.service_process import free_port

PLUGIN = "/usr/share/orthanc/plugins/libOrthancDicomWeb.so"
USER, PASSWORD = "locum", "only-for-tests"


@dataclass
class Orthanc:
    """A running Orthanc. `port` is HTTP's, `dicom_port` that of its Storage SCP."""

    port: int
    dicom_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/dicom-web"

    @property
    def rest(self) -> httpx.Client:
        """Orthanc's own interface, which the code under test does not use."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", auth=(USER, PASSWORD))

    def add(self, files: dict[str, bytes]) -> None:
        with self.rest as client:
            for content in files.values():
                client.post("/instances", content=content).raise_for_status()

    def instances(self, modality: str) -> list[Dataset]:
        """Every instance of this modality."""
        with self.rest as client:
            found = []
            for one in client.get("/series", params={"expand": ""}).json():
                if one["MainDicomTags"]["Modality"] == modality:
                    for instance in one["Instances"]:
                        content = client.get(f"/instances/{instance}/file").content
                        found.append(pydicom.dcmread(io.BytesIO(content)))
            return found

    def clear(self) -> None:
        with self.rest as client:
            for patient in client.get("/patients").json():
                client.delete(f"/patients/{patient}").raise_for_status()


@contextmanager
def running_orthanc(root: Path, title: str = "ORTHANC", **modalities: list[object]) -> Iterator[Orthanc]:
    """Start Orthanc; skip the test, loudly, where it is not installed.

    `modalities` are the AE that Orthanc knows, as its configuration has them.
    """
    if shutil.which("Orthanc") is None or not Path(PLUGIN).exists():
        pytest.skip("Orthanc and its DICOMweb plugin are not installed: `make test-pacs` does it")
    found = Orthanc(free_port(), free_port())
    configuration = {
        "Name": title,
        "StorageDirectory": str(root / "storage"),
        "IndexDirectory": str(root / "storage"),
        "HttpPort": found.port,
        "RemoteAccessAllowed": False,
        "AuthenticationEnabled": True,
        "RegisteredUsers": {USER: PASSWORD},
        "DicomAet": title,
        "DicomPort": found.dicom_port,
        "DicomCheckCalledAet": True,
        "DicomModalities": modalities,
        "Plugins": [PLUGIN],
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
    }
    root.mkdir(parents=True, exist_ok=True)
    (root / "orthanc.json").write_text(json.dumps(configuration))
    with (root / "orthanc.log").open("wb") as log:
        process = subprocess.Popen(["Orthanc", str(root / "orthanc.json")], stdout=log, stderr=log)
    try:
        _wait_until_ready(found, process, root / "orthanc.log")
        yield found
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(found: Orthanc, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with found.rest as client:
                client.get("/system").raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise RuntimeError(f"Orthanc did not become ready:\n{log.read_text()[-2000:]}")


def configure(path: Path, url: str, secret: str = PASSWORD, **fields: object) -> Path:
    """Write the file of `LOCUM_PACS` with one PACS, `main`, of the hospital `dune`."""
    (path.parent / "secret").write_text(secret)
    server = {
        "url": url,
        "hospitals": ["dune"],
        "username": USER,
        "password_file": str(path.parent / "secret"),
        "store": True,
        "first_retry_seconds": 0.05,
        **fields,
    }
    path.write_text(yaml.safe_dump({"main": server}))
    return path


Answer = tuple[int, dict[str, str], bytes]
Rule = Callable[[str, str], Answer | None]


@dataclass
class Gate:
    """A reverse proxy before Orthanc.

    `rule` may answer a request (method, path) in its place. `hold_store` is `before` or `after`: a STOW is
    held before Orthanc has it, or when Orthanc has answered; `held` is set when that happens. The first
    `let_pass` STOWs in `seen` are not held.
    """

    port: int
    rule: Rule = lambda method, path: None
    hold_store: str | None = None
    let_pass: int = 0
    held: threading.Event = field(default_factory=threading.Event)
    seen: list[tuple[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/dicom-web"


@contextmanager
def gate_before(orthanc: Orthanc) -> Iterator[Gate]:
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._pass_on(b"")

        def do_POST(self) -> None:
            self._pass_on(self._body())

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _pass_on(self, body: bytes) -> None:
            gate.seen.append((self.command, self.path))
            answer = gate.rule(self.command, self.path)
            if answer is None:
                stores = sum(method == "POST" for method, _ in gate.seen)
                storing = self.command == "POST" and stores > gate.let_pass
                if storing and gate.hold_store == "before":
                    gate.held.set()
                    released.wait(60)
                    self.close_connection = True
                    return
                answer = self._asked(body)
                if storing and gate.hold_store == "after":
                    gate.held.set()
                    released.wait(60)
                    self.close_connection = True
                    return
            status, headers, content = answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _asked(self, body: bytes) -> Answer:
            connection = http.client.HTTPConnection("127.0.0.1", orthanc.port, timeout=60)
            kept = ("Authorization", "Accept", "Content-Type")
            headers = {name: self.headers[name] for name in kept if name in self.headers}
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            content = response.read()
            connection.close()
            return response.status, {"Content-Type": response.headers["Content-Type"] or ""}, content

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    gate = Gate(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield gate
    finally:
        released.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
