"""What the page costs: weight, first paint, time to the first mask, and frames while slices scroll.

A real Chromium before a real service. A volume is opened in Look and segmented, and the time from the button
to a canvas that shows the mask is taken, beside the same request sent by a plain client. The two alternate,
and medians are compared. Chromium draws with its software renderer, which shares the processor with the
service.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.serving import TASK, scan_bytes, volume
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.chromium import launch
from benchmarks.harness.measuring import alternated
from benchmarks.harness.random_space import publish_random_space
from benchmarks.harness.tables import table
from locum.demo.service_process import free_port, running_service
from model_store.store import Store

NAME = "page"
# The first paint is that of a processor this many times slower, as the browser's developer tools emulate it.
_SLOWDOWN = 4
# Seconds of scrolling, and the longest wait for an answer.
_SCROLL_S = 5.0
_PATIENCE_MS = 300_000
# Turns the wheel over a place of the canvas that is a slice in each layout, by a notch.
_TURN = """([deltaY]) => {
    const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
    const at = { clientX: box.x + 0.45 * box.width, clientY: box.y + 0.2 * box.height };
    canvas.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY, bubbles: true, cancelable: true }));
}"""
# Turns it in each frame, for some seconds, forty notches to and fro; returns the frames' times.
_SCROLL = f"""([seconds]) => new Promise((resolve) => {{
    const turn = {_TURN}, times = [];
    const step = (now) => {{
        times.push(now);
        if (now - times[0] > 1000 * seconds) return resolve(times);
        turn([Math.floor(times.length / 40) % 2 ? -1 : 1]);
        requestAnimationFrame(step);
    }};
    requestAnimationFrame(step);
}})"""


@dataclass(frozen=True)
class Profile:
    """Pairs to time, onnxruntime's threads, the network's width, the volume, and visits to time."""

    repeats: int = 5
    threads: int = 2
    width: int = 16
    slices: int = 128
    paints: int = 15


PROFILES = {"smoke": Profile(1, 1, 2, 4, 2), "cpu": Profile()}


class PageCost(CostExperiment[Profile]):
    """Weight, first paint, time to the first mask, and frames per second of the page."""

    name = "page_cost"
    title = "What the page costs"
    question = "How long until a person sees the page, and the mask, and how smoothly do slices scroll?"
    by = "what"
    profiles = PROFILES

    def kinds(self) -> Mapping[str, Kind]:
        """The page at work, and its first paint."""
        return {"": Kind(compute, _section), "paint": Kind(paint, _paint_section)}

    def measured(self) -> Sequence[Cell]:
        """One cell of each kind."""
        at_work = asdict(self.profile)
        paints = at_work.pop("paints")
        return [at_work, {"what": "paint", "paints": paints, "slowdown": _SLOWDOWN}]


def compute(cell: Cell, work: Path) -> dict[str, Any]:
    """Measure the page against a service of its own."""
    from playwright.sync_api import sync_playwright

    store, state = work / f"store-{os.getpid()}", work / f"state-{os.getpid()}"
    scan = torch.from_numpy(volume(cell["slices"]).astype(np.float32))
    half_of = ((scan[:1] - scan.mean()) / scan.std())[None]
    publish_random_space(Store(store), NAME, TASK, cell["width"], run="page", half_of=half_of)
    path = work / "volume.nii.gz"
    path.write_bytes(scan_bytes("nii.gz", slices=cell["slices"]))
    os.environ["LOCUM_THREADS"] = str(cell["threads"])
    with running_service(store, state, free_port()) as client, sync_playwright() as playwright:
        chromium = launch(playwright)
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(_PATIENCE_MS)
        with _transfers(page) as files:
            page.goto(str(client.base_url))
            page.get_by_label("Model").wait_for()
            _open(page, path)
        devtools = page.context.new_cdp_session(page)
        before, heap = [b""], []

        def collect() -> None:
            devtools.send("HeapProfiler.collectGarbage")
            heap.append(page.evaluate("performance.memory.usedJSHeapSize"))

        steps: dict[str, Callable[[], object]] = {
            "bare": lambda: _ask(client, path),
            "open": lambda: before.append(_open(page, path)),
            "page": lambda: _show(page, before[-1]),
            "collect": collect,
        }
        # The first answers load the network and warm caches, on both sides.
        seconds = alternated(steps, cell["repeats"], warm_up=1)
        return {
            "bare_s": [round(each, 3) for each in seconds["bare"]],
            "page_s": [round(each, 3) for each in seconds["page"]],
            "picture_s": round(alternated({"picture": lambda: _picture(page)}, 1, 0)["picture"][0], 3),
            "frames_per_s": {layout: _frames_per_s(page, layout) for layout in ("axial", "planes")},
            "files": files,
            "heap_bytes": heap[1:],
            "chromium": chromium.version.partition(".")[0],
        }


def paint(cell: Cell, work: Path) -> dict[str, Any]:
    """Milliseconds until the first paint and the view's title, of an empty service and an empty cache."""
    from playwright.sync_api import sync_playwright

    store, state = work / f"store-{os.getpid()}", work / f"state-{os.getpid()}"
    store.mkdir(parents=True)
    first: list[float] = []
    titled: list[float] = []
    with running_service(store, state, free_port()) as client, sync_playwright() as playwright:
        chromium = launch(playwright)
        # The first one starts the browser's processes, and is not counted.
        for _ in range(cell["paints"] + 1):
            context = chromium.new_context(viewport={"width": 1280, "height": 800})
            page = context.new_page()
            devtools = context.new_cdp_session(page)
            devtools.send("Emulation.setCPUThrottlingRate", {"rate": cell["slowdown"]})
            page.goto(str(client.base_url))
            page.locator("h1:not(.visually-hidden)").wait_for()
            titled.append(page.evaluate("performance.now()"))
            first.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            context.close()
        version = chromium.version.partition(".")[0]
    return {
        "first_ms": [round(each) for each in first[1:]],
        "titled_ms": [round(each) for each in titled[1:]],
        "chromium": version,
    }


@contextmanager
def _transfers(page: Any) -> Iterator[list[dict[str, Any]]]:
    """The page's own files that were loaded: name, bytes, and bytes as they were sent."""
    finished: list[Any] = []
    files: list[dict[str, Any]] = []

    def note(request: Any) -> None:
        finished.append(request)

    page.on("requestfinished", note)
    yield files
    page.remove_listener("requestfinished", note)
    for request in finished:
        kind = request.resource_type
        if kind in ("document", "script", "stylesheet", "font", "image") and request.url.startswith("http"):
            name = request.url.rpartition("/")[2] or "index.html"
            sent = request.sizes()["responseBodySize"]
            files.append({"name": name, "bytes": len(request.response().body()), "sent": sent})
    files.sort(key=lambda each: -each["bytes"])


def _open(page: Any, path: Path) -> bytes:
    """Open a volume in the axial plane. Returns its picture once that no longer changes."""
    page.set_input_files("input[type=file]", path)
    page.get_by_role("button", name="Axial").click()
    page.mouse.move(2, 2)
    pictures = [b""]
    while len(pictures) < 3 or pictures[-1] != pictures[-3]:
        page.wait_for_timeout(500)
        pictures.append(_picture(page))
    return pictures[-1]


def _ask(client: httpx.Client, path: Path) -> None:
    """Send the request that the page sends, by a plain client."""
    form = {"model": NAME, "personalization": "auto", "output": "multipart"}
    scan = {"scan": ("scan", path.read_bytes())}
    client.post("/segment", data=form, files=scan, timeout=300).raise_for_status()


def _show(page: Any, before: bytes) -> None:
    """Ask for the mask, and wait until the canvas differs from its picture `before`."""
    page.get_by_role("button", name="Segment").click()
    page.get_by_role("heading", name="Answer").wait_for()
    while _picture(page) == before:
        pass


def _picture(page: Any) -> bytes:
    """The canvas's middle: a picture of all takes a fifth of a second."""
    box = page.locator("canvas").bounding_box()
    side = 200
    x, y = box["x"] + (box["width"] - side) / 2, box["y"] + (box["height"] - side) / 2
    return bytes(page.screenshot(clip={"x": x, "y": y, "width": side, "height": side}))


def _frames_per_s(page: Any, layout: str) -> float:
    page.get_by_role("button", name="Axial" if layout == "axial" else "All planes").click()
    page.wait_for_timeout(500)
    pictures = []
    for notch in (0, 1, -1):
        page.evaluate(_TURN, [notch])
        page.wait_for_timeout(500)
        pictures.append(_picture(page))
    if len(set(pictures)) == 1:
        raise RuntimeError("the wheel did not change the slice, so the frames say nothing")
    times = page.evaluate(_SCROLL, [_SCROLL_S])
    return round(1000 * (len(times) - 1) / float(times[-1] - times[0]), 1)


def _section(rows: Sequence[Row]) -> list[str]:
    (row,) = rows
    result, slices = row["result"], row["cell"]["slices"]
    bare, page = median(result["bare_s"]), median(result["page_s"])
    cores = row["made_with"]["machine"].rpartition(", ")[2]
    times = [
        [label, f"{median(result[side]):.2f}", f"{min(result[side]):.2f} to {max(result[side]):.2f}"]
        for side, label in (
            ("bare_s", "the bare request"),
            ("page_s", "the page, until the mask is drawn"),
        )
    ]
    weight = [
        [each["name"], f"{each['bytes'] / 1000:.1f}", f"{each['sent'] / 1000:.1f}"]
        for each in result["files"]
    ]
    total = [sum(each[side] for each in result["files"]) / 1000 for side in ("bytes", "sent")]
    heap = ", ".join(f"{size / 2**20:.0f}" for size in result["heap_bytes"])
    return [
        f"A volume of 256x256x{slices}, a U-Net of width {row['cell']['width']}, and Chromium "
        f"{result['chromium']} with its software renderer, on a machine of {cores}.",
        "## Time to the mask",
        table(["", "seconds, median", "range"], times),
        f"The page takes {page - bare:.2f} s more than the bare request, {page / bare:.2f} times as much."
        " The time ends with the first picture of the canvas's middle with the mask; a picture takes "
        f"{result['picture_s']:.2f} s.",
        "## Scrolling",
        f"{result['frames_per_s']['axial']:.0f} frames per second in the axial plane and "
        f"{result['frames_per_s']['planes']:.0f} with three planes and the 3-D view, with the mask shown "
        "and one slice per frame.",
        "## Weight",
        table(["file", "kB", "kB as sent"], [*weight, ["all", *(f"{each:.1f}" for each in total)]]),
        "## Memory",
        f"JavaScript's heap after each of {len(result['heap_bytes'])} answers, with garbage collected: "
        f"{heap} MiB.",
    ]


def _paint_section(rows: Sequence[Row]) -> list[str]:
    (row,) = rows
    result, slowdown = row["result"], row["cell"]["slowdown"]
    times = [
        [label, f"{median(result[side]):.0f}", f"{min(result[side])} to {max(result[side])}"]
        for side, label in (("first_ms", "first contentful paint"), ("titled_ms", "the view's title"))
    ]
    return [
        "## First paint",
        table(["", "milliseconds, median", "range"], times),
        f"{len(result['first_ms'])} visits with an empty cache to an empty service on the same machine, with"
        f" the browser's processor slowed down {slowdown} times (`Emulation.setCPUThrottlingRate`), by"
        f" Chromium {result['chromium']}.",
    ]
