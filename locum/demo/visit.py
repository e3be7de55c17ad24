"""One hospital from outside in the demo: it sends cohorts, starts jobs, and assigns what its gate passes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

import typer
from rich.console import Console
from rich.markup import escape

from locum import Client, Problem
from locum.answers import Check, Receipt
from locum.commands.accepting import lines_of
from locum.commands.following import follow
from locum.demo.phantom_scans import PhantomScan

# The routing space (IOP-FL) is adapted without masks; the FedOAP model is joined with masks.
MODEL, ANY_ORGAN = "phantom", "any-organ"

_FOR_TESTS = "To look at. No version learns from them: their masks measure every version."


def answered_by(receipt: Receipt) -> str:
    """Which model answered, in words: `member aster`."""
    return " ".join(filter(None, (receipt.personalization, receipt.site)))


def send_cohort(
    client: Client,
    hospital: str,
    scans: Mapping[str, PhantomScan],
    name: str,
    masks_for: str | None = None,
    note: str | None = None,
) -> str:
    """Upload scans, and their true masks for a model that learns from them; return the cohort."""
    cohort = client.create_cohort(hospital, note=note, name=name).id
    for file, scan in scans.items():
        client.add_scan(hospital, cohort, file, scan.volume)
        if masks_for is not None:
            client.add_mask(hospital, cohort, file, scan.true_mask, model=masks_for)
    return cohort


class _Patience:
    """Waits for a worker, and not for ever."""

    def __init__(self) -> None:
        self._until = time.monotonic() + 120

    def a_while(self, what: str) -> None:
        """Wait a little. Exits with code 1 after two minutes."""
        if time.monotonic() > self._until:
            typer.echo(f"{what}: its log says why", err=True)
            raise typer.Exit(1)
        time.sleep(0.2)


@dataclass(frozen=True)
class Visit:
    """A hospital's dealings with the service. Each model is measured on new patients with known masks.

    Pictures are of the first of them.
    """

    console: Console
    client: Client
    folder: Path
    patients: Sequence[PhantomScan]

    @property
    def hospital(self) -> str:
        """The hospital's id."""
        return self.patients[0].hospital

    def fit(
        self,
        name: str,
        scans: Mapping[str, PhantomScan],
        epochs: int | None = None,
        *,
        model: str = MODEL,
        with_masks: bool = False,
    ) -> str:
        """Upload a cohort, run a job, show its gate and card; return the candidate's reference.

        Files that this writes begin with `name`. Exits with code 1 when the job makes no candidate.
        """
        masks_for = model if with_masks else None
        cohort = send_cohort(self.client, self.hospital, scans, f"Demo: {name}", masks_for)
        self._say(f"{len(scans)} scans sent {'with' if with_masks else 'without'} masks; cohort {cohort}")
        options = {} if epochs is None else {"epochs": epochs}
        started = self.client.adapt(self.hospital, model, cohort, options)
        follow(self.console, ((event.type, event.data) for event in self.client.events(started.id)))
        job = self.client.job(started.id)
        if job.candidate is None or job.gate is None:
            self._say(f"the job ended as {job.state}: {job.reason}")
            raise typer.Exit(1)
        candidate = job.candidate.reference
        verdict = "[bold green]passes[/]" if job.gate.passed else "[bold red]does not pass[/]"
        self._say(f"candidate [bold]{candidate}[/] ({job.state}) {verdict} the gate")
        if job.verdict is not None:
            for sentence in (*job.verdict.sentences, *job.verdict.reasons):
                self._say(f"  {escape(sentence)}")
        self._show_checks(job.gate.checks)
        card = self.folder / f"{name}-card.html"
        card.write_bytes(self.client.card(job.id))
        self._show("card", card)
        self._show("page", self._page("adapt", model=model, job=job.id))
        return candidate

    def compare(self, name: str, candidate: str, model: str = MODEL) -> tuple[float, float]:
        """Return the new patients' Dice by the federation's model and by the candidate."""
        before = self.measure("before:", model=model, personalization="global")
        self._show("overlay", self._overlay(f"{name}-before", model=model, personalization="global"))
        after = self.measure("after: ", model=candidate)
        self._show("overlay", self._overlay(f"{name}-after", model=candidate))
        return before, after

    def assign(self, candidate: str, reason: str, model: str = MODEL) -> None:
        """Try to assign the candidate, and show the answer: the service rejects it when its gate did."""
        try:
            entry = self.client.assign(self.hospital, model, candidate, reason, actor="ada")
        except Problem as problem:
            self._say(f"[bold red]{problem.status}[/] {problem}")
        else:
            self._say(f"assigned: [bold]{entry.artefact}[/], by {entry.actor}: {entry.reason}")

    def shadow(self, version: str, reason: str, model: str = MODEL) -> None:
        """Let a version answer every scan unseen, beside the one that serves."""
        given = int(version.rpartition("@")[2])
        made = self.client.begin_shadow(self.hospital, model, given, reason, every=1, actor="ada")
        self._say(f"[bold]{made.artefact}[/] answers every scan unseen from now on")

    def correct(self, model: str) -> list[str]:
        """Segment the new patients, send their true masks as corrections, and say what was changed."""
        for patient in self.patients:
            answer = self.client.segment(patient.volume, hospital=self.hospital, model=model)
            request = answer.receipt.request
            self.client.correct(self.hospital, request, patient.true_mask, patient.volume, seconds=40)
        made = len(self.patients)
        wait_for = _Patience()
        while any(each.state == "waiting" for each in self.client.corrections(self.hospital, model, made)):
            wait_for.a_while("the worker has not compared the corrections")
        return [
            f"{label}: Dice {change.dice or 0:.3f}, {change.added_ml or 0:.1f} mL added, "
            f"{change.removed_ml or 0:.1f} mL removed"
            for each in self.client.corrections(self.hospital, model, made)
            for label, change in (each.labels or {}).items()
        ]

    def show_shadow(self, model: str) -> None:
        """Show how the version that answered unseen compares, and end it."""
        wait_for = _Patience()
        while (found := self.client.shadows(self.hospital, model)[0]).corrected < len(self.patients):
            wait_for.a_while("the worker has not compared all answers of the shadow")
        gain = 100 * (found.gain or 0)
        self._say(
            f"on {found.corrected} corrected answers [bold]{found.artefact}[/] has {gain:+.1f} points of "
            "Dice beside the version that serves"
        )
        self.client.end_shadow(self.hospital, model, "it is no better", actor="ada")

    def accept(
        self, scans: Mapping[str, PhantomScan], thresholds: Mapping[str, Any], model: str = MODEL
    ) -> None:
        """Score what serves on scans with true masks, show the report, and let another person decide."""
        cohort = send_cohort(self.client, self.hospital, scans, "Demo: acceptance", model)
        started = self.client.measure_acceptance(self.hospital, model, cohort, thresholds, actor="ben")
        follow(self.console, ((event.type, event.data) for event in self.client.events(started.id)))
        ended = self.client.job(started.id)
        if ended.state != "succeeded":
            self._say(f"the job ended as {ended.state}: {ended.reason}")
            raise typer.Exit(1)
        report = self.client.acceptance(started.id)["report"]
        for line in lines_of(report):
            self._say(escape(line))
        page = self.folder / "acceptance.html"
        page.write_bytes(self.client.acceptance_page(started.id))
        self._show("report", page)
        met = report["verdict"] == "met"
        reason = "all masks looked at" if met else "the thresholds are not met"
        self.client.decide_acceptance(started.id, met, reason, actor="ada")
        self._say(f"[bold]{'accepted' if met else 'rejected'}[/] by ada, measured by ben: {reason}")

    def measure(self, label: str, **fields: Any) -> float:
        """Segment the new patients, show the model and its mean Dice, and return the Dice."""
        form: dict[str, Any] = {"hospital": self.hospital} | fields
        answers = [self.client.segment(patient.volume, **form) for patient in self.patients]
        pairs = zip(self.patients, answers, strict=True)
        score = fmean(patient.dice_of(answer.content) for patient, answer in pairs)
        receipt = answers[0].receipt
        self._say(
            f"{label} [bold]{answered_by(receipt)}[/], by {receipt.model.name}: Dice [bold]{score:.3f}[/]"
        )
        return score

    def page_of_new_patients(self, model: str) -> str:
        """Keep the new patients with their true masks in a cohort; return the page's address of the first."""
        scans = {f"new-patient-{number}": patient for number, patient in enumerate(self.patients, 1)}
        cohort = send_cohort(
            self.client, self.hospital, scans, "new patients, with true masks", model, _FOR_TESTS
        )
        return self._page("look", model=model, cohort=cohort, scan=next(iter(scans)))

    def _page(self, view: str, **shown: str) -> str:
        return f"{self.client.connection.url}/#/{view}?{urlencode({'hospital': self.hospital} | shown)}"

    def _overlay(self, name: str, **fields: Any) -> Path:
        path = self.folder / f"{name}.png"
        form: dict[str, Any] = {"hospital": self.hospital} | fields
        path.write_bytes(self.client.render(self.patients[0].volume, "overlay", **form).content)
        return path

    def _show_checks(self, checks: Sequence[Check]) -> None:
        for check in checks:
            mark = "[green]✓[/]" if check.passed else "[red]✗[/]"
            if check.value is None:
                self._say(f"  · {check.name:<22}  not measured")
            else:
                limit = f"{check.bound} {check.limit:g}"
                self._say(f"  {mark} {check.name:<22} {check.value:>8.3f}  ({limit})")

    def _show(self, what: str, place: Path | str) -> None:
        self._say(f"  {what:<8} {place}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)
