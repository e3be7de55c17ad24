"""`locum demo --year`: a year of a member's scans in a minute, with a scanner update in its fourth month.

Nineteen scans stand for a month. The watch learns from the first fifty what is usual, calls when the update
has made the scans others than they were, and the rule that was set beforehand holds the answers until a
person has looked. The person fits the model to the scans since the update, without masks, and the series goes
on with what the gate passed. All scans are synthetic, and their true masks are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape

from locum import Client, Problem
from locum.answers import Watch
from locum.demo.body import Field, draw_body
from locum.demo.body_scans import MEMBERS, SCANNERS, BodyScan, Scanner, scan_body
from locum.demo.carried import MODEL, unpack
from locum.demo.service_process import check_port, end_by_signals, running_service

HOSPITAL, SCANNER = MEMBERS[0], "CT 2"
# What an update of the software does: a faster protocol, with another contrast, more shading and noise.
UPDATED = replace(SCANNERS[HOSPITAL], curve=1.5, shading=0.2, blur_mm=0.2, noise=0.07)
# Patients that are drawn, one of which each scan shows.
_PATIENTS = 4
_BEFORE, _MOST_AFTER, _LATER = 57, 40, 22
# Scans since the update that the model is fitted to.
_FITTED = 10
# The service looks at what was observed so often.
_LOOK_SECONDS = 0.5
LOOKING = {"LOCUM_RECONCILE_EVERY_SECONDS": f"{_LOOK_SECONDS}"}
_MOST_WAIT_SECONDS = 20.0

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Year:
    """The scans of a year, one after the other. `bodies` are brightness and mask of each patient."""

    bodies: list[tuple[Field, NDArray[np.uint8]]]

    @classmethod
    def drawn(cls) -> Year:
        """Draw the patients, which takes seconds."""
        return cls([draw_body(np.random.default_rng([7, number])) for number in range(_PATIENTS)])

    def scan(self, number: int, scanner: Scanner) -> BodyScan:
        """The scan of that number, of one of the patients."""
        bright, mask = self.bodies[number % len(self.bodies)]
        # No two patients are as bright, and no two days as noisy.
        draw = np.random.default_rng([8, number])
        own = replace(scanner, gain=scanner.gain * float(draw.uniform(0.9, 1.1)))
        return BodyScan(HOSPITAL, scan_body(bright, own, draw), mask)

    def scans(self, first: int, count: int, scanner: Scanner) -> Iterator[BodyScan]:
        """So many scans, each drawn while the one before is answered."""
        with ThreadPoolExecutor(1) as drawing:
            waiting = drawing.submit(self.scan, first, scanner)
            for number in range(first, first + count):
                found = waiting.result()
                waiting = drawing.submit(self.scan, number + 1, scanner)
                yield found


def run(folder: Path, port: int, *, once: bool) -> None:
    """Serve the carried store, send a year of scans, and leave the service running unless `once`."""
    began = time.monotonic()
    end_by_signals()
    check_port(port)
    folder.mkdir(parents=True, exist_ok=True)
    store, _, settings = unpack(folder)
    with ThreadPoolExecutor(1) as drawing:
        # While the service starts.
        drawn = drawing.submit(Year.drawn)
        with (
            running_service(store, folder / "state", port, settings={**settings, **LOOKING}) as http,
            Client(str(http.base_url)) as client,
        ):
            page = tell(drawn.result, client, str(http.base_url))
            seconds = time.monotonic() - began
            console.print(f"a year in {seconds:.0f} s; the page draws it:\n[bold]{page}[/]")
            if not once:
                console.print("Ctrl-C stops the service.")
                try:
                    while True:
                        time.sleep(3600)
                except KeyboardInterrupt:
                    console.print("stopped")


def tell(drawn: Callable[[], Year], client: Client, url: str) -> str:
    """Send the scans of a year to a service that looks at them as `LOOKING` says, and print what happens.

    Returns the address of the page that draws it.
    """
    client.register(HOSPITAL, HOSPITAL.capitalize(), HOSPITAL)
    client.set_watch(HOSPITAL, MODEL, "agreed before anything happened", months=12, stop="hold", actor="ada")
    console.print(f"{HOSPITAL}: one false alarm a year at most, and at an alarm answers are held")
    _send(drawn(), client)
    return f"{url}/#/watch?{urlencode({'hospital': HOSPITAL, 'model': MODEL})}"


def _send(year: Year, client: Client) -> None:
    scores = [_answered(client, scan) for scan in year.scans(0, _BEFORE, SCANNERS[HOSPITAL])]
    console.print(f"months 1 to 3: {_BEFORE} scans, mean Dice {fmean(scores):.2f}; {_state(client)}")
    updated: list[float] = []
    try:
        for scan in year.scans(_BEFORE, _MOST_AFTER, UPDATED):
            updated.append(_answered(client, scan))
            _wait(client)
    except Problem as problem:
        console.print(f"month 4: an update of {SCANNER}'s software; {len(updated)} scans later")
        console.print(f"  [bold red]{problem.status}[/] {problem}")
    watch = _watch(client)
    console.print(f"  mean Dice {fmean(updated):.2f} since the update; {_state(client)}")
    if watch.state != "investigate":
        return
    fitted = _adapt(year, client)
    reason = f"new software of {SCANNER}: masks looked at, and {fitted}"
    client.answer_alarms(HOSPITAL, MODEL, reason, scanner=SCANNER, actor="ada")
    console.print(f"ada answers: {reason}")
    later = [_answered(client, scan) for scan in year.scans(200, _LATER, UPDATED)]
    console.print(
        f"another series begins: {len(later)} scans, mean Dice {fmean(later):.2f}; {_state(client)}"
    )


def _adapt(year: Year, client: Client) -> str:
    """Fit the model to scans since the update, and assign what the gate passes; return what was done."""
    if find_spec("torch") is None:
        console.print("torch is not installed here, which jobs need: nothing is fitted")
        return "nothing fitted"
    cohort = client.create_cohort(HOSPITAL, name=f"{SCANNER}, since its update").id
    for number, scan in enumerate(year.scans(_BEFORE, _FITTED, UPDATED), start=1):
        client.add_scan(HOSPITAL, cohort, f"scan-{number:02}", scan.volume)
    job = client.wait(client.adapt(HOSPITAL, MODEL, cohort).id)
    verdict = "" if job.verdict is None else " ".join((*job.verdict.sentences, *job.verdict.reasons))
    console.print(f"ada fits the model to {_FITTED} of the new scans, without masks: {escape(verdict)}")
    if job.candidate is None or job.gate is None or not job.gate.passed:
        console.print(f"  [bold red]the gate does not pass it[/] ({job.state}); what served stays")
        return "no other version passed the gate"
    candidate = job.candidate.reference
    client.assign(HOSPITAL, MODEL, candidate, f"fitted to {SCANNER} since its update", actor="ada")
    console.print(f"  the gate passes it; assigned: [bold]{candidate}[/]")
    return "the model fitted to it"


def _answered(client: Client, scan: BodyScan) -> float:
    answer = client.segment(scan.volume, hospital=HOSPITAL, model=MODEL, scanner=SCANNER)
    return fmean(scan.dice_of(answer.voxels).values())


def _watch(client: Client) -> Watch:
    return next(each for each in client.watches(HOSPITAL) if each.scanner == SCANNER)


def _wait(client: Client) -> None:
    """Wait until the service has looked at the newest answer: a minute is longer than that at a hospital."""
    sent = client.observations(HOSPITAL, MODEL, limit=1)[0].at
    until = time.monotonic() + _MOST_WAIT_SECONDS
    while _watch(client).last < sent and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS / 4)


def _state(client: Client) -> str:
    watch = _watch(client)
    called = [f"{each.stream} since {each.since.astimezone():%H:%M:%S}" for each in watch.alarms]
    said = f": {', '.join(called)}" if called else ""
    return f"{SCANNER} is at [bold]{watch.state}[/]{said}"
