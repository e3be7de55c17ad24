"""A real server process: hundreds of damaged uploads, and kill -9 during an upload.

    LOCUM_FUZZ=2000 pytest tests/e2e/test_http_fuzz.py -k uploads -s -o timeout=0

sends as many damaged files of each format, and prints how they were answered.
"""

from __future__ import annotations

import gzip
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from pydicom.data import get_testdata_file

from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.scan import encode_nrrd
from model_store.scans.dicom.files import zip_of
from model_store.store import Store
from model_store.task import Normalisation, Task
from tests.helpers.model_store.dicom_files import tilted
from tests.helpers.model_store.scan_files import metaimage, nifti1

EACH = int(os.environ.get("LOCUM_FUZZ", "0"))
MUTATIONS = 450
MEBIBYTE = 2**20
MODELS = {"/segment": "bright", "/classify": "dark"}
# Limit of the server's memory. It needs about 150 MiB when idle; a scan may decompress to 64 MiB here.
PEAK = 700 * MEBIBYTE


@dataclass
class Server:
    """A running `python -m service`."""

    process: subprocess.Popen[bytes]
    port: int
    client: httpx.Client

    def post(self, route: str, body: bytes) -> httpx.Response:
        kind = {"content-type": "multipart/form-data; boundary=b"}
        return self.client.post(route, content=body, headers=kind)

    def send(self, route: str, scan: bytes) -> httpx.Response:
        return self.client.post(route, files={"scan": ("a", scan)}, data={"model": MODELS[route]})

    def segment(self, scan: bytes) -> httpx.Response:
        return self.send("/segment", scan)

    def peak_memory(self) -> int:
        """Peak resident memory in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def open_files(self, folder: Path) -> list[str]:
        """Files of `folder` that the process has open, including deleted ones."""
        links = Path(f"/proc/{self.process.pid}/fd").iterdir()
        targets = [os.readlink(link) for link in links if link.is_symlink()]  # noqa: PTH115
        return [target for target in targets if target.startswith(str(folder))]


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """Serve `folder`/store with its state in `folder`/state."""
    log = folder / f"log-{time.monotonic_ns()}"
    environment = os.environ | {
        # Nothing listens on this port: segmenting needs no Redis.
        "LOCUM_REDIS_URL": "redis://127.0.0.1:1",
        "LOCUM_THREADS": "1",
        "LOCUM_DEVICE": "cpu",
        "LOCUM_MAX_UPLOAD_BYTES": str(16 * MEBIBYTE),
        "LOCUM_MAX_DECOMPRESSED_BYTES": str(64 * MEBIBYTE),
        "LOCUM_MAX_PIXELS": str(16_000_000),
        "LOCUM_MAX_VOXELS": str(16_000_000),
    }
    command = [sys.executable, "-m", "service", "--no-worker", "--port", "0"]
    command += ["--store", str(folder / "store"), "--state-dir", str(folder / "state")]
    with log.open("wb") as stream, subprocess.Popen(command, env=environment, stderr=stream) as process:
        try:
            port = _port(process, log)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                yield Server(process, port, client)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text())
        if found is not None:
            return int(found[1])
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()}")


@pytest.fixture
def folder(tmp_path: Path, threshold_graph: Callable[..., bytes], mean_graph: Callable[..., bytes]) -> Path:
    """A folder with a store that offers a model for each route."""
    same: dict[str, Any] = {"colour": "luminance", "normalisation": Normalisation(method="none")}
    tasks = {
        "bright": Task(name="bright", labels={"bright": (1,)}, size=(32, 32), **same),
        "dark": Task(
            name="dark", kind="classification", class_names=("dark", "bright"), size=(28, 28), **same
        ),
    }
    graphs = {"bright": threshold_graph(at=100, slope=0.5), "dark": mean_graph(at=100, slope=0.1)}
    for name, task in tasks.items():
        manifest = ModelManifest(
            name=name,
            task=task,
            network=NetworkSpec(name="by-hand", arguments={}),
            lineage=Lineage(method="by-hand", run="test", sites=(), rounds=0, seed=0),
        )
        Store(tmp_path / "store").publish(manifest, {WEIGHTS: b"none", GRAPH: graphs[name]})
    return tmp_path


def good_scans() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 32), np.uint8)
    pictures = []
    for image, form in (
        (pixels, "PNG"),
        (pixels.astype(np.uint16) * 250, "PNG"),
        (np.stack([pixels] * 3, axis=-1), "PNG"),
        (pixels, "TIFF"),
    ):
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, form)
        pictures.append(stream.getvalue())
    voxels = np.random.default_rng(1).integers(0, 200, (24, 20, 6)).astype(np.int16)
    plain = nib.Nifti1Image(voxels, np.eye(4)).to_bytes()
    swapped = nib.Nifti1Image(voxels, np.eye(4), header=nib.Nifti1Header(endianness=">")).to_bytes()
    second = nib.Nifti2Image(voxels.astype(np.float32), np.eye(4)).to_bytes()
    return [*pictures, plain, swapped, second, gzip.compress(plain), gzip.compress(second)]


def other_formats() -> dict[str, bytes]:
    """Volumes of every other format, whole; of each an intensity is above the models' threshold."""
    voxels = np.random.default_rng(1).integers(0, 200, (24, 20, 6)).astype(np.int16)
    labels = (voxels > 100).astype(np.uint8)
    nrrd = encode_nrrd(labels, np.diag([2.0, 3.0, 4.0, 1.0]), compress=False)
    segments = nrrd.replace(b"\n\n", b"\nSegment0_LabelValue:=1\nSegment0_Name:=organ\n\n", 1)
    whole = nifti1(voxels, magic=b"ni1\0", vox_offset=0.0)
    pair = (whole[:348], gzip.compress(whole[352:]))
    analyze = nib.AnalyzeImage(voxels, np.eye(4))
    padded = {"PixelPaddingValue": 0, "RescaleIntercept": -24}
    return {
        "NRRD, gzip": encode_nrrd(labels, np.eye(4)),
        "NRRD, raw": nrrd,
        ".seg.nrrd": segments,
        "MetaImage, raw": metaimage(voxels),
        "MetaImage, compressed": metaimage(voxels, compress=True),
        "NIfTI of two files": zip_of(pair),
        "ANALYZE": zip_of((bytes(analyze.header.binaryblock), voxels.tobytes(order="F"))),
        "DICOM, tilted and padded": zip_of(tilted(voxels.transpose(2, 1, 0), 12, **padded).values()),
        "DICOM, JPEG of 12 bits": Path(str(get_testdata_file("JPGExtended.dcm"))).read_bytes(),
    }


def damage(data: bytes, chance: random.Random) -> bytes:
    """One to four random changes: bits, numbers, deletions, repetitions, cuts; most often in headers."""
    content = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if len(content) < 8:
            break
        reach = len(content) if chance.random() < 0.4 else min(len(content), 360)
        at = chance.randrange(reach)
        match chance.randrange(6):
            case 0:
                content[at] ^= 1 << chance.randrange(8)
            case 1:
                content[at] = chance.choice((0, 1, 127, 128, 255))
            case 2:
                number = chance.choice(
                    (b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\xc0\x7f", b"\0\0\x80\x7f")
                )
                content[at : at + 4] = number
            case 3:
                del content[at : at + chance.randint(1, 64)]
            case 4:
                content[at:at] = content[at : at + chance.randint(1, 64)]
            case _:
                del content[at:]
    return bytes(content)


def form_of(route: str, scan: bytes) -> bytes:
    content = b'--b\r\nContent-Disposition: form-data; name="scan"; filename="a"\r\n\r\n' + scan
    fields = {"model": MODELS[route]} | ({"output": "json"} if route == "/segment" else {})
    for name, value in fields.items():
        content += f'\r\n--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()
    return content + b"\r\n--b--\r\n"


def send_damaged(server: Server, scans: list[bytes], count: int, chance: random.Random) -> dict[int, int]:
    """Send damaged scans and forms; return how many were answered with which status, none of 5xx."""
    seen: dict[int, int] = {}
    for number in range(count):
        route = "/classify" if number % 3 == 2 else "/segment"
        if number % 5 == 4:
            body = damage(form_of(route, chance.choice(scans)), chance)
        else:
            body = form_of(route, damage(chance.choice(scans), chance))
        response = server.post(route, body)
        assert response.status_code == 200 or 400 <= response.status_code < 500, (
            number,
            response.status_code,
            response.text,
        )
        if response.status_code != 200:
            assert response.headers["content-type"] == "application/problem+json"
            assert response.json()["detail"]
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
    return seen


def test_damaged_uploads_get_200_or_4xx_in_bounded_memory(folder: Path) -> None:
    chance = random.Random(20)
    others = other_formats()
    scans = [*good_scans(), *others.values()]
    with running(folder) as server:
        for scan, route in product(scans, MODELS):
            assert server.send(route, scan).status_code == 200
        seen = send_damaged(server, scans, MUTATIONS, chance)
        for name, scan in others.items() if EACH else ():
            print(f"{name}: {dict(sorted(send_damaged(server, [scan], EACH, chance).items()))}")
        # The damage was real, and not all of it was fatal.
        assert seen[422] > MUTATIONS / 3
        assert seen[200] > 0
        for scan, route in product(scans, MODELS):
            assert server.send(route, scan).status_code == 200
        assert server.peak_memory() < PEAK
        assert not list((folder / "state" / "spool").iterdir())


def test_server_killed_during_an_upload_leaves_no_scan_data(folder: Path) -> None:
    spool = folder / "state" / "spool"
    scan = good_scans()[7]
    with running(folder) as server:
        mask = server.segment(scan)
        assert mask.status_code == 200
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            head = b'--b\r\nContent-Disposition: form-data; name="scan"; filename="mueller.nii"\r\n\r\n'
            client.sendall(
                b"POST /segment HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8388608\r\n"
                b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + head + b"mueller " * 2**19
            )
            deadline = time.monotonic() + 10
            while not server.open_files(spool):
                assert time.monotonic() < deadline, "the upload was never spooled"
                time.sleep(0.01)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(10)
        assert list(spool.iterdir()) == []
    # A leftover as on a system without unnamed files.
    (spool / "upload-k1ll3d").write_bytes(b"half a scan")
    with running(folder) as server:
        assert list(spool.iterdir()) == []
        again = server.segment(scan)
        assert (again.status_code, again.content) == (200, mask.content)
        left = [path for path in (folder / "state").rglob("*") if path.is_file()]
        assert not any(b"mueller" in path.read_bytes() for path in left)
    assert not any("mueller" in path.read_text() for path in folder.glob("log-*"))
