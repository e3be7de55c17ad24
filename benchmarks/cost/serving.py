"""Cost of POST /segment over its necessary work: decode the scan, run the graph, encode the mask.

`POST /segment` is timed end to end, against a real server process over loopback on a kept connection. Its
floor is measured in this process: decode the scan, run bare onnxruntime on slices that are already prepared
(same graph, options and batches), encode the mask. The two alternate, and medians are compared.

The rest is everything else: HTTP and multipart, hashing, choosing the network, preparing, the guard,
uncertainty, restoring the mask to the scan's grid. It is given twice: as the difference of the two medians,
which includes the effect of serving on the speed of onnxruntime; and within each request, end to end without
the server's own decode, inference and encode stages, which other load on the machine disturbs less.
"""

from __future__ import annotations

import gzip
import http.client
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import nibabel as nib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.gpu import CPU, device_of
from benchmarks.harness.tables import table
from model_store.guard import ReferenceStatistics, summarise
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.preprocessing import Restorer, prepare
from model_store.scan import Scan, decode, encode_nifti, encode_png
from model_store.store import Store
from model_store.task import Normalisation, Task
from personalization.export import to_onnx
from personalization.networks import build
from personalization.state import to_safetensors
from service.inference.sessions import GraphSession

SIZE = 256
SLICES = 128
TASK = Task(
    name="cost",
    labels={"bright": (1,)},
    normalisation=Normalisation(scope="volume", method="zscore"),
    size=(SIZE, SIZE),
)
# The first requests load the network and warm caches, on both sides.
WARM_UP = 2
_PIXELS_APART = 1e-3


@dataclass(frozen=True)
class Profile:
    """Pairs to time for a volume (an image has twenty times as many), onnxruntime's threads on both sides.

    The recorded rows are from a machine of two cores.
    """

    repeats: int = 7
    threads: int = 2
    width: int = 16
    scans: tuple[str, ...] = ("png", "nii", "nii.gz")
    device: str = "cpu"


PROFILES = {
    "smoke": Profile(1, 1, 2, ("png",)),
    "cpu": Profile(),
    "gpu": Profile(15, 1, 32, device="cuda"),
}


class ServingCost(CostExperiment[Profile]):
    """The cost of POST /segment beside its necessary work."""

    name = "serving_cost"
    title = "What serving costs"
    question = "What does serving cost over decoding, running and encoding?"
    profiles = PROFILES

    def kinds(self) -> Mapping[str, Kind]:
        """One kind."""
        return {"": Kind(compute, sections)}

    def measured(self) -> Sequence[Cell]:
        """One cell per kind of scan."""
        settings = self.profile
        cells = [
            {
                "scan": kind,
                "repeats": (20 if kind == "png" else 1) * settings.repeats,
                "width": settings.width,
                "threads": settings.threads,
            }
            for kind in settings.scans
        ]
        return cells


def scan_bytes(kind: str, size: int = SIZE, slices: int = SLICES) -> bytes:
    """A synthetic scan that compresses like a real one."""
    if kind == "png":
        stream = io.BytesIO()
        Image.fromarray((_smooth((size, size)) * 255).astype(np.uint8)).save(stream, "PNG")
        return stream.getvalue()
    image = nib.Nifti1Image(volume(slices, size).transpose(2, 1, 0), np.diag((1.0, 1.0, 1.5, 1.0)))
    content: bytes = image.to_bytes()
    return gzip.compress(content, 6, mtime=0) if kind == "nii.gz" else content


def volume(slices: int, size: int = SIZE) -> NDArray[np.int16]:
    """A synthetic volume [slices, rows, columns]."""
    return (_smooth((slices, size, size)) * 1000).astype(np.int16)


def _smooth(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Smooth structure with noise in [0, 1], dark outside a disc."""
    generator = np.random.default_rng(0)
    coarse = generator.random(tuple(max(2, side // 16) for side in shape))
    smooth = ndimage.zoom(
        coarse, [side / cell for side, cell in zip(shape, coarse.shape, strict=True)], order=1
    )
    rows, columns = shape[-2:]
    radius = np.hypot(*np.mgrid[-1 : 1 : rows * 1j, -1 : 1 : columns * 1j])
    seen: NDArray[np.float64] = (smooth + generator.normal(0, 0.05, shape)).clip(0, 1) * (radius < 0.9)
    return seen


def publish(root: Path, width: int, scan: Scan, task: Task = TASK, seed: int = 0) -> None:
    """Publish a U-Net with random weights: the cost of serving does not depend on them."""
    torch.manual_seed(seed)
    network = build("unet", in_channels=1, classes=2, width=width)
    statistics = ReferenceStatistics.of(summarise(scan, prepare(scan, task)))
    manifest = ModelManifest(
        name="cost",
        task=task,
        network=NetworkSpec(name="unet", arguments={"in_channels": 1, "classes": 2, "width": width}),
        lineage=Lineage(method="none", run="serving-cost", sites=(), rounds=0, seed=0),
        statistics=statistics,
    )
    files = {WEIGHTS: to_safetensors(network.state_dict()), GRAPH: to_onnx(network, 1, task.size)}
    Store(root).publish(manifest, files)


@dataclass(frozen=True)
class ServerProcess:
    """A running server: a connection to it, and its process."""

    connection: http.client.HTTPConnection
    pid: int

    @property
    def port(self) -> int:
        """Its TCP port on loopback."""
        return self.connection.port


@contextmanager
def server(folder: Path, threads: int, settings: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """A server process on `folder`/store, with further environment variables."""
    log = folder / "server.log"
    # A port without a listener: segmenting needs no Redis, and the service must not start one.
    environment = os.environ | {
        "LOCUM_REDIS_URL": "redis://127.0.0.1:1",
        "LOCUM_THREADS": str(threads),
        "LOCUM_DEVICE": "cpu",
        **(settings or {}),
    }
    command = [sys.executable, "-m", "service", "--no-worker", "--port", "0"]
    command += ["--store", str(folder / "store"), "--state-dir", str(folder / "state")]
    with log.open("wb") as stream, subprocess.Popen(command, env=environment, stderr=stream) as process:
        try:
            while (found := re.search(r"running on http://[^:]+:(\d+)", log.read_text())) is None:
                if process.poll() is not None:
                    raise RuntimeError(f"the server did not start: {log.read_text()}")
                time.sleep(0.05)
            yield ServerProcess(http.client.HTTPConnection("127.0.0.1", int(found[1])), process.pid)
        finally:
            process.terminate()


def wake(connection: http.client.HTTPConnection) -> None:
    """Reopen the connection if the server closed it, idle while the floor was measured."""
    for _ in range(2):
        try:
            connection.request("GET", "/health/live")
            connection.getresponse().read()
            return
        except (http.client.HTTPException, OSError):
            connection.close()
    raise RuntimeError("the server does not answer")


def form(data: bytes, **fields: str) -> bytes:
    """The form with this scan, and further fields, that `post` sends."""
    part = '--locum\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    named = "".join(part.format(name, "") + value + "\r\n" for name, value in fields.items())
    return (named + part.format("scan", '; filename="scan"')).encode() + data + b"\r\n--locum--\r\n"


def post(
    connection: http.client.HTTPConnection, body: bytes, headers: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, float]]:
    """The answer's body, and the server's own milliseconds per stage."""
    sent = {"Content-Type": "multipart/form-data; boundary=locum", **(headers or {})}
    connection.request("POST", "/segment", body, sent)
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {content.decode(errors='replace')}")
    stages = re.findall(r"(\w+);dur=([\d.]+)", response.headers["Server-Timing"])
    return content, {name: float(duration) for name, duration in stages}


def compute(cell: Cell, work: Path) -> dict[str, Any]:
    """Measure one cell: milliseconds end to end, of the floor, and of the server's stages."""
    data = scan_bytes(cell["scan"])
    scan = decode(data)
    prepared = prepare(scan, TASK)
    if not (work / "store").exists():
        publish(work / "store", cell["width"], scan)
    artefact = Store(work / "store").open("cost")
    digest = artefact.manifest.files[GRAPH].sha256
    session = GraphSession(digest, artefact.read(GRAPH), threads=cell["threads"], device=device_of(cell))
    most = session.slices_per_run(prepared.slices.shape[1:])
    batches = [prepared.slices[i : i + most] for i in range(0, len(prepared.slices), most)]
    restorer = Restorer(prepared.geometry)
    for batch in batches:
        restorer.add(session.run(batch).probabilities)
    mask = restorer.finish()
    body = form(data)

    def floor() -> tuple[bytes, float]:
        began = time.perf_counter()
        affine = decode(data).affine
        for batch in batches:
            session.run(batch)
        encoded = encode_png(mask) if affine is None else encode_nifti(mask, affine)
        return encoded, 1e3 * (time.perf_counter() - began)

    ends: list[float] = []
    floors: list[float] = []
    within: list[float] = []
    stages: dict[str, list[float]] = {}
    with server(work, cell["threads"], {"LOCUM_DEVICE": device_of(cell)}) as running:
        connection = running.connection
        for repeat in range(WARM_UP + cell["repeats"]):
            wake(connection)
            began = time.perf_counter()
            answer, timing = post(connection, body)
            end = 1e3 * (time.perf_counter() - began)
            expected, least = floor()
            if not _same(answer, expected, device_of(cell)):
                raise RuntimeError("the service's mask is not the floor's: they did not do the same work")
            if repeat >= WARM_UP:
                ends.append(end)
                floors.append(least)
                within.append(end - timing["decode"] - timing["inference"] - timing["encode"])
                for name, duration in timing.items():
                    stages.setdefault(name, []).append(duration)
    return {
        "end_to_end_ms": _summary(ends),
        "floor_ms": _summary(floors),
        "rest_ms": round(median(ends) - median(floors), 3),
        "rest_within_ms": _summary(within),
        "ratio": round(median(ends) / median(floors), 4),
        "stages_ms": {name: round(median(values), 3) for name, values in stages.items()},
        "bytes": len(data),
    }


def _same(answer: bytes, expected: bytes, device: str) -> bool:
    """Byte for byte; on a GPU, where onnxruntime promises no equal bits, up to a thousandth of the pixels."""
    if device == CPU:
        return answer == expected
    found, floor = (decode(content).voxels for content in (answer, expected))
    return found.shape == floor.shape and bool((found != floor).mean() < _PIXELS_APART)


def _summary(values: list[float]) -> dict[str, float]:
    quarter, middle, three_quarters = quantiles(values, n=4)
    return {"median": round(middle, 3), "q1": round(quarter, 3), "q3": round(three_quarters, 3)}


def sections(found: Sequence[Row]) -> list[str]:
    """The page's tables."""
    names = {
        "png": f"PNG, {SIZE}x{SIZE}",
        "nii": f".nii, {SLICES}x{SIZE}x{SIZE}",
        "nii.gz": f".nii.gz, {SLICES}x{SIZE}x{SIZE}",
    }
    body, cell = [], found[0]["cell"]
    for row in found:
        result = row["result"]
        rest, inside = result["rest_ms"], result["rest_within_ms"]
        body.append(
            [
                names[row["cell"]["scan"]],
                _ms(result["end_to_end_ms"]),
                _ms(result["floor_ms"]),
                f"{rest:.1f} ({100 * (result['ratio'] - 1):.1f} %)",
                f"{_ms(inside)} ({100 * inside['median'] / result['floor_ms']['median']:.1f} %)",
            ]
        )
    same = "bytes" if device_of(cell) == CPU else "mask, up to a thousandth of its pixels"
    order = list(dict.fromkeys(name for row in found for name in row["result"]["stages_ms"]))
    staged = [
        [name, *(f"{row['result']['stages_ms'].get(name, 0.0):.2f}" for row in found)] for name in order
    ]
    return [
        f"U-Net of width {cell['width']} at {SIZE}x{SIZE}, {cell['threads']} threads. "
        f"Milliseconds: median [quartiles]; both sides alternate, and answer with the same {same}. "
        "The floor is decoding the scan, bare onnxruntime on prepared slices and encoding the mask.",
        table(["scan", "end to end", "floor", "rest (of floor)", "rest within the request (of floor)"], body),
        "Where the server says the time went (medians, ms; `Server-Timing`):",
        table(["stage", *(names[row["cell"]["scan"]] for row in found)], staged),
    ]


def _ms(values: Mapping[str, float]) -> str:
    return f"{values['median']:.1f} [{values['q1']:.1f}, {values['q3']:.1f}]"
