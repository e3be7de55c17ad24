"""What `locum demo` shows: the carried model answers a scan from outside, before it is fitted and after."""

from __future__ import annotations

import os
import signal
import sys
import time
import webbrowser
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rich.console import Console

from locum import Client
from locum.answers import Segmentation
from locum.demo.body_scans import MEMBERS, OUTSIDE, BodyScan
from locum.demo.carried import MODEL, unpack
from locum.demo.service_process import check_port, end_by_signals, running_service
from model_store.lens import Distances, fingerprint_of, mean_shift
from model_store.scan import decode
from model_store.store import Store

# Beyond the patients that the model was trained on.
PATIENT = 1000

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Step:
    """One answer of the story: what is said of it, how the service is asked, and the name of its files."""

    words: str
    file: str
    hospital: str
    personalization: str


# A lens of one scan is kept nowhere: the next answer is the federation's model's again.
_STEPS = (
    Step("member: a scan of a hospital that trained", "member", MEMBERS[0], "global"),
    Step("before: the federation's model", "before", OUTSIDE, "global"),
    Step("fitted: through a lens of this scan", "fitted", OUTSIDE, "scan"),
    Step("undone: the federation's model again", "undone", OUTSIDE, "global"),
)


def say_distance(store: Path, scan: BodyScan, folder: Path) -> None:
    """Write a scan, and say how far it is from those that the model was trained on."""
    file = folder / f"{scan.hospital}-scan.nii.gz"
    scan.volume.to_filename(file)
    model = Store(store).open(MODEL)
    distances = Distances(fingerprint_of(model), model.manifest.task, None)
    found = distances.add(scan.hospital, decode(file.read_bytes()))
    inverted = "; it looks inverted" if found.polarity.inverted else ""
    console.print(
        f"{scan.hospital}: shift [bold]{mean_shift(found.shifts):.1f}[/] from the members' scans, where 1 is "
        f"usual{inverted}"
    )
    console.print(f"  more     locum distance {MODEL} {file} --store {store}", style="dim")


def show(step: Step, scan: BodyScan, client: Client, folder: Path) -> Segmentation:
    """Ask for the mask and its picture, write both, and say how good the mask is."""
    form: dict[str, Any] = {
        "hospital": step.hospital,
        "model": MODEL,
        "personalization": step.personalization,
    }
    answer = client.segment(scan.volume, **form)
    mask, picture = folder / f"{step.file}-mask.nii.gz", folder / f"{step.file}.png"
    answer.save(mask)
    picture.write_bytes(client.render(scan.volume, "overlay", **form).content)
    scores = ", ".join(f"{region} {score:.2f}" for region, score in scan.dice_of(answer.voxels).items())
    console.print(f"{step.words}: Dice [bold]{scores}[/]")
    console.print(f"  picture  {picture}\n  mask     {mask}", style="dim")
    return answer


def keep(scan: BodyScan, client: Client, url: str) -> str:
    """Keep the scan with its true mask in a cohort; return the address of the page that shows both."""
    cohort = client.create_cohort(scan.hospital, name="A scan, with its true mask").id
    name = f"{scan.hospital}-1"
    client.add_scan(scan.hospital, cohort, name, scan.volume)
    client.add_mask(scan.hospital, cohort, name, scan.true_mask, model=MODEL)
    shown = {
        "hospital": scan.hospital,
        "model": MODEL,
        "personalization": "scan",
        "cohort": cohort,
        "scan": name,
        "answer": "now",
        "tour": "now",
    }
    return f"{url}/#/look?{urlencode(shown)}"


def open_browser(page: str) -> bool:
    """Open the page in a browser with windows, where there is one; never one of the terminal."""
    has_windows = sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return has_windows and webbrowser.open(page)


def run(folder: Path, port: int, *, once: bool, browser: bool) -> None:
    """Serve the carried store, show one scan's answers, and leave the service running unless `once`."""
    started = time.monotonic()
    end_by_signals()
    check_port(port)
    folder.mkdir(parents=True, exist_ok=True)
    store, key, settings = unpack(folder)
    console.print(f"{MODEL}, trained by {', '.join(MEMBERS)}; its files are whole, signed by the key {key}")
    with ThreadPoolExecutor(1) as drawing:
        # While the service starts.
        drawn = {name: drawing.submit(BodyScan.at, name, PATIENT) for name in (MEMBERS[0], OUTSIDE)}
        with (
            running_service(store, folder / "state", port, settings=settings) as http,
            Client(str(http.base_url)) as client,
        ):
            for hospital in (*MEMBERS, OUTSIDE):
                client.register(hospital, hospital.capitalize(), hospital if hospital in MEMBERS else None)
            for step in _STEPS:
                scan = drawn[step.hospital].result()
                if step.file in ("member", "before"):
                    say_distance(store, scan, folder)
                show(step, scan, client, folder)
                if step is _STEPS[0]:
                    console.print(f"the first mask after {time.monotonic() - started:.0f} s", style="dim")
            page = keep(drawn[OUTSIDE].result(), client, str(http.base_url))
            console.print(
                f"\nThe page shows the scan with its true mask and the fitted answer:\n[bold]{page}[/]"
            )
            if browser:
                open_browser(page)
            if once:
                return
            console.print(
                "Ctrl-C stops the service. `locum demo --train` trains such a model, and adapts it."
            )
            try:
                signal.pause()
            except KeyboardInterrupt:
                console.print("stopped")
