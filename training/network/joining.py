"""Join a federation as one hospital, and show on the terminal what leaves it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from model_store.errors import LocumStoreError
from training.algorithm import Group, Phase, Plan
from training.config import DEVICE
from training.engine.egress import SiteSpec, may_take_part
from training.errors import TrainingError, in_words
from training.exit_codes import FAILED, INTERRUPTED
from training.network.cell import printable
from training.network.handshake import check
from training.network.hospital import Hospital, Sent
from training.network.kits import Kit
from training.network.messages import Invitation, PlannedRun
from training.network.preparation import SENT_FILE
from training.privacy import Noising

_SHOWN = 4  # metrics that a line names


class Screen:
    """Shows the hospital's part of a run on the terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True, markup=False)
        self._waiting = False
        self._planned: set[str] = set()

    def waiting(self, reason: str) -> None:
        """Say once that the operator cannot be reached."""
        if not self._waiting:
            self._console.print(f"waiting for the operator: {reason}")
        self._waiting = True

    def planned(self, run: PlannedRun) -> None:
        """Show a planned run once, and how to agree to it."""
        if run.id not in self._planned:
            self._planned.add(run.id)
            self._console.print(
                f"planned for {run.on}: {printable(run.what)}. `locum site agree {run.id} --by NAME --kit "
                "KIT` says that this hospital takes part"
            )

    def joined(self, invitation: Invitation, plan: Plan, spec: SiteSpec, patients: str) -> None:
        """Show the plan: what leaves in each phase, by this hospital's policy."""
        self._waiting = False
        self._console.print(
            f"{spec.name} joined run {invitation.run[:16]}: {invitation.method} on "
            f"{invitation.task.get('name')}, {spec.cases} cases of {patients} here"
        )
        table = Table("phase", "rounds", "leaves this hospital", "stays", box=None, header_style="dim")
        for phase in plan:
            if isinstance(phase, Phase):
                table.add_row(phase.name, str(phase.rounds), *_leaving(phase, spec))
        self._console.print(table)
        self._console.print("Everything that is not listed as leaving stays here.")

    def warning(self, message: str) -> None:
        """Show a warning about the hospital's data."""
        self._console.print(f"warning: {message}")

    def started(self, phase: Phase, round: int) -> None:
        """Show the start of a step."""
        self._waiting = False
        self._console.print(f"{phase.name} {round + 1}/{phase.rounds}: computing")

    def sent(self, sent: Sent) -> None:
        """Show what left, in this step and in sum."""
        groups = ", ".join(f"{name} {_size(count)}" for name, count in sent.groups.items()) or "no tensors"
        metrics = f"; metrics {_some(sent.metrics)}" if sent.metrics else ""
        kept = f"; withheld {', '.join(sent.withheld)}" if sent.withheld else ""
        kept += "".join(
            f"; {name} has cost epsilon {cost.epsilon:.3g} at delta {cost.delta:g}"
            for name, cost in sent.privacy.items()
        )
        self._console.print(
            f"{sent.phase} {sent.round + 1}: left {groups}{metrics}{kept}; {_size(sent.total)} in sum"
        )

    def refused(self, phase: Phase, round: int, reason: str) -> None:
        """Show a step after which nothing left."""
        self._console.print(f"{phase.name} {round + 1}: nothing left: {reason}")

    def dropped(self, reason: str) -> None:
        """Show why a step does not count."""
        self._console.print(f"the operator dropped this hospital from the round: {reason}")

    def say(self, text: str) -> None:
        """Show a line."""
        self._console.print(text)


def _leaving(phase: Phase, spec: SiteSpec) -> tuple[str, str]:
    """Name the groups that leave and those that stay in a phase."""
    if not may_take_part(phase, spec):
        why = "no consent" if phase.consent and not spec.consents else "the policy refuses it"
        return f"nothing: {why}", ", ".join(_named(group) for group in phase.uploads)
    stay = [group for group in phase.uploads if spec.refusal(phase, group)]
    leave = [group for group in phase.uploads if group not in stay]
    return ", ".join(_named(group, spec.noising(group)) for group in leave) or "nothing", ", ".join(
        map(_named, stay)
    )


def _named(group: Group, noising: Noising | None = None) -> str:
    noise = f", clipped to {noising.clip:g}, noise {noising.noise:g}" if noising else ""
    return f"{group.name} ({group.kind}{noise})"


def _some(names: Sequence[str]) -> str:
    """Name the first of many; the log of what left has all."""
    if len(names) <= _SHOWN + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more ({SENT_FILE})"


def _size(count: int) -> str:
    if count < 2**10:
        return f"{count} B"
    return f"{count / 2**20:.2f} MiB" if count >= 2**18 else f"{count / 2**10:.1f} KiB"


def take_part(
    data: Path, kit: Path, policy: Path, state: Path, store: Path | None, device: str | None, stay: bool
) -> None:
    """Take part as the options of `training.site` say. Raises typer.Exit where it cannot go on."""
    screen = Screen()
    try:
        opened = Kit.open(kit, server=False)
        check(opened)
        if warning := opened.warning():
            screen.warning(warning)
        if device is not None and re.match(DEVICE, device) is None:
            raise TrainingError(f"--device: expected cpu, cuda or cuda:N, found {device!r}")
        hospital = Hospital(opened, data, policy, state, screen, store, device)
        if not data.is_dir():
            raise TrainingError(f"{data} is not a folder; give this hospital's folder with --data")
        try:
            screen.say(f"{opened.name}: {hospital.run(stay=stay)}")
        except KeyboardInterrupt:
            screen.say("left the run; the same command joins again")
            raise typer.Exit(INTERRUPTED) from None
    except (TrainingError, LocumStoreError, OSError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(f"error {in_words(error)}")
        raise typer.Exit(FAILED) from None
