"""A hospital from outside gets its own model; and one that would have done harm, which the gate refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.console import Console

from demo import api
from demo.following import follow
from demo.phantom_scans import PhantomScan


@dataclass(frozen=True)
class Visit:
    """Who adapts: the hospital's new patient, with the truth, is what every model is measured on."""

    console: Console
    client: httpx.Client
    folder: Path
    patient: PhantomScan

    @property
    def hospital(self) -> str:
        """Its id."""
        return self.patient.hospital

    def adapt(self, name: str, scans: Mapping[str, bytes], epochs: int | None) -> str:
        """Upload a cohort, adapt, follow, show gate and card; gives the candidate's reference.

        The files that this writes begin with `name`. Leaves with code 1 where the job makes no candidate.
        """
        cohort = api.send_cohort(self.client, self.hospital, scans)
        self._say(f"{len(scans)} scans sent without labels, one by one; cohort {cohort}")
        job_id = api.start_adaptation(self.client, self.hospital, cohort, epochs)
        follow(self.console, api.events(self.client, job_id))
        job = api.job(self.client, job_id)
        if job["candidate"] is None:
            self._say(f"the job ended as {job['state']}: {job['reason']}")
            raise typer.Exit(1)
        candidate = str(job["candidate"]["reference"])
        passed = job["gate"]["passed"]
        verdict = "[bold green]passes[/]" if passed else "[bold red]does not pass[/]"
        self._say(f"candidate [bold]{candidate}[/] ({job['state']}) {verdict} the gate")
        self._show_checks(job["gate"]["checks"])
        card = self.folder / f"{name}-card.html"
        card.write_bytes(self.client.get(f"/jobs/{job_id}/card").raise_for_status().content)
        self._show_file("card", card)
        return candidate

    def compare(self, name: str, candidate: str) -> tuple[float, float]:
        """Dice of the new patient by the federation's model, and by the candidate: before anybody decides."""
        before = self.measure("before:", model=api.MODEL, personalization="global")
        self._show_file("overlay", self._overlay(f"{name}-before", model=api.MODEL, personalization="global"))
        after = self.measure("after: ", model=candidate)
        self._show_file("overlay", self._overlay(f"{name}-after", model=candidate))
        return before, after

    def decide(self, candidate: str, reason: str, *, override: bool = False) -> bool:
        """Try to assign the candidate; whether it may be is the service's to say. Whether it was."""
        answer = api.assign(self.client, self.hospital, candidate, reason, override=override)
        if answer.is_success:
            entry = answer.json()
            over = " over the gate" if entry["override"] else ""
            self._say(f"assigned{over}: [bold]{entry['artefact']}[/], by {entry['actor']}: {entry['reason']}")
        else:
            self._say(f"[bold red]{answer.status_code}[/] {answer.json()['detail']}")
        return answer.is_success

    def measure(self, label: str, prefer: str | None = None, **fields: str) -> float:
        """Segment the new patient, and say who answered and how well."""
        answer = api.mask_of(self.client, self.patient.image, {"hospital": self.hospital} | fields, prefer)
        score = self.patient.dice_of(answer.mask)
        self._say(f"{label} [bold]{answer.whose}[/], by {answer.model}: Dice [bold]{score:.3f}[/]")
        return score

    def _overlay(self, name: str, **fields: str) -> Path:
        path = self.folder / f"{name}.png"
        form = {"hospital": self.hospital, "output": "overlay"} | fields
        path.write_bytes(api.segment(self.client, self.patient.image, form).content)
        return path

    def _show_checks(self, checks: list[dict[str, Any]]) -> None:
        for check in checks:
            mark = "[green]✓[/]" if check["passed"] else "[red]✗[/]"
            if check["value"] is None:
                self._say(f"  · {check['name']:<20}  not measured")
            else:
                limit = f"{check['bound']} {check['limit']:g}"
                self._say(f"  {mark} {check['name']:<20} {check['value']:>8.3f}  ({limit})")

    def _show_file(self, what: str, path: Path) -> None:
        self._say(f"  {what:<8} {path}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)
