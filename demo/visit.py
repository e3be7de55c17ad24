"""One hospital from outside in the demo: it sends cohorts, starts jobs, and assigns what its gate passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

import httpx
import typer
from rich.console import Console

from demo import api
from demo.phantom_scans import PhantomScan
from locum.commands.following import follow


@dataclass(frozen=True)
class Visit:
    """A hospital's dealings with the service. Each model is measured on new patients with known masks.

    Pictures are of the first of them.
    """

    console: Console
    client: httpx.Client
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
        model: str = api.MODEL,
        with_masks: bool = False,
    ) -> str:
        """Upload a cohort, run a job, show its gate and card; return the candidate's reference.

        Files that this writes begin with `name`. Exits with code 1 when the job makes no candidate.
        """
        images = {file: scan.image for file, scan in scans.items()}
        masks = {file: scan.truth for file, scan in scans.items()} if with_masks else {}
        cohort = api.send_cohort(self.client, self.hospital, images, masks, model)
        self._say(f"{len(scans)} scans sent {'with' if with_masks else 'without'} masks; cohort {cohort}")
        job_id = api.start_adaptation(self.client, self.hospital, cohort, epochs, model)
        follow(self.console, api.events(self.client, job_id))
        job = api.job(self.client, job_id)
        if job["candidate"] is None:
            self._say(f"the job ended as {job['state']}: {job['reason']}")
            raise typer.Exit(1)
        candidate = str(job["candidate"]["reference"])
        verdict = "[bold green]passes[/]" if job["gate"]["passed"] else "[bold red]does not pass[/]"
        self._say(f"candidate [bold]{candidate}[/] ({job['state']}) {verdict} the gate")
        self._show_checks(job["gate"]["checks"])
        card = self.folder / f"{name}-card.html"
        card.write_bytes(self.client.get(f"/jobs/{job_id}/card").raise_for_status().content)
        self._show("card", card)
        self._show("page", self._page("adapt", model=model, job=job_id))
        return candidate

    def compare(self, name: str, candidate: str, model: str = api.MODEL) -> tuple[float, float]:
        """Return the new patients' Dice by the federation's model and by the candidate."""
        before = self.measure("before:", model=model, personalization="global")
        self._show("overlay", self._overlay(f"{name}-before", model=model, personalization="global"))
        after = self.measure("after: ", model=candidate)
        self._show("overlay", self._overlay(f"{name}-after", model=candidate))
        return before, after

    def assign(self, candidate: str, reason: str, model: str = api.MODEL) -> None:
        """Try to assign the candidate, and show the answer: the service rejects it when its gate did."""
        answer = api.assign(self.client, self.hospital, model, candidate, reason)
        if answer.is_success:
            entry = answer.json()
            self._say(f"assigned: [bold]{entry['artefact']}[/], by {entry['actor']}: {entry['reason']}")
        else:
            self._say(f"[bold red]{answer.status_code}[/] {answer.json()['detail']}")

    def measure(self, label: str, prefer: str | None = None, **fields: str) -> float:
        """Segment the new patients, show the model and its mean Dice, and return the Dice."""
        form = {"hospital": self.hospital} | fields
        answers = [api.mask_of(self.client, patient.image, form, prefer) for patient in self.patients]
        pairs = zip(self.patients, answers, strict=True)
        score = fmean(patient.dice_of(answer.mask) for patient, answer in pairs)
        answer = answers[0]
        self._say(f"{label} [bold]{answer.personalization}[/], by {answer.model}: Dice [bold]{score:.3f}[/]")
        return score

    def page_of_new_patients(self, model: str) -> str:
        """Keep the new patients with their true masks in a cohort; return the page's address of the first."""
        scans = {f"new-patient-{number}": patient for number, patient in enumerate(self.patients, 1)}
        images = {name: scan.image for name, scan in scans.items()}
        masks = {name: scan.truth for name, scan in scans.items()}
        cohort = api.send_cohort(self.client, self.hospital, images, masks, model)
        return self._page("look", model=model, cohort=cohort, scan=next(iter(scans)))

    def _page(self, view: str, **shown: str) -> str:
        return f"{self.client.base_url}/#/{view}?{urlencode({'hospital': self.hospital} | shown)}"

    def _overlay(self, name: str, **fields: str) -> Path:
        path = self.folder / f"{name}.png"
        form = {"hospital": self.hospital, "output": "overlay"} | fields
        path.write_bytes(api.segment(self.client, self.patients[0].image, form).content)
        return path

    def _show_checks(self, checks: list[dict[str, Any]]) -> None:
        for check in checks:
            mark = "[green]✓[/]" if check["passed"] else "[red]✗[/]"
            if check["value"] is None:
                self._say(f"  · {check['name']:<22}  not measured")
            else:
                limit = f"{check['bound']} {check['limit']:g}"
                self._say(f"  {mark} {check['name']:<22} {check['value']:>8.3f}  ({limit})")

    def _show(self, what: str, place: Path | str) -> None:
        self._say(f"  {what:<8} {place}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)
