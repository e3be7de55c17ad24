"""Take part in a federation over the network, as one hospital.

    python -m training.site --data FOLDER --kit KIT --policy policy.yaml
    python -m training.site doctor            what this machine has, what is wrong, what to do

FOLDER is this hospital's own, laid out as one site of a federation (images/ and masks/, or a folder per
class). It is checked before the hospital joins; nothing in it leaves but what the policy allows. Ctrl-C
leaves the run; the same command joins again.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from model_store.errors import LocumStoreError
from training.algorithm import Group, Phase, Plan
from training.config import DEVICE
from training.engine.egress import SiteSpec, may_take_part
from training.errors import TrainingError
from training.network.hospital import Hospital, Sent
from training.network.kits import Kit
from training.network.messages import Invitation
from training.privacy import Noising

FAILED, INTERRUPTED = 2, 130
_NEEDED, _LOCAL = "This hospital", "On this machine"


class _Screen:
    """Shows the hospital's part of a run on the terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True, markup=False)
        self._waiting = False

    def waiting(self, reason: str) -> None:
        """Say once that the operator cannot be reached."""
        if not self._waiting:
            self._console.print(f"waiting for the operator: {reason}")
        self._waiting = True

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
        metrics = f"; metrics {', '.join(sent.metrics)}" if sent.metrics else ""
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


def _size(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**18 else f"{count / 2**10:.1f} KiB"


def site(
    data: Annotated[Path, typer.Option(help="This hospital's folder.", rich_help_panel=_NEEDED)],
    kit: Annotated[
        Path,
        typer.Option(help="The kit that the operator made for this hospital.", rich_help_panel=_NEEDED),
    ],
    policy: Annotated[
        Path,
        typer.Option(
            help="policy.yaml: what may leave; read again before every step.", rich_help_panel=_NEEDED
        ),
    ],
    state: Annotated[
        Path | None,
        typer.Option(help="Folder for memories and logs; KIT/state by default.", rich_help_panel=_LOCAL),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            help="This hospital's model store, for a method that adapts a backbone.", rich_help_panel=_LOCAL
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda or cuda:N of this hospital; the operator's by default.", rich_help_panel=_LOCAL
        ),
    ] = None,
) -> None:
    """Take part in a federation over the network, as one hospital."""
    screen = _Screen()
    try:
        opened = Kit.open(kit, server=False)
        if device is not None and re.match(DEVICE, device) is None:
            raise TrainingError(f"--device: expected cpu, cuda or cuda:N, found {device!r}")
        hospital = Hospital(opened, data, policy, state or kit / "state", screen, store, device)
        if not data.is_dir():
            raise TrainingError(f"{data} is not a folder; give this hospital's folder with --data")
        try:
            screen.say(f"{opened.name}: {hospital.run()}")
        except KeyboardInterrupt:
            screen.say("left the run; the same command joins again")
            raise typer.Exit(INTERRUPTED) from None
    except (TrainingError, LocumStoreError, OSError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(f"error {error}")
        raise typer.Exit(FAILED) from None


def doctor(
    kit: Annotated[
        Path | None, typer.Option(help="The kit that the operator made for this hospital.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="This hospital's folder.")] = None,
    policy: Annotated[Path | None, typer.Option(help="policy.yaml.")] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for memories and logs.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N of this hospital.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per part, by lines.")] = False,
) -> None:
    """Say what this hospital's machine has and what is wrong; end with 1 if anything is. It joins no run."""
    from training.network.doctor import Hospital, report

    if device is not None and re.match(DEVICE, device) is None:
        raise typer.BadParameter(f"--device: expected cpu, cuda or cuda:N, found {device!r}")
    raise typer.Exit(int(report(Hospital(kit, data, policy, state, device), as_json)))


if __name__ == "__main__":
    # A command of its own, so that the options of `site` stay required.
    if sys.argv[1:2] == ["doctor"]:
        del sys.argv[1]
        typer.run(doctor)
    else:
        typer.run(site)
